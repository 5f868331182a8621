"""Rejects layers and pieces that couple the examples of a batch.

Layers declare it (`couples_examples`). Pieces are tested: a piece runs twice on arbitrary numbers,
the second time with all examples except the first one changed, and its output for the first example
must not change. Of several pieces that are declared alike, only one is tested.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.costs.piece_traces import PieceTrace, of_each
from tekso.framework.coupling import by_statistics, coupling, named
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.nests import filled, has_gradient, tensors
from tekso.framework.pieces import LOSS_SUM, METRICS, Flow, Piece
from tekso.framework.signature import Signature, num_examples
from tekso.framework.symbolic import spec_of
from tekso.framework.task import Task
from tekso.framework.weight_spec import WeightSpec

TOLERANCE = 1e-3
"""Tolerance for rounding, relative to the largest absolute value of an output."""


def check_layers(task: Task) -> None:
    """Rejects layers that declare that they couple examples.

    Batch statistics (BatchNorm) are allowed: the layer normalises by the statistics of a
    micro-batch, and its moving statistics are those of the whole batch.

    Raises:
      ExecutionError: a layer couples examples.
    """
    for layer in coupling(task):
        if not by_statistics(layer):
            cure = "" if layer.gathers_examples else " on one device"
            raise ExecutionError(
                f"{named(layer)} couples the examples of a batch, so its output would depend on "
                "the number of micro-batches; it cannot be part of a pipeline: use "
                f"--execution=data_parallel{cure}"
            )


def check_pieces(
    pieces: Sequence[Piece],
    traces: Sequence[PieceTrace],
    specs: Mapping[str, WeightSpec],
    batch: Signature,
) -> None:
    """Rejects pieces that couple examples, after running each kind of piece.

    Pieces run as in evaluation, which draws no random numbers. Sums over the examples, such as the
    loss, are not checked.

    Args:
      pieces: the pieces of the task, in order.
      traces: their traces.
      specs: specs of all weights of the task; the weights of a piece exist only while it runs.
      batch: signature of a micro-batch.

    Raises:
      ExecutionError: a piece couples examples.
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
        flow = filled(dict(given), flat[count:])
        after = piece.run(piece.theta(weights), flow, StepContext(mode="eval", num_examples=size))
        return [tf.convert_to_tensor(t) for t in tensors([after[name] for name in made])]

    try:
        whole = tf.compat.v1.wrap_function(run, [*map(spec_of, values)])
    except KeyError:  # it reads a value through a copy of the flow, which its trace did not record
        return
    computed = whole.prune(whole.inputs, whole.outputs)  # no checks or messages of the piece
    try:
        results = [computed(*values), computed(*others)]
    except tf.errors.OpError:
        return  # the piece does not accept arbitrary numbers
    for one, two in zip(*results, strict=True):
        if not has_gradient(one):
            continue
        scale, apart = tf.reduce_max(tf.abs(one)), tf.reduce_max(tf.abs(one[0] - two[0]))
        if float(apart) > TOLERANCE * float(scale):
            raise ExecutionError(
                f"{piece.name} couples the examples of a batch: its output for one example changes "
                "with the other examples, so it would depend on the number of micro-batches and "
                "cannot be part of a pipeline; use --execution=data_parallel, and set "
                "couples_examples = True in the layer"
            )


def _value(spec: tf.TensorSpec, number: int) -> tf.Tensor:
    dtype = tf.as_dtype(spec.dtype)
    if not has_gradient(spec):
        return tf.ones(spec.shape, dtype)
    return tf.cast(0.3 * tf.random.stateless_normal(spec.shape, seed=[number, 1]), dtype)


def _changed(x: tf.Tensor) -> tf.Tensor:
    """Returns x with all examples except the first in reverse order, plus 0.2 for floats.

    Integers are set to 0 instead.
    """
    rest = tf.reverse(x[1:], [0])
    if has_gradient(x):
        rest = rest + tf.cast(0.2, x.dtype)
    elif x.dtype.is_integer:
        rest = tf.zeros_like(rest)
    return tf.concat([x[:1], rest], 0)
