"""The speed of convolutions is found from steps with and without them."""

from __future__ import annotations

import pytest

from tekso.framework.run import convolution_probes
from tekso.framework.run.convolution_probes import FEW, MANY, STACKS, speeds_of


def test_planted_times_are_found() -> None:
    rest = [1e-3 * (i + 1) for i in range(len(STACKS))]
    whole = [
        more + 3 * stack.layers * (2e-4 + stack.flops / (1e9 * stack.intensity))
        for stack, more in zip(STACKS, rest, strict=True)
    ]
    found = speeds_of(whole, rest)
    # With more images, the same convolutions have a few more operations per byte.
    assert found["convolution_s"] == pytest.approx(2e-4, rel=0.05)
    speeds = dict(found["convolutions"])
    assert speeds == dict(found["filter_gradients"])
    assert list(speeds) == sorted(s.intensity for s in STACKS if s != FEW)
    for intensity, speed in speeds.items():
        assert speed == pytest.approx(1e9 * intensity, rel=0.05)


def test_disturbed_steps_make_no_time_negative_and_no_speed_infinite() -> None:
    with pytest.raises(ValueError, match=r"take no longer than steps without"):
        speeds_of([1e-3] * len(STACKS), [2e-3] * len(STACKS))
    index = STACKS.index(MANY)
    times = [1e-2 * (i != index) for i in range(len(STACKS))]
    found = speeds_of(times, [0.0] * len(STACKS))  # many images take no time at all
    assert 0 < found["convolution_s"] <= 1e-2 / (3 * FEW.layers)
    speeds = dict(found["convolutions"])
    assert len(speeds) == len(STACKS) - 2 and MANY.intensity not in speeds
    assert all(0 < speed < 1e13 for speed in speeds.values())


def test_a_convolution_is_counted_by_its_operations_and_its_bytes() -> None:
    stack = convolution_probes.LayerStack(2, 4, 3, 1)
    assert stack.flops == 2 * (2 * 4 * 4 * 3) * (3 * 3 * 3)
    assert stack.intensity == stack.flops / (4 * (2 * (2 * 4 * 4 * 3) + 3 * 3 * 3 * 3))
