"""A loop on a mesh whose iterations save the activations that their backward pass needs.

    forward   state, y, saved = forward ops (theta, state, x)      in every iteration
    backward  the iterations in reverse: backward ops of what they saved

An iteration is traced once with its gradients, and cut into both passes as a stage of a pipeline is
(`graph_cut`). Each saved tensor is written into a buffer with a row per iteration, except those
whose values tracing knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework.costs.op_kinds import BRANCHES, LOOPS
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.mesh.control_flow import Flat, Loop, joined, learning, split
from tekso.framework.execution.pipeline.graph_cut import GraphCut
from tekso.framework.execution.workarounds.op_places import place_of
from tekso.framework.execution.workarounds.tensors import loop_inputs
from tekso.framework.execution.workarounds.unsupported_ops import refuse_unsupported

Spec = tf.TensorSpec
_WITH_BODIES = LOOPS | BRANCHES


class SavingLoop(Loop):
    """A loop that recomputes nothing in its backward pass."""

    def _saved(
        self, theta: Flat, state: Flat, xs: Flat, shapes: tuple[Flat, Flat]
    ) -> Sequence[tf.TensorSpec | tf.Tensor]:
        given = (
            [Spec(t.shape, t.dtype) for t in theta],
            [Spec([], tf.int32)],
            [Spec(x.shape[1:], x.dtype) for x in xs],
            [Spec(t.shape, t.dtype) for t in state],
            [Spec(t.shape, t.dtype) for t in learning(joined([state, *shapes]))],
        )
        self._counts = tuple(len(flat) for flat in given)
        self._made = len(state), len(shapes[0]), len(shapes[1])
        self._learned = tuple(len(learning(flat)) for flat in (theta, state, xs))
        made: list[Flat] = []

        def both(*flat: tf.Tensor) -> list[tf.Tensor]:
            theta, (index,), x, state, seeds = split(flat, self._counts)
            outputs, gradients = self.differentiated(index, theta, state, x, seeds)
            # tf.identity gives each result a separate tensor, even if two are the same.
            made.extend([[tf.identity(t) for t in each] for each in (outputs, joined(gradients))])
            return []

        concrete = tf.function(both, autograph=False).get_concrete_function(*joined(given))
        refuse_unsupported(concrete.graph)  # while the ops still know the lines that made them
        _refuse_outer(concrete.graph, self._outer)
        outputs, gradients = made
        cut = GraphCut(concrete, self._counts[-1], num_lasting=len(theta))
        known = cut.early[: -len(state) or None]  # what the backward pass has as well
        names = {t.name for t in known}
        read = [t for t in cut.saved_for(gradients) if t.name not in names]
        self._constants = {t.name: value for t in read if (value := _static_value(t)) is not None}
        saved = [t for t in read if t.name not in self._constants]
        _refuse_lists(saved)
        self._early, self._late = ([t.name for t in ts] for ts in (cut.early, cut.late))
        self._dtypes = {t.name: t.dtype for t in saved}
        self._forward_pass = cut.function(
            cut.early, outputs, saved, cut.early_effects(), inlined=True
        )
        self._backward_pass = cut.function([*known, *read, *cut.late], gradients, inlined=True)
        return [Spec(t.shape, _storable(t.dtype)) for t in saved]

    def _iteration_and_saved(
        self, index: tf.Tensor, theta: Flat, state: Flat, x: Flat
    ) -> tuple[tuple[Flat, Flat, Flat], Flat]:
        given = [*loop_inputs(theta), index, *x, *loop_inputs(state)]
        found, saved = self._forward_pass(dict(zip(self._early, given, strict=True)))
        return split(found, self._made), [
            tf.cast(saved[name], _storable(dtype)) for name, dtype in self._dtypes.items()
        ]

    def _iteration_gradients(
        self, index: tf.Tensor, theta: Flat, saved: Flat, x: Flat, seeds: Flat
    ) -> tuple[Flat, Flat, Flat]:
        known = dict(zip(self._early, [*loop_inputs(theta), index, *x], strict=False))
        known |= {
            name: tf.cast(value, dtype)
            for (name, dtype), value in zip(self._dtypes.items(), saved, strict=True)
        }
        known |= {name: tf.constant(value) for name, value in self._constants.items()}
        known |= dict(zip(self._late, seeds, strict=True))
        gradients: tuple[Flat, Flat, Flat] = split(self._backward_pass(known)[0], self._learned)
        return gradients


def _refuse_outer(graph: Any, outer: Flat) -> None:
    """Raises an ExecutionError if an iteration reads learned tensors besides its arguments."""
    known = [(outside, own) for outside, own in graph.captures if any(outside is t for t in outer)]
    for op in graph.get_operations():
        for outside, own in known:
            if any(own is tensor for tensor in op.inputs):
                made = f", of {place_of(outside.op)}" if tf.is_symbolic_tensor(outside) else ""
                raise ExecutionError(
                    f"{place_of(op)}: one program for all stages reads a tensor from outside of "
                    f"its loop here, {outside.dtype.name} {outside.shape.as_list()}{made}; its "
                    "gradient would be lost: pass it from piece to piece, or use "
                    "--execution=pipelined"
                )


def _refuse_lists(saved: Sequence[tf.Tensor]) -> None:
    """Raises an ExecutionError if lists, or tensors of unknown shapes, would be saved."""
    for tensor in saved:
        if tensor.dtype == tf.variant or not tensor.shape.is_fully_defined():
            ops = (op for op in tensor.graph.get_operations() if op.type in _WITH_BODIES)
            raise ExecutionError(
                f"{place_of(next(ops, tensor.op))}: one program for all stages cannot save the "
                "lists and branches of TensorFlow's loops and conditions that are differentiated, "
                "such as tf.map_fn, tf.scan, tf.while_loop or tf.cond: write ops.scan of "
                "tekso.framework or tf.where, or use --execution=pipelined"
            )


def _static_value(tensor: tf.Tensor) -> np.ndarray | None:
    """Returns the value of a tensor that tracing knows, such as a shape; else None.

    DTensor compiles the gradient of a convolution only if the shape of the images is a constant.
    """
    op = tensor.op
    if op.type == "ShapeN":
        shape = op.inputs[tensor.value_index].shape
        if not shape.is_fully_defined():
            return None
        return np.array(shape.as_list(), tensor.dtype.as_numpy_dtype)
    value: np.ndarray | None = tf.get_static_value(tensor)
    return value


def _storable(dtype: tf.DType) -> tf.DType:
    """Returns the type of a buffer; a loop on a mesh cannot carry bool."""
    return tf.int32 if dtype == tf.bool else dtype
