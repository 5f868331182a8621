"""How an elementwise cluster of a step is compiled: the `fuse` that primitives are given.

`fuse(function, **static)` returns a function of tensors. Plain: `function` itself with its static
arguments bound. Compiled: one XLA program for the cluster, between matrix products that stay with
the vendor's library, which is the fastest mixture on CPU.

A function of its own is what XLA compiles best (`XlaFusion`). Where a program is rewritten for many
devices before it runs, such a function does not outlive that, but marks on its ops do
(`MarkedFusion`).
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
    """Leaves a cluster to TensorFlow's own kernels."""
    return functools.partial(function, **static)


class XlaFusion:
    """Compiles every cluster by XLA. One instance for each tower: concurrent ones share nothing."""

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


class MarkedFusion:
    """Marks the ops of large clusters; TensorFlow gathers those of each for XLA before they run.

    What stands between them by then, as an exchange with other devices, stays outside. It works
    only while a graph is made. Stretches of graphs within one another may be gathered together.

    Args:
      min_elements: of all tensors that a cluster is given, on all devices together; smaller ones
        gain less than the call of a compiled program costs, and are left to TensorFlow's kernels.
        A tensor of unknown size counts nothing.
    """

    def __init__(self, min_elements: int = 1 << 19) -> None:
        self._min_elements = min_elements

    def __call__(self, function: Callable[..., Any], **static: Any) -> Callable[..., Any]:
        """Returns the function of tensors, whose ops are marked."""

        def marked(*tensors: tf.Tensor) -> Any:
            if sum(x.shape.num_elements() or 0 for x in tensors) < self._min_elements:
                return function(*tensors, **static)
            with tf.xla.experimental.jit_scope():
                return function(*tensors, **static)

        return marked
