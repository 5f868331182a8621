"""GroupNorm and DropBlock against their formulas in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.theta import Theta
from tekso.models.layers.drop_block import DropBlock
from tekso.models.layers.group_norm import GroupNorm

X = np.random.default_rng(0).normal(size=(3, 5, 4, 6)) * [1, 2, 3, 4, 5, 6] + 2


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_group_norm_is_of_an_example_and_a_group(groups: int) -> None:
    layer = GroupNorm.Params(dim=6, num_groups=groups, dtype="float64").instantiate()
    assert {path: s.dims for path, s in layer.specs().items()} == {
        "scale": ("channels",),
        "bias": ("channels",),
    }
    rng = np.random.default_rng(1)
    scale, bias = rng.normal(size=6), rng.normal(size=6)
    x = X.reshape(3, 20, groups, 6 // groups)
    mean, variance = x.mean((1, 3), keepdims=True), x.var((1, 3), keepdims=True)
    wanted = ((x - mean) / np.sqrt(variance + 1e-5)).reshape(X.shape) * scale + bias
    theta = layer.theta({"scale": tf.constant(scale), "bias": tf.constant(bias)})
    for mode in ("train", "eval"):
        found = layer.fprop(theta, tf.constant(X), StepContext(mode=mode))
        np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9)
    assert not layer.couples_examples


def test_groups_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="num_groups 4 must divide dim 6"):
        GroupNorm.Params(dim=6, num_groups=4).instantiate()


def masks(rate: float, size: int, shape: tuple[int, ...], **ctx: int) -> np.ndarray:
    layer = DropBlock.Params(rate=rate, block_size=size).instantiate()
    y = layer.fprop(Theta(), tf.ones(shape), StepContext(mode="train", seed=1, step=2, **ctx))
    return y.numpy()


def test_drop_block_drops_whole_blocks_and_keeps_the_mean() -> None:
    y = masks(0.1, 3, (40, 12, 10, 4))
    np.testing.assert_allclose(y.mean((1, 2, 3)), 1, rtol=1e-5)
    dropped = y == 0
    assert 0.06 < dropped.mean() < 0.12  # blocks overlap, so it is a little less than the rate
    # Every dropped element is in a block of 3 x 3 that is dropped as a whole.
    windows = np.lib.stride_tricks.sliding_window_view(dropped, (3, 3), (1, 2)).all((-2, -1))
    covered = np.zeros_like(dropped)
    for i, j in np.ndindex(3, 3):
        covered[:, i : i + 10, j : j + 8] |= windows
    np.testing.assert_array_equal(covered, dropped)
    assert dropped[:, 0].any() and dropped[:, -1].any() and dropped[:, :, -1].any()


def test_drop_block_depends_on_the_global_position() -> None:
    whole = masks(0.3, 2, (6, 5, 5, 2))
    np.testing.assert_array_equal(masks(0.3, 2, (2, 5, 5, 2), example_offset=4), whole[4:])
    layer = DropBlock.Params(rate=0.3).instantiate()
    np.testing.assert_array_equal(layer.fprop(Theta(), tf.constant(X), StepContext()), X)
    whole_image = masks(0.5, 9, (50, 4, 4, 1))  # a block is at most the image
    assert set(np.unique(whole_image)) == {0, 1}
    with pytest.raises(ValueError, match="block_size 0"):
        DropBlock.Params(block_size=0).instantiate()
