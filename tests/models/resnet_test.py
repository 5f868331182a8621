"""ResNets: published numbers of weights, shapes, and parts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.models.layers.residual_blocks import BasicBlock
from tekso.models.resnet import DEPTHS, SMALL_STEM, ResNet, resnet


def num_trainable(params: Any) -> int:
    specs = params.instantiate().specs().values()
    return sum(math.prod(spec.shape) for spec in specs if spec.trainable)


@pytest.mark.parametrize(
    ("depth", "count"),
    [
        (18, 11_689_512),
        (34, 21_797_672),
        (50, 25_557_032),
        (101, 44_549_160),
        (152, 60_192_808),
    ],
)
def test_published_networks_have_their_number_of_weights(depth: int, count: int) -> None:
    assert num_trainable(resnet(depth, classes=1000)) == count
    assert sorted(DEPTHS) == [18, 34, 50, 101, 152]


def test_weights_of_other_sizes() -> None:
    assert num_trainable(resnet(50, classes=1001)) == 25_559_081
    # Grey images, 10 classes, a 3x3 stem: 64 * (9 - 147) weights fewer in the stem.
    small = resnet(18, classes=10, channels=1, image_size=28, stem=SMALL_STEM)
    assert num_trainable(small) == 11_689_512 - 990 * 513 - 64 * (7 * 7 * 3 - 9)


SMALL: dict[str, Any] = {"classes": 5, "width": 4, "num_blocks": [1, 2]}


def test_pieces_and_scores_of_images_of_any_size() -> None:
    model = ResNet.Params(block=BasicBlock.Params(), **SMALL).instantiate()
    names = [piece.name for piece in model.pieces()]
    assert names == ["stem", "blocks/0", "blocks/1", "blocks/2", "classifier"]
    theta = model.init(0)
    for size in ((40, 33), (17, 24)):
        logits = model.fprop(theta, tf.ones([2, *size, 3], tf.uint8), StepContext())
        assert logits.shape == (2, 5) and logits.dtype == tf.float32
    half = model.fprop(theta, tf.ones([2, 16, 16, 3], tf.float32), StepContext(mode="train"))
    assert np.isfinite(half).all()


def test_groups_of_blocks_halve_the_image_and_double_the_width() -> None:
    model = ResNet.Params(stem=SMALL_STEM, drop_path_rate=0.2, **SMALL).instantiate()
    found = [
        (b.params.input_dim, b.params.width, b.params.stride, b.params.drop_path_rate)
        for b in model.blocks
    ]
    assert found == [(4, 4, 1, 0.0), (16, 8, 2, 0.1), (32, 8, 1, 0.2)]
    assert model.classifier.params.input_dim == 32


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (lambda: resnet(20, classes=3), r"depth is 20.*\[18, 34, 50, 101, 152\]"),
        (lambda: ResNet.Params(classes=3, num_blocks=[2, 0]), r"num_blocks is \[2, 0\]"),
        (lambda: ResNet.Params(classes=0), "classes 0 must be at least 1"),
    ],
)
def test_what_cannot_be_built_is_refused(params: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        params().instantiate()


def test_images_with_other_channels_are_refused() -> None:
    model = ResNet.Params(**SMALL).instantiate()
    with pytest.raises(ValueError, match=r"x is \(2, 8, 8, 1\).*channels is 3"):
        model.fprop(model.init(0), tf.ones([2, 8, 8, 1]), StepContext())
