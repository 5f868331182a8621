"""Checks the shape and the dimension names with which a layer declares a weight."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any


def checked_shape(where: str, shape: Any, dims: Any) -> tuple[int, ...]:
    """Returns the sizes of a weight.

    Args:
      where: the call that declares the weight, for messages.
      shape: the sizes, as the layer gives them.
      dims: the names of the dims, as the layer gives them.

    Raises:
      TypeError: the shape or the dims are no sequence, or a size is no whole number.
      ValueError: a size is not positive, the number of dims differs from the rank of the shape, or
        a dim is named twice.
    """
    for name, value, example in (("shape", shape, "[3, 5]"), ("dims", dims, '("embed", "mlp")')):
        if isinstance(value, str) or not isinstance(value, Iterable):
            raise TypeError(f"{where}: {name} is {value!r}, but must be a list, as in {example}")
    sizes = tuple(_size(where, list(shape), size) for size in shape)
    dims = list(dims)
    if len(dims) != len(sizes) or any(n <= 0 for n in sizes):
        raise ValueError(
            f"{where}: shape {list(sizes)} with dims {dims}: "
            "all sizes must be positive, and each needs a dim name or None"
        )
    named = [d for d in dims if d is not None]
    if len(set(named)) != len(named):
        raise ValueError(
            f"{where}: dims {dims} contain a name twice; use None for a dim that will "
            "not be sharded"
        )
    return sizes


def _size(where: str, shape: list[Any], size: Any) -> int:
    try:
        return int(size) if isinstance(size, float) and size.is_integer() else operator.index(size)
    except TypeError:
        raise TypeError(
            f"{where}: shape {shape} has the size {size!r}, but a size must be a whole number that "
            "is known when the layer is built: make it a field of its Params"
        ) from None
