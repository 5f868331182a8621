"""Refuses what mixes the examples of a batch: layers that say so, and pieces that do so.

A piece is run twice on numbers that mean nothing, the second time with all examples but the first
changed: what it makes of the first one has to stay. Pieces that are declared alike run once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.execution.base import Signature, num_examples
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.pipeline.piece_traces import PieceTrace, of_each, tensors
from tekso.framework.layer import Layer
from tekso.framework.pieces import LOSS_SUM, METRICS, Flow, Piece
from tekso.framework.task import Task
from tekso.framework.weight_spec import WeightSpec

TOLERANCE = 1e-3
"""Of roundoff, as a share of the largest number that a piece makes."""


def check_layers(task: Task, *, form: Literal["host", "spmd"]) -> None:
    """Refuses layers that say that they mix examples.

    Statistics of a micro-batch (BatchNorm) are taken where the host drives the stages, and the
    moving ones are those of the whole batch.

    Args:
      task: the task.
      form: what drives the stages.

    Raises:
      ExecutionError: a layer mixes examples.
    """
    for layer in task.walk():
        if not layer.couples_examples:
            continue
        if type(layer).updated_statistics is Layer.updated_statistics:
            raise ExecutionError(
                f"{layer.path} ({type(layer).__name__}) mixes the examples of a batch, so its "
                "output would depend on the number of micro-batches: it cannot be part of a "
                "pipeline; use --execution=data_parallel"
            )
        if form == "spmd":
            raise ExecutionError(
                f"{layer.path} ({type(layer).__name__}) mixes the examples of a batch, which "
                "cannot be part of a pipeline of execution.form='spmd'; set "
                "execution.form='host', or use --execution=mesh_sharded"
            )


def check_pieces(
    pieces: Sequence[Piece],
    traces: Sequence[PieceTrace],
    specs: Mapping[str, WeightSpec],
    batch: Signature,
) -> None:
    """Runs each kind of piece, as in evaluation, which draws no random numbers.

    Sums over the examples, as the loss is one, are not looked at.

    Args:
      pieces: of the task, in order.
      traces: of the same.
      specs: of all weights of the task; those of a piece are made while it runs.
      batch: signature of a micro-batch.

    Raises:
      ExecutionError: a piece mixes examples.
    """

    def find(piece: Piece, trace: PieceTrace, own: Mapping[str, WeightSpec], given: Flow) -> None:
        made = [name for name in trace.writes if name not in (LOSS_SUM, METRICS)]
        if made and num_examples(batch) > 1:
            _check(piece, own, given, made, num_examples(batch))

    of_each(pieces, traces, specs, batch, find)


def _check(
    piece: Piece,
    own: Mapping[str, WeightSpec],
    given: Mapping[str, Any],
    made: list[str],
    size: int,
) -> None:
    leaves_given = [leaf for value in given.values() for leaf in tensors(value)]
    values = [_value(spec, number) for number, spec in enumerate([*own.values(), *leaves_given])]
    count = len(own)
    others = values[:count] + [_changed(x) for x in values[count:]]

    def run(*flat: tf.Tensor) -> list[tf.Tensor]:
        weights = dict(zip(own, flat[:count], strict=True))
        leaves = iter(flat[count:])
        flow = {
            name: tf.nest.map_structure(lambda s: None if s is None else next(leaves), value)
            for name, value in given.items()
        }
        after = piece.run(piece.theta(weights), flow, StepContext(mode="eval", num_examples=size))
        return [tf.convert_to_tensor(t) for t in tensors([after[name] for name in made])]

    try:
        whole = tf.compat.v1.wrap_function(run, [tf.TensorSpec(x.shape, x.dtype) for x in values])
    except KeyError:  # it reads from a copy of the flow, of which its trace has not told
        return
    computed = whole.prune(whole.inputs, whole.outputs)  # no checks or messages of the piece
    try:
        results = [computed(*values), computed(*others)]
    except tf.errors.OpError:
        return  # these numbers are not what it takes
    for one, two in zip(*results, strict=True):
        if not one.dtype.is_floating:
            continue
        scale, apart = tf.reduce_max(tf.abs(one)), tf.reduce_max(tf.abs(one[0] - two[0]))
        if float(apart) > TOLERANCE * float(scale):
            raise ExecutionError(
                f"{piece.name} mixes the examples of a batch: what it makes of one changes with "
                "the others, so it would depend on the number of micro-batches and cannot be part "
                "of a pipeline; use --execution=data_parallel, and set couples_examples = True in "
                "the layer"
            )


def _value(spec: Any, number: int) -> tf.Tensor:
    dtype = tf.as_dtype(spec.dtype)
    if not dtype.is_floating:
        return tf.ones(spec.shape, dtype)
    return tf.cast(0.3 * tf.random.stateless_normal(spec.shape, seed=[number, 1]), dtype)


def _changed(x: tf.Tensor) -> tf.Tensor:
    """All examples but the first, turned; of floats also moved."""
    rest = tf.reverse(x[1:], [0])
    if x.dtype.is_floating:
        rest = rest + tf.cast(0.2, x.dtype)
    elif x.dtype.is_integer:
        rest = tf.zeros_like(rest)
    return tf.concat([x[:1], rest], 0)
