"""Finds the activations that layers constrain (`ctx.constrain`), by tracing one step.

Rules that cannot be applied to an activation are therefore rejected when the experiment is built,
before the step is compiled. Nothing is allocated: the weights and the batch are placeholders.
"""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Mapping, Sequence, Set
from typing import Any

import tensorflow as tf

from tekso.framework import graph_errors, ops, task_results
from tekso.framework.context import StepContext, isolated
from tekso.framework.execution.mesh.layouts import Activations
from tekso.framework.execution.workarounds.forms import concat, reverse
from tekso.framework.execution.workarounds.op_places import is_of_layer
from tekso.framework.execution.workarounds.unsupported_ops import (
    GRADIENTS,
    refuse_ops,
    refuse_unsupported,
)
from tekso.framework.foreign_variables import refused
from tekso.framework.nests import stacked
from tekso.framework.signature import Signature, num_examples
from tekso.framework.symbolic import specs_of, specs_of_batch
from tekso.framework.task import Task

_STEP = "recorded"
"""The function of `of_task` that is traced."""


class _RecordingContext(StepContext):
    """A step context that records constrained tensors; its copies share the record."""

    def __init__(self, found: dict[str, Any], **rest: Any) -> None:
        super().__init__(**rest)
        self._found = found

    def constrain(self, x: tf.Tensor, dims: Sequence[str | None]) -> tf.Tensor:
        shape = tuple(x.shape.as_list())
        if len(dims) != len(shape):
            raise ValueError(f"constrain: dims {tuple(dims)} do not fit the shape {list(shape)}")
        self._note(tuple(dims), shape)
        return x

    def note_scores(self, x: tf.Tensor, table: tf.Tensor) -> None:
        """Records logits as sharded by "vocab"; a length on the same axis is gathered for them."""
        dims = ("batch", *[None] * (x.shape.rank - 2), "vocab")
        shape = (*x.shape.as_list()[:-1], table.shape[0])
        self._note(dims, shape)

    def _note(self, dims: tuple[str | None, ...], shape: tuple[int | None, ...]) -> None:
        key = str((dims, shape))
        if key not in self._found:
            self._found[key] = (dims, shape, _line_of_the_user())


def _logits(ctx: _RecordingContext, x: tf.Tensor, table: tf.Tensor) -> tf.Tensor:
    ctx.note_scores(x, table)
    return ops.logits.plain(ctx, x, table)


def _cross_entropy(
    ctx: _RecordingContext, x: tf.Tensor, table: tf.Tensor, labels: tf.Tensor, **rest: Any
) -> tf.Tensor:
    ctx.note_scores(x, table)
    return ops.cross_entropy.plain(ctx, x, table, labels, **rest)


def _scan(
    ctx: _RecordingContext, body: Any, theta: Any, state: Any, xs: Any, *, first: int = 0
) -> tuple[Any, Any]:
    """Traces one iteration, which constrains the same tensors as every other."""
    num_iterations = tf.nest.flatten(xs)[0].shape[0]
    inner = isolated(ctx).fold(0)
    one = tf.nest.map_structure(lambda x: tf.gather(x, 0), xs)  # `refuse_unsupported` allows it
    after, y = body(theta, state, one, inner)
    ctx.collected.merge(inner.collected.sums)
    return after, stacked([y] * num_iterations)


_RecordingContext.forms = {
    "concat": concat,
    "cross_entropy": _cross_entropy,
    "logits": _logits,
    "reverse": reverse,
    "scan": _scan,
}


def of_task(task: Task, batch: Signature, *, trained: Set[str] = frozenset()) -> Activations:
    """Returns {name: (dims, shape)} of the distinct tensors that a training step constrains.

    Args:
      task: the task.
      batch: signature of the examples that are computed together.
      trained: paths of weights; the gradients of custom layers with respect to these are searched
        for unsupported ops too. A plan needs this; training finds them in its first step. Those of
        Tekso's layers do not count: on a mesh, their primitives have other forms.

    Raises:
      ExecutionError: the step has an op that is not supported on a mesh.
      ForeignVariableError: a layer reads a variable that it has not declared as a weight.
    """
    found: dict[str, Any] = {}
    weights, arrays, examples = specs_of(task.specs()), specs_of_batch(batch), num_examples(batch)
    num_forward = []

    def recorded(weights: Mapping[str, tf.Tensor], batch: Mapping[str, tf.Tensor]) -> Any:
        ctx = _RecordingContext(found, mode="train", num_examples=examples)
        learned = [x for path, x in weights.items() if path in trained]
        with tf.GradientTape() as tape, refused(task):
            tape.watch(learned)
            loss = task_results.loss(task, task.theta(weights), batch, ctx).loss_sum
        graph = tf.compat.v1.get_default_graph()
        refuse_unsupported(graph)
        ops = graph.get_operations()
        num_forward.append(len(ops))
        if not learned or not any(op.type in GRADIENTS and is_of_layer(op) for op in ops):
            return loss
        return [x for x in tape.gradient(loss, learned) if x is not None]

    graph = tf.function(recorded, autograph=False).get_concrete_function(weights, arrays).graph
    backward = graph.get_operations()[num_forward[0] :]
    refuse_ops(backward, of_layers=True)
    first = next(iter(arrays))
    inputs = {
        "the batch": (
            ("batch",) + (None,) * (arrays[first].shape.rank - 1),
            tuple(arrays[first].shape.as_list()),
        )
    }
    return inputs | _named(list(found.values()))


def _named(found: list[Any]) -> dict[str, Any]:
    """Names tensors by their dims; a second shape gets a number: "activation batch/embed (2)".

    The name of a tensor that a custom layer constrains ends with its line.
    """
    named: dict[str, Any] = {}
    for dims, shape, line in found:
        name = "activation " + "/".join(dim or "-" for dim in dims)
        same = sum(other.partition(" (")[0] == name for other in named)
        named[(f"{name} ({same + 1})" if same else name) + line] = (dims, shape)
    return named


def _line_of_the_user() -> str:
    """Returns the innermost line of a step that is not Tekso's: " (FILE:LINE: CODE)"; or ""."""
    for frame, number in traceback.walk_stack(None):
        file = frame.f_code.co_filename
        if file == __file__ and frame.f_code.co_name == _STEP:
            break  # the program that takes the step
        if not graph_errors.is_library_file(file) and not graph_errors.is_own_file(file):
            code = linecache.getline(file, number).strip()
            return f" ({file}:{number}{code and f': {code}'})"
    return ""
