"""SSD300: number of weights of its parts, and the order of its outputs."""

from __future__ import annotations

import math

import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.models.ssd import Ssd


def test_number_of_weights_of_every_part() -> None:
    specs = Ssd.Params(classes=81).instantiate().specs()
    parts = {"backbone": 0, "maps": 0, "box_heads": 0, "class_heads": 0}
    for path, spec in specs.items():
        name = path.partition("/")[0]
        name = "backbone" if name in ("stem", "blocks") else name
        parts[name] += math.prod(spec.shape) if spec.trainable else 0
    assert parts == {
        "backbone": 8_170_304,
        "maps": 3_574_400,
        "box_heads": 387_192,
        "class_heads": 7_840_638,
    }
    assert sum(parts.values()) == 19_972_534


def test_outputs_are_in_the_order_of_the_default_boxes() -> None:
    model = Ssd.Params(classes=3, width=4, num_blocks=[1, 1, 1]).instantiate()
    theta = model.init(0)
    # Heads that say which shape it is: their weights are 0, and their biases count.
    for k, count in enumerate((4, 6, 6, 6, 4, 4)):
        head = theta.class_heads[str(k)]
        head["w"] = tf.zeros_like(head.w)
        head["b"] = tf.range(count * 3, dtype=tf.float32) + 100 * k
    y = model.fprop(theta, tf.ones([1, 300, 300, 3]), StepContext())
    assert y["codes"].shape == (1, 8732, 4) and y["logits"].shape == (1, 8732, 3)
    logits, at = y["logits"].numpy()[0], 0
    for k, (size, count) in enumerate(zip((38, 19, 10, 5, 3, 1), (4, 6, 6, 6, 4, 4), strict=True)):
        for shape in range(count):
            own = logits[at : at + size * size]
            assert (own == [100 * k + 3 * shape + c for c in range(3)]).all()
            at += size * size


def test_other_maps_have_other_default_boxes() -> None:
    params = Ssd.Params(classes=3, width=4, num_blocks=[1, 1, 1], image_size=96)
    params.set(steps=[8, 16, 32, 48], scales=[8, 20, 40, 60, 90])
    model = params.set(aspect_ratios=[[2], [2, 3], [], [2]]).instantiate()
    assert model.levels.map_sizes == (12, 6, 3, 1)
    count = 4 * 144 + 6 * 36 + 2 * 9 + 4
    assert model.default_boxes().shape == (count, 4)
    y = model.fprop(model.init(0), tf.ones([2, 96, 96, 3]), StepContext())
    assert y["codes"].shape == (2, count, 4) and y["logits"].shape == (2, count, 3)


def test_impossible_sizes_are_refused() -> None:
    small = Ssd.Params(classes=3, width=4, num_blocks=[1, 1, 1])
    with pytest.raises(ValueError, match=r"image_size 64 .* the sizes \[8, 4, 2, 0"):
        small.copy().set(image_size=64).instantiate()
    with pytest.raises(ValueError, match="there are 2 steps and 7 scales, but must be 6 and 7"):
        small.copy().set(steps=[8, 16]).instantiate()
    with pytest.raises(ValueError, match="must be three numbers"):
        small.copy().set(num_blocks=[1, 1]).instantiate()
    model = small.instantiate()
    with pytest.raises(ValueError, match="image_size is 300"):
        model.fprop(model.init(0), tf.ones([1, 200, 300, 3]), StepContext())
