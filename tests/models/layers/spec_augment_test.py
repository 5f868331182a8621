"""SpecAugment: where masks lie, how wide they are, and what they depend on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.theta import Theta
from tekso.models.layers.frames import FrameSequence
from tekso.models.layers.spec_augment import SpecAugment, spec_augment

LENGTHS = np.array([40, 25, 3, 0] * 100)
FRAMES = FrameSequence(tf.ones([400, 40, 12]), tf.constant(LENGTHS, tf.int32))


def augmented(params: Any, frames: FrameSequence = FRAMES, **context: Any) -> np.ndarray:
    ctx = StepContext(**{"mode": "train", "seed": 3, "step": 5, **context})
    found: np.ndarray = params.instantiate().fprop(Theta(), frames, ctx).features.numpy()
    return found


def spans(covered: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns first place and width of the one span of each row, [rows]."""
    edges = np.diff(np.pad(covered.astype(int), ((0, 0), (1, 1))), axis=1)
    assert (np.abs(edges).sum(1) <= 2).all()
    return edges.argmax(1), covered.sum(1)


def test_one_frequency_mask_has_every_width_and_every_place() -> None:
    y = augmented(SpecAugment.Params(frequency_width=4, num_time_masks=0))
    assert set(np.unique(y)) == {0, 1} and (y == y[:, :1]).all()
    start, width = spans(y[:, 0] == 0)
    assert sorted(set(width)) == [0, 1, 2, 3, 4]
    counts = np.bincount(width)
    assert counts.min() > 50 and counts.max() < 115  # 80 of 400 each, 4 deviations of 8
    assert start[width == 4].min() == 0 and start[width == 4].max() == 8


def test_a_time_mask_lies_in_the_utterance_and_takes_at_most_a_share_of_it() -> None:
    params = SpecAugment.Params(num_frequency_masks=0, time_width=10, time_share=0.2)
    y = augmented(params)
    assert (y == y[:, :, :1]).all()
    start, width = spans(y[:, :, 0] == 0)
    for length, widest in ((40, 8), (25, 5), (3, 0), (0, 0)):
        of = length == LENGTHS
        assert width[of].max() == widest
        assert (start + width)[of & (width > 0)].max(initial=0) <= length
    narrow = augmented(params.copy().set(time_width=2))
    assert spans(narrow[:, :, 0] == 0)[1].max() == 2


def test_masks_depend_on_seed_step_and_global_position_alone() -> None:
    params = spec_augment("SS")
    whole = augmented(params)
    half = FrameSequence(FRAMES.features[200:], FRAMES.lengths[200:])
    np.testing.assert_array_equal(augmented(params, half, example_offset=200), whole[200:])
    assert (augmented(params, step=6) != whole).any()
    assert (augmented(params, seed=4) != whole).any()


def test_nothing_is_masked_outside_training() -> None:
    np.testing.assert_array_equal(augmented(spec_augment("LD"), mode="eval"), FRAMES.features)


def test_policies_have_the_published_numbers() -> None:
    found = {
        name: [
            spec_augment(name).get(field)
            for field in (
                "frequency_width",
                "num_frequency_masks",
                "time_width",
                "time_share",
                "num_time_masks",
            )
        ]
        for name in ("LB", "LD", "SM", "SS")
    }
    assert found == {
        "LB": [27, 1, 100, 1.0, 1],
        "LD": [27, 2, 100, 1.0, 2],
        "SM": [15, 2, 70, 0.2, 2],
        "SS": [27, 2, 70, 0.2, 2],
    }


def test_rejects_negative_widths() -> None:
    with pytest.raises(ValueError, match="time_width is -1, must be at least 0"):
        SpecAugment.Params(time_width=-1).instantiate()


WARP = SpecAugment.Params(num_frequency_masks=0, num_time_masks=0, warp_width=6)


def test_time_is_warped_by_two_linear_pieces_between_fixed_ends() -> None:
    """The features are the times of the frames, so a warp shows as the source of each frame."""
    times = np.tile(np.arange(40.0, dtype=np.float32)[None, :, None], [400, 1, 2])
    frames = FrameSequence(tf.constant(times), tf.constant(LENGTHS, tf.int32))
    y = augmented(WARP, frames)
    np.testing.assert_array_equal(y[..., 0], y[..., 1])
    y = y[..., 0]
    moves = []
    for source, length in zip(y, LENGTHS, strict=True):
        np.testing.assert_array_equal(source[length:], times[0, length:, 0])
        if length <= 12:
            np.testing.assert_array_equal(source, times[0, :, 0])
            continue
        last = length - 1
        steps = np.diff(source[:length])
        assert source[0] == 0 and source[last] == pytest.approx(last, abs=1e-4)
        assert (steps >= -1e-4).all()
        first, second = steps[0], steps[-1]
        # The lines through both ends meet at (c', c).
        moved = last * (1 - second) / (first - second) if abs(first - second) > 1e-4 else last / 2
        center = first * moved
        np.testing.assert_allclose(
            source[:length],
            np.where(np.arange(length) <= moved, first * np.arange(length),
                     last - second * (last - np.arange(length))),
            atol=2e-3,
        )  # fmt: skip
        assert 6 - 0.1 <= center <= last - 6 + 0.1
        moves.append(moved - center)
    assert -6.01 < min(moves) < -4.5 and 4.5 < max(moves) < 6.01
    assert abs(np.mean(moves)) < 1


def test_warps_depend_on_seed_step_and_global_position_and_are_off_by_default() -> None:
    rows = np.random.default_rng(0).standard_normal([400, 40, 12], np.float32)
    frames = FrameSequence(tf.constant(rows), tf.constant(LENGTHS, tf.int32))
    whole = augmented(WARP, frames)
    half = FrameSequence(frames.features[200:], frames.lengths[200:])
    np.testing.assert_array_equal(augmented(WARP, half, example_offset=200), whole[200:])
    assert (augmented(WARP, frames, step=6) != whole).any()
    np.testing.assert_array_equal(augmented(WARP, frames, mode="eval"), rows)
    assert {spec_augment(name).warp_width for name in ("LB", "LD", "SM", "SS")} == {0}
    with pytest.raises(ValueError, match="warp_width is -2, must be at least 0"):
        SpecAugment.Params(warp_width=-2).instantiate()
