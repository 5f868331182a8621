"""Nests of tensors in which a leaf may be None: an optional tensor that is not there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

_PLAIN = (np.ndarray, np.generic, bool, int, float, complex)


def is_plain(leaf: Any) -> bool:
    """Returns whether a leaf is an array of NumPy or a number, not a tensor."""
    return isinstance(leaf, _PLAIN)


def as_tensors(nest: Any) -> Any:
    """Returns a nest with a tensor in place of each array of NumPy and each number."""
    if not any(map(is_plain, tf.nest.flatten(nest))):
        return nest
    return tf.nest.map_structure(
        lambda leaf: tf.convert_to_tensor(leaf) if is_plain(leaf) else leaf, nest
    )


def tensors(nest: Any) -> list[Any]:
    """Returns the leaves of a nest that are not None."""
    return [leaf for leaf in tf.nest.flatten(nest) if leaf is not None]


def has_gradient(tensor: Any) -> bool:
    """Returns whether a tensor, or one of a spec, has a gradient: of floats or complex numbers."""
    dtype = tf.as_dtype(tensor.dtype)
    return bool(dtype.is_floating or dtype.is_complex)


def filled(nest: Any, values: Iterable[Any]) -> Any:
    """Returns a nest with the next of the values in place of each leaf that is not None."""
    given = iter(values)
    return mapped(lambda _: next(given), nest)


def mapped(function: Callable[[Any], Any], nest: Any) -> Any:
    """Returns a nest with the result of a function for each leaf that is not None."""
    return tf.nest.map_structure(lambda leaf: None if leaf is None else function(leaf), nest)


def stacked(nests: Iterable[Any]) -> Any:
    """Returns nests of one structure as a nest of stacked tensors."""
    return tf.nest.map_structure(lambda *each: None if each[0] is None else tf.stack(each), *nests)
