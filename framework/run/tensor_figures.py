"""Figures of tensors on disk, computed in float64 with one chunk in memory."""

from __future__ import annotations

import dataclasses
import math

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

    The others are None if no element is finite.
    """

    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    norm: float | None
    not_finite: int


def figures(tensor: TensorInFiles, reader: TensorReader) -> Figures:
    """Returns the figures of a tensor.

    Raises:
      DamagedCheckpointError: its bytes have changed, or cannot be read.
    """
    count, mean, spread, norm, not_finite = 0, 0.0, 0.0, 0.0, 0
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
        # The spread is the norm of the distances from the mean. Of two parts with n and m elements,
        # whose means differ by d, it is the root of both spreads squared + d² n m / (n + m).
        own = float(kept.mean())
        total = count + kept.size
        between = (own - mean) * math.sqrt(count * kept.size / total)
        spread = math.hypot(spread, _norm(kept - own), between)
        mean += (own - mean) * kept.size / total
        count = total
    if not count:
        return Figures(None, None, None, None, None, not_finite)
    return Figures(mean, spread / math.sqrt(count), least, most, norm, not_finite)


@dataclasses.dataclass(frozen=True)
class Difference:
    """How two tensors of one shape differ.

    Attributes:
      different: number of elements that are not the same: other values, or other bits.
      absolute: largest absolute difference; infinite if only one of two elements is finite.
      relative: largest absolute difference, divided by the larger of the two absolute values.
      of_norm: norm of the difference, divided by the larger of the two norms; infinite if an
        element is not finite.
    """

    different: int
    absolute: float
    relative: float
    of_norm: float


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
    norms = np.zeros(3)  # of the tensors, and of their difference
    for a, b in zip(reader.chunks(one), reader.chunks(other), strict=True):  # the same boxes
        wholes = (_as_float64(a), _as_float64(b))
        if one.dtype == other.dtype:
            same = (_bits(a) == _bits(b)).all(axis=-1)
            a, b = a[~same], b[~same]
            different += a.size
        elif np.iscomplexobj(a) != np.iscomplexobj(b):
            a, b = a.astype(np.complex128), b.astype(np.complex128)
        x, y = _as_float64(a), _as_float64(b)
        apart_ones = (x != y) & ~(np.isnan(x) & np.isnan(y))
        x, y = x[apart_ones], y[apart_ones]
        if one.dtype != other.dtype:
            different += x.size
        if x.size:
            with np.errstate(all="ignore"):
                apart = _without_nan(np.abs(x - y))
                share = _without_nan(apart / np.maximum(np.abs(x), np.abs(y)))
            absolute, relative = max(absolute, apart.max()), max(relative, share.max())
        with np.errstate(all="ignore"):
            found = [_norm(whole) if whole.size else 0.0 for whole in (*wholes, x - y)]
            norms = np.hypot(norms, found)
    if not different:
        return None
    of_norm = 0.0
    if norms[2]:
        of_norm = float(norms[2] / norms[:2].max()) if np.isfinite(norms).all() else math.inf
    return Difference(different, float(absolute), float(relative), of_norm)


def _as_float64(chunk: np.ndarray) -> np.ndarray:
    if np.iscomplexobj(chunk):
        chunk = chunk.view(chunk.real.dtype)
    return chunk.astype(np.float64)


def _without_nan(values: np.ndarray) -> np.ndarray:
    """Returns the values with infinity instead of NaN."""
    return np.where(np.isnan(values), np.inf, values)


def _bits(chunk: np.ndarray) -> np.ndarray:
    return chunk.view(np.uint8).reshape(chunk.size, chunk.itemsize)


def _norm(values: np.ndarray) -> float:
    """Returns the norm; it overflows only if its value does."""
    largest = float(np.abs(values).max())
    if largest == 0.0:
        return 0.0
    return largest * math.sqrt(float(np.square(values / largest).sum()))
