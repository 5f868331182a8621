"""Compilation of elementwise clusters: the argument `fuse` of primitives.

`fuse(function, **static)` returns a function of tensors: `function` with its keyword arguments
bound, either uncompiled (`no_fusion`) or compiled by XLA. Matrix products between clusters use the
vendor's library, which is the fastest combination on CPU, except for those that `products.py`
compiles.

XLA works best with separately compiled functions (`XlaFusion`). If a program is partitioned for
many devices before it runs, separate functions are lost, but marks on ops remain (`MarkedFusion`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import tensorflow as tf


class Fuse(Protocol):
    """Compiles a pure function of tensors; `static` has its keyword arguments."""

    def __call__(self, function: Callable[..., Any], **static: Any) -> Callable[..., Any]:
        """Returns the compiled function of tensors."""
        ...


def no_fusion(function: Callable[..., Any], **static: Any) -> Callable[..., Any]:
    """Returns the function uncompiled, for TensorFlow's own kernels."""
    return functools.partial(function, **static)


class _SharedFunctions:
    """Makes one `tf.function` of every function with its keyword arguments bound."""

    _jit_compile: ClassVar[bool | None]

    def __init__(self) -> None:
        self._made: dict[Any, Callable[..., Any]] = {}

    def __call__(self, function: Callable[..., Any], **static: Any) -> Callable[..., Any]:
        """Returns the function of tensors; the same object for the same arguments."""
        key = (function, tuple(sorted(static.items())))
        if key not in self._made:
            bound = functools.partial(function, **static)
            made = tf.function(bound, jit_compile=self._jit_compile, autograph=False)
            self._made[key] = functools.partial(_call, made)
        return self._made[key]


class XlaFusion(_SharedFunctions):
    """Compiles every cluster with XLA; concurrent towers need separate instances."""

    _jit_compile = True


class SharedTraces(_SharedFunctions):
    """Traces a function once for all inputs of the same shapes; TensorFlow inlines the calls.

    Many calls of one function, such as the updates of all weights, are traced in less time than
    with `no_fusion`. The ops are the same: TensorFlow's own kernels.
    """

    _jit_compile = None


def _call(compiled: Callable[..., Any], *tensors: Any) -> Any:
    """Calls a compiled function with nests of tensors that the graph of the caller has.

    TensorFlow cannot differentiate a `tf.cond` if the call itself captures tensors of its branch.
    """
    return compiled(*tf.nest.map_structure(_captured, tensors))


def _captured(x: Any) -> Any:
    """Returns a tensor as one of the current graph."""
    is_outer = tf.is_symbolic_tensor(x) and x.graph is not tf.compat.v1.get_default_graph()
    return tf.identity(x) if is_outer else x


class MarkedFusion:
    """Marks the ops of large clusters; TensorFlow compiles them with XLA when the graph is run.

    Ops that are inserted between them later, such as collectives, are not compiled. Marks only have
    an effect in a graph. TensorFlow may merge clusters of nested graphs.

    Args:
      min_elements: minimum number of elements in all input tensors of a cluster, on all devices
        together. Smaller clusters are not marked, because calling a compiled program would cost
        more than it gains. Tensors of unknown size are not counted.
    """

    def __init__(self, min_elements: int = 1 << 19) -> None:
        self._min_elements = min_elements

    def __call__(self, function: Callable[..., Any], **static: Any) -> Callable[..., Any]:
        """Returns the function of tensors, which marks its ops."""

        def marked(*tensors: tf.Tensor) -> Any:
            if sum(x.shape.num_elements() or 0 for x in tensors) < self._min_elements:
                return function(*tensors, **static)
            with tf.xla.experimental.jit_scope():
                return function(*tensors, **static)

        return marked
