"""U-Nets of images and volumes: number of weights by formula, size of the output, skips."""

from __future__ import annotations

import math

import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.models.unet import UNet, UNet3D


def test_number_of_weights_by_formula() -> None:
    specs = UNet.Params(channels=1, classes=2).instantiate().specs().values()
    found = sum(math.prod(spec.shape) for spec in specs if spec.trainable)
    widths = [64, 128, 256, 512, 1024]
    double = [9 * a * b + 9 * b * b + 4 * b for a, b in zip([1, *widths], widths, strict=False)]
    up = [4 * 2 * b * b + b + 9 * 2 * b * b + 9 * b * b + 4 * b for b in widths[:-1]]
    assert found == sum(double) + sum(up) + 64 * 2 + 2


def test_labels_have_the_size_of_the_image() -> None:
    model = UNet.Params(channels=2, classes=3, num_scales=2, width=4).instantiate()
    assert [piece.name for piece in model.pieces()] == [
        "down/0", "down/1", "down/2", "up/0", "up/1", "classifier",
    ]  # fmt: skip
    theta = model.init(0)
    x = tf.random.stateless_normal([2, 8, 12, 2], seed=[1, 2])
    y = model.fprop(theta, x, StepContext())
    assert y.shape == (2, 8, 12, 3) and y.dtype == tf.float32
    # Every pixel sees far through the lowest scale, and itself through the skip.
    with tf.GradientTape() as tape:
        tape.watch(x)
        one = model.fprop(theta, x, StepContext())[0, 0, 0, 0]
    seen = tf.reduce_any(tape.gradient(one, x) != 0, -1).numpy()
    assert seen[0, 0, 0] and seen[0, 7].any() and not seen[1].any()


def test_images_that_cannot_be_halved_are_refused() -> None:
    model = UNet.Params(classes=3, num_scales=2, width=4).instantiate()
    with pytest.raises(ValueError, match="multiples of 4: num_scales is 2"):
        model.fprop(model.init(0), tf.ones([1, 8, 6, 3]), StepContext())
    with pytest.raises(ValueError, match="num_scales 0"):
        UNet.Params(classes=3, num_scales=0).instantiate()


def test_the_network_of_volumes_has_the_published_weights() -> None:
    """Çiçek et al. 2016 count 19,069,955: one number per channel of a convolution with norm."""
    specs = UNet3D.Params(channels=3, classes=3).instantiate().specs()
    found = sum(math.prod(spec.shape) for spec in specs.values() if spec.trainable)
    scales = sum(spec.shape[0] for path, spec in specs.items() if path.endswith("norm/scale"))
    assert (found - scales, scales) == (19_069_955, 2336)


def test_labels_have_the_size_of_the_volume() -> None:
    model = UNet3D.Params(channels=2, classes=3, num_scales=2, width=2).instantiate()
    names = ["down/0", "down/1", "down/2", "up/0", "up/1", "classifier"]
    assert [piece.name for piece in model.pieces()] == names
    theta = model.init(0)
    x = tf.random.stateless_normal([2, 4, 8, 12, 2], seed=[1, 2])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = model.fprop(theta, x, StepContext())
        one = y[0, 0, 0, 0, 0]
    assert y.shape == (2, 4, 8, 12, 3) and y.dtype == tf.float32
    seen = tf.reduce_any(tape.gradient(one, x) != 0, -1).numpy()
    assert seen[0, 0, 0, 0] and seen[0, 3, :, 7].any() and not seen[1].any()


def test_volumes_are_checked() -> None:
    model = UNet3D.Params(classes=3, channels=1, num_scales=2, width=2).instantiate()
    with pytest.raises(ValueError, match="depth, height and width must be multiples of 4: num_sc"):
        model.fprop(model.init(0), tf.ones([1, 6, 8, 8, 1]), StepContext())
    with pytest.raises(ValueError, match=r"volumes \[batch, depth, height, width, 1\]"):
        model.fprop(model.init(0), tf.ones([1, 8, 8, 1]), StepContext())
