"""Adafactor: which weights keep rows and columns, and which dims are factored."""

from __future__ import annotations

import numpy as np
import pytest
from optimizer_formulas import (
    RATES,
    data,
    make_spec,
    rms,
    run,
)

from tekso.framework import optimizers


@pytest.mark.parametrize(
    ("shape", "stacked", "numbers", "names"),
    [
        ((1024, 4096), 0, 5120, ["row_second_moment", "column_second_moment"]),
        ((4096, 1024), 0, 5120, ["row_second_moment", "column_second_moment"]),
        ((100, 4096), 0, 409_600, ["second_moment"]),
        ((128, 128), 0, 256, ["row_second_moment", "column_second_moment"]),
        ((127, 4096), 0, 127 * 4096, ["second_moment"]),
        ((4096,), 0, 4096, ["second_moment"]),
        ((1024, 4, 256), 0, 4 * (1024 + 256), ["row_second_moment", "column_second_moment"]),
        ((200, 4096), 1, 200 * 4096, ["second_moment"]),  # a stack of vectors
        ((6, 1024, 4096), 1, 6 * 5120, ["row_second_moment", "column_second_moment"]),
    ],
)
def test_adafactor_keeps_rows_and_columns_of_large_matrices(
    shape: tuple[int, ...], stacked: int, numbers: int, names: list[str]
) -> None:
    slots = optimizers.Adafactor.Params().instantiate().slots(make_spec(shape, stacked=stacked))
    assert sorted(slots) == sorted(names)  # so no first moment
    assert sum(spec.size for spec in slots.values()) == numbers


def test_adafactor_slots_keep_the_dims_of_what_is_left() -> None:
    spec = make_spec((6, 300, 4, 200), stacked=1)
    slots = optimizers.Adafactor.Params(beta1=0.9).instantiate().slots(spec)
    assert slots["row_second_moment"].dims == ("layers", "dim0", "dim1")
    assert slots["row_second_moment"].shape == (6, 300, 4)
    assert slots["column_second_moment"].dims == ("layers", "dim1", "dim2")
    assert slots["column_second_moment"].shape == (6, 4, 200)
    assert slots["first_moment"].shape == spec.shape
    assert {slot.stacked for slot in slots.values()} == {1}


def test_adafactor_factors_the_two_largest_dims_of_three() -> None:
    spec = make_spec((4, 2, 5))
    params = optimizers.Adafactor.Params(min_dim_to_factor=3, clipping_threshold=None)
    weight, gradients = data((4, 2, 5))
    given = run(params, spec, weight, gradients[:1])[0]
    for j in range(2):  # each slice along the small dim has rows and columns of its own
        square = gradients[0][:, j] ** 2
        v = np.outer(square.sum(axis=1), square.sum(axis=0)) / square.sum()
        step = RATES[0] * 0.01 * rms(weight)
        expected = weight[:, j] - step * gradients[0][:, j] / np.sqrt(v)
        np.testing.assert_allclose(given[:, j], expected, rtol=1e-11)
