"""Arrays and tensors that a session is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework.params.types import type_name


def dtype_of(value: Any) -> np.dtype[Any]:
    """Returns the dtype of an array or a tensor, as a NumPy dtype."""
    found: np.dtype[Any] = tf.as_dtype(value.dtype).as_numpy_dtype
    return np.dtype(found)


def as_type(array: np.ndarray, dtype: str) -> np.ndarray:
    """Returns an array with a type of TensorFlow; the array itself if it has this type."""
    return array.astype(tf.as_dtype(dtype).as_numpy_dtype, copy=False)


def narrowed(value: Any) -> Any:
    """Returns an array or a tensor of examples; float64 becomes float32."""
    array = value if isinstance(value, tf.Tensor) else np.asarray(value)
    if array.dtype != np.float64:
        return array
    return tf.cast(array, tf.float32) if isinstance(array, tf.Tensor) else array.astype(np.float32)


def not_named(value: Any, example: str) -> list[str]:
    """Returns the problem of a value that is no dict, or []; `example` returns one that is."""
    if isinstance(value, Mapping):
        return []
    return [f"a dict of arrays by name, as {example} returns, not {type_name(type(value))}"]
