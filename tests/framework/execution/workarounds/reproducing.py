"""What the reproductions of defects of DTensor share: values, layouts and comparisons.

A reproduction is a function `(place, avoided)` that returns whether the values are right; a defect
may also be an error or a crash. With `avoided`, it uses the workaround.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework.execution.mesh.layouts import MeshShape
from tekso.framework.execution.mesh.placement import Placement

WHOLE_2D, ROWS, COLUMNS = (None, None), ("m", None), (None, "m")
MESH = MeshShape.parse("m:2")

Place = Placement
Compiled = Callable[..., Any]


def values(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def equal(place: Place, y: tf.Tensor, expected: np.ndarray) -> bool:
    return bool(np.allclose(place.to_host(y), expected, rtol=1e-5, atol=1e-5))


def computed(function: Compiled, *inputs: tf.Tensor) -> tf.Tensor:
    return tf.function(function, autograph=False)(*inputs)
