"""Figures of tensors on disk, computed in float64 with one chunk in memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from tekso.framework.run.stored_tensors import TensorInFiles, TensorReader


@dataclasses.dataclass(frozen=True)
class Figures:
    """Figures of the finite elements of a tensor; complex numbers count as two elements.

    Attributes:
      mean: their mean.
      std: their standard deviation: the square root of the mean square distance from the mean.
      min: the smallest.
      max: the largest.
      norm: the square root of the sum of their squares.
      not_finite: number of elements that are infinite or NaN.
    """

    mean: float
    std: float
    min: float
    max: float
    norm: float
    not_finite: int


def figures(tensor: TensorInFiles, reader: TensorReader) -> Figures | None:
    """Returns the figures of a tensor; None if no element is finite.

    Raises:
      DamagedCheckpointError: its bytes have changed, or cannot be read.
    """
    count, mean, squares, norm, not_finite = 0, 0.0, 0.0, 0.0, 0
    least, most = math.inf, -math.inf
    for chunk in reader.chunks(tensor):
        values = _as_float64(chunk)
        finite = np.isfinite(values)
        kept = values if finite.all() else values[finite]
        not_finite += values.size - kept.size
        if not kept.size:
            continue
        least, most = min(least, float(kept.min())), max(most, float(kept.max()))
        norm = math.hypot(norm, _norm(kept))
        # Of two parts with n and m elements, whose means differ by d: squares + d² n m / (n + m).
        own = float(kept.mean())
        own_squares = _norm(kept - own) ** 2
        total = count + kept.size
        squares += own_squares + (own - mean) ** 2 * count * kept.size / total
        mean += (own - mean) * kept.size / total
        count = total
    if not count:
        return None
    return Figures(mean, math.sqrt(squares / count), least, most, norm, not_finite)


@dataclasses.dataclass(frozen=True)
class Difference:
    """How two tensors of one shape differ.

    Attributes:
      different: number of elements that are not the same: other values, or other bits.
      absolute: largest absolute difference; infinite if only one of two elements is finite.
      relative: largest absolute difference, divided by the larger of the two absolute values.
    """

    different: int
    absolute: float
    relative: float


def difference(one: TensorInFiles, other: TensorInFiles, reader: TensorReader) -> Difference | None:
    """Returns how two tensors of one shape differ; None if they are equal to the last bit.

    Tensors of different dtypes are compared by their values.

    Raises:
      ValueError: their shapes differ.
      DamagedCheckpointError: the bytes of one have changed, or cannot be read.
    """
    if one.shape != other.shape:
        raise ValueError(f"{one.key} has shape {one.shape} and {other.shape}: compare equal shapes")
    different, absolute, relative = 0, 0.0, 0.0
    for a, b in _chunks_of_both(one, other, reader):
        if a.dtype == b.dtype:
            same = (_bits(a) == _bits(b)).all(axis=-1)
            a, b = a[~same], b[~same]
        x, y = _as_float64(a), _as_float64(b)
        if one.dtype != other.dtype:
            same = (x == y) | (np.isnan(x) & np.isnan(y))
            x, y = x[~same], y[~same]
        if not x.size:
            continue
        different += a.size if one.dtype == other.dtype else x.size
        with np.errstate(all="ignore"):
            apart = np.where(x == y, 0.0, np.abs(x - y))
            apart = np.where(np.isnan(x) & np.isnan(y), 0.0, apart)
            apart = np.where(np.isnan(apart), np.inf, apart)
            share = np.where(apart == 0, 0.0, apart / np.maximum(np.abs(x), np.abs(y)))
            share = np.where(np.isnan(share), np.inf, share)
        absolute = max(absolute, float(apart.max()))
        relative = max(relative, float(share.max()))
    return Difference(different, absolute, relative) if different else None


def _chunks_of_both(
    one: TensorInFiles, other: TensorInFiles, reader: TensorReader
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    # Both are of one shape, so their chunks are the same boxes.
    yield from zip(reader.chunks(one), reader.chunks(other), strict=True)


def _as_float64(chunk: np.ndarray) -> np.ndarray:
    if np.iscomplexobj(chunk):
        chunk = chunk.view(chunk.real.dtype)
    return chunk.astype(np.float64)


def _bits(chunk: np.ndarray) -> np.ndarray:
    return chunk.view(np.uint8).reshape(chunk.size, chunk.itemsize)


def _norm(values: np.ndarray) -> float:
    """Returns the norm; it overflows only if its value does."""
    largest = float(np.abs(values).max())
    if largest == 0.0:
        return 0.0
    return largest * math.sqrt(float(np.square(values / largest).sum()))
