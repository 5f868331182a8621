"""Arrays and tensors that a session is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework.input.loaded import RAGGED, is_ragged
from tekso.framework.layer import Layer
from tekso.framework.learning_step import EMA
from tekso.framework.params.types import type_name
from tekso.framework.state import LEARNER, WEIGHTS
from tekso.framework.theta import SEPARATOR, flatten
from tekso.framework.weight_spec import WeightSpec


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
    """Returns the problem of a value that has no arrays by name, or []; `example` returns one."""
    expected = f"expected a dict of arrays by name, as {example} returns"
    if not isinstance(value, Mapping):
        return [f"{expected}, given {type_name(type(value))}"]
    return [f"{expected}, given the key {key!r}" for key in value if not isinstance(key, str)]


def problems_of_theta(theta: Any, specs: Mapping[str, WeightSpec]) -> list[str]:
    """Returns why weights are not those of a task, or [].

    Args:
      theta: the weights.
      specs: specs of the weights of the task, by path.
    """
    if problems := not_named(theta, "session.theta()"):
        return problems
    flat = flatten(theta)
    problems = [f"{path} is missing" for path in specs if path not in flat]
    for path in specs.keys() & flat.keys():
        found, shape = getattr(flat[path], "shape", None), list(specs[path].shape)
        if found is None:
            problems.append(f"expected an array for {path}, given {type_name(type(flat[path]))}")
        elif list(found) != shape:
            problems.append(f"{path} has the shape {list(found)}, expected {shape}")
    return problems


def missing_weights(theta: Mapping[str, Any], task: Layer, path: str) -> list[str]:
    """Returns which weights of a layer are missing, or that there is no such layer, or [].

    Args:
      theta: weights of the layer, by name.
      task: the task.
      path: path of the layer; "" for the task.
    """
    begin = f"{path}{SEPARATOR}" if path else ""
    given = flatten(theta, path)
    needed = [one for one in task.specs() if one.startswith(begin)]
    if not needed and path not in (layer.path for layer in task.walk()):
        return [f"it has no layer {path!r}"]
    return [f"{one} is missing" for one in needed if one not in given]


def tensors_of(theta: Mapping[str, Any], specs: Mapping[str, WeightSpec]) -> dict[str, tf.Tensor]:
    """Returns weights by path; arrays get the dtype of the weight."""
    flat = flatten(theta)
    return {
        path: flat[path] if tf.is_tensor(flat[path]) else tf.constant(flat[path], spec.dtype)
        for path, spec in specs.items()
    }


def assigned(
    flat: Mapping[str, Any], specs: Mapping[str, WeightSpec]
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Returns the arrays that weights and their moving averages get, and what is wrong.

    Args:
      flat: values by path of the weight; they are not copied.
      specs: specs of the state of a program.
    """
    arrays: dict[str, np.ndarray] = {}
    problems: list[str] = []
    for name, value in flat.items():
        key = WEIGHTS + name
        if key not in specs:
            problems.append(f"unknown {name}")
        elif problem := _problem_of_weight(value, specs[key]):
            problems.append(f"{name} {problem}")
        else:
            average = f"{LEARNER}{name}{SEPARATOR}{EMA}"
            arrays |= {k: np.asarray(value) for k in (key, average) if k in specs}
    return arrays, problems


def _problem_of_weight(value: Any, spec: WeightSpec) -> str:
    """Returns why a value cannot be that of a weight, or ""."""
    if is_ragged(value):
        return RAGGED
    array = np.asarray(value)
    if not _is_real(array.dtype):
        return f"has the dtype {array.dtype}, expected {spec.dtype}"
    if array.shape != spec.shape:
        return f"has the shape {list(array.shape)}, expected {list(spec.shape)}"
    if not np.isfinite(as_type(array, spec.dtype)).all():
        return "has values that are not finite"
    return ""


def _is_real(dtype: np.dtype[Any]) -> bool:
    if dtype.kind in "biuf":
        return True
    try:
        return bool(tf.as_dtype(dtype).is_floating)  # bfloat16
    except TypeError:
        return False
