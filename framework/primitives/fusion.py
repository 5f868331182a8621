"""How an elementwise stretch of a step is compiled: the `fuse` that primitives are given.

`fuse(function, **static)` returns a function of tensors. Plain: `function` itself with its static
arguments bound. Compiled: one XLA program for the stretch, between matrix products that stay with
the vendor's library, which is the fastest mixture on CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import tensorflow as tf


class Fuse(Protocol):
    """Compiles a pure function of tensors; `static` are its keyword arguments."""

    def __call__(self, function: Callable[..., Any], **static: Any) -> Callable[..., Any]:
        """Returns the compiled function of tensors."""
        ...


def no_fusion(function: Callable[..., Any], **static: Any) -> Callable[..., Any]:
    """Leaves a stretch to TensorFlow's own kernels."""
    return functools.partial(function, **static)


class XlaFusion:
    """Compiles every stretch by XLA. One instance for each tower: concurrent ones share nothing."""

    def __init__(self) -> None:
        self._compiled: dict[Any, Callable[..., Any]] = {}

    def __call__(self, function: Callable[..., Any], **static: Any) -> Callable[..., Any]:
        """Returns the compiled function of tensors, the same for the same arguments."""
        key = (function, tuple(sorted(static.items())))
        if key not in self._compiled:
            self._compiled[key] = tf.function(
                functools.partial(function, **static), jit_compile=True, autograph=False
            )
        return self._compiled[key]
