"""Symbolic tensors: weights and batches that have a shape and a type, but no elements.

Functions are traced on TensorSpecs. Code that creates ops in the current graph, such as a layer in
the block of a `new_graph`, computes with placeholders.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tekso.framework.signature import Signature


def new_graph() -> Any:
    """Returns an empty graph in which tensors are as in a `tf.function`.

    In a plain `tf.Graph`, `x == y` does not compare elements: it is False for two tensors. The
    graph is of no function, so all of its ops count.
    """
    graph = tf.__internal__.FuncGraph("symbolic")
    graph.outputs = None
    return graph


def spec_of(value: Any) -> tf.TensorSpec:
    """Returns the shape and the type of a tensor, an array, a variable or a weight spec."""
    return tf.TensorSpec(value.shape, value.dtype)


def specs_of(values: Mapping[str, Any]) -> dict[str, tf.TensorSpec]:
    """Returns the shapes and the types of named values, such as the weight specs of a task."""
    return {name: spec_of(value) for name, value in values.items()}


def specs_of_batch(batch: Signature) -> dict[str, tf.TensorSpec]:
    """Returns the shapes and the types of the arrays of a batch."""
    return {name: tf.TensorSpec(shape, dtype) for name, (shape, dtype) in batch.items()}


def placeholder(value: Any) -> tf.Tensor:
    """Returns a placeholder in the current graph; see `spec_of` for the value."""
    return tf.raw_ops.Placeholder(dtype=value.dtype, shape=value.shape)


def placeholders(values: Mapping[str, Any]) -> dict[str, tf.Tensor]:
    """Returns placeholders in the current graph for named values."""
    return {name: placeholder(value) for name, value in values.items()}


def placeholders_of_batch(batch: Signature) -> dict[str, tf.Tensor]:
    """Returns placeholders in the current graph for the arrays of a batch."""
    return placeholders(specs_of_batch(batch))
