"""The arrays of a regression: checks of their shapes, and their means and standard deviations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tekso.framework.input.errors import InputError
from tekso.framework.input.input import Input

X, Y, WEIGHTS = "x", "y", "weights"
_MOST_LISTED = 5
_LEAST_STEPS = 256  # different numbers of float32 in a standard deviation


def statistics(input: Input, name: str) -> tuple[list[float], list[float]]:
    """Returns the means and standard deviations of the columns of an array.

    Examples of weight 0 do not count. The deviation of a column whose values are all the same is 1.

    Args:
      input: the training input.
      name: "x" or "y".

    Raises:
      InputError: the arrays do not fit a regression.
      ValueError: the input does not have all examples in memory.
    """
    check_input("input", input)
    if input.arrays is None:
        field = {X: "features", Y: "targets"}[name]
        raise ValueError(
            f"task.{field}.mean and task.{field}.scale are not set, and {type(input).__name__} "
            "does not have all examples in memory, as Arrays does: set them"
        )
    rows = _counted(input.arrays, name)
    scale = np.where(_is_constant(rows), 1.0, rows.std(0, dtype=np.float64))
    return rows.mean(0, dtype=np.float64).tolist(), scale.tolist()


def column_warnings(train: Input) -> list[str]:
    """Returns warnings about columns that training cannot use, or only roughly."""
    warnings = []
    for name, effect in ((X, "the model cannot use them"), (Y, "there is nothing to learn")):
        if train.arrays is None:
            continue
        rows = _counted(train.arrays, name)
        constant = _is_constant(rows)
        mean, scale = rows.mean(0, dtype=np.float64), rows.std(0, dtype=np.float64)
        coarse = ~constant & (scale < _LEAST_STEPS * np.finfo(np.float32).eps * np.abs(mean))
        for columns, text in (
            (constant, f"have the same value in all training examples {{}}, so {effect}"),
            (coarse, "vary too little around their means for float32 {}: subtract a constant"),
        ):
            numbers = np.flatnonzero(columns).tolist()
            if numbers:
                which = ", ".join(map(str, numbers[:_MOST_LISTED]))
                more = ", …" if len(numbers) > _MOST_LISTED else ""
                place = f"({which}{more}, counted from 0)"
                warnings.append(f"input: {len(numbers)} columns of {name!r} {text.format(place)}")
    return warnings


def check_input(path: str, input: Input, sizes: Mapping[str, int] | None = None) -> None:
    """Checks that an input has the arrays of a regression.

    Args:
      path: path of the input, for messages.
      input: the input.
      sizes: {name: number of columns} in training; None: any.

    Raises:
      InputError: it has no examples, or an array is missing or has a wrong shape.
    """
    if input.num_batches == 0:
        raise InputError(
            f"{path} ({input.describe()}) has no examples. Add examples, or remove it from "
            "eval_inputs"
        )
    arrays = {**input.batch(0), **(input.arrays or {})}
    missing = [name for name in (X, Y, WEIGHTS) if name not in arrays]
    if missing:
        raise InputError(
            f"{path} has no array {missing[0]!r}: Regression requires {X!r} (features), {Y!r} "
            f"(targets) and {WEIGHTS!r}; given: {', '.join(map(repr, arrays)) or 'none'}"
        )
    for name, allowed in ((X, (2,)), (Y, (1, 2)), (WEIGHTS, (1,))):
        _check_shape(path, name, arrays[name], allowed)
    for name, size in (sizes or {}).items():
        found = _columns(arrays[name]).shape[1]
        if found != size:
            raise InputError(
                f"{path}: {name!r} has {found} columns, but the task has {size}: "
                "give the same columns as in training, in the same order"
            )


def _check_shape(path: str, name: str, array: np.ndarray, allowed: tuple[int, ...]) -> None:
    wanted = {
        X: "[examples, features]: for one feature use x[:, None], for more dims "
        "x.reshape(len(x), -1)",
        Y: "[examples, targets], or [examples] for one target",
        WEIGHTS: "[examples], one number per example",
    }[name]
    if array.ndim not in allowed or 0 in array.shape[1:]:
        shape = ", ".join(map(str, ("examples", *array.shape[1:])))
        raise InputError(f"{path}: {name!r} is [{shape}], but must be {wanted}")


def _counted(arrays: Mapping[str, Any], name: str) -> np.ndarray:
    """Returns the rows of the examples that count, [examples, columns]."""
    rows = _columns(np.asarray(arrays[name]))
    weights = arrays.get(WEIGHTS)
    return rows if weights is None else rows[np.asarray(weights) > 0]


def _columns(array: np.ndarray) -> np.ndarray:
    return array[:, None] if array.ndim == 1 else array


def _is_constant(rows: np.ndarray) -> np.ndarray:
    found: np.ndarray = rows.min(0) == rows.max(0)
    return found
