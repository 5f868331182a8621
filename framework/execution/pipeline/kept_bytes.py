"""How many bytes of a micro-batch each piece keeps: to its backward pass, and between its halves.

Found by tracing a piece with its gradients and cutting the graph as a stage's is cut; allocates
nothing. Pieces that were traced once for all (`piece_traces`) are so here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

import tensorflow as tf

from tekso.framework.execution.base import Signature, num_examples
from tekso.framework.execution.pipeline.graph_cut import GraphCut
from tekso.framework.execution.pipeline.piece_gradients import piece_gradients
from tekso.framework.execution.pipeline.piece_traces import PieceTrace, flow_of, rows_of
from tekso.framework.pieces import Flow, Piece
from tekso.framework.weight_spec import WeightSpec

# Ops whose output is their input in the same memory.
_SAME_MEMORY = frozenset(
    {"Identity", "Reshape", "ExpandDims", "Squeeze", "StopGradient", "PreventGradient"}
)


class KeptBytes(NamedTuple):
    """What a piece keeps of a micro-batch.

    Attributes:
      for_backward: from the forward to the backward pass.
      for_weights: from the gradients of inputs to those of weights, where these are apart.
    """

    for_backward: float
    for_weights: float


def kept_bytes(
    pieces: Sequence[Piece],
    traces: Sequence[PieceTrace],
    specs: Mapping[str, WeightSpec],
    trained: Set[str],
    batch: Signature,
) -> list[KeptBytes]:
    """Returns bytes for each piece: what it made, and what it was given by the pieces before.

    Weights do not count. What is in a list of tensors (of a loop) has no known size: such a piece
    counts with all that it writes.

    Args:
      pieces: of the task, in order.
      traces: of the same.
      specs: of all weights.
      trained: paths of the weights that are learned.
      batch: signature of a micro-batch.
    """
    flow, size, paths = flow_of(batch), num_examples(batch), sorted(specs)
    known: dict[int, KeptBytes] = {}
    found = []
    for piece, trace in zip(pieces, traces, strict=True):
        if id(trace) not in known:
            own = {path: rows_of(specs[path], piece.rows) for path in piece.weights(paths)}
            given = {name: flow[name] for name in sorted(flow) if name in trace.reads}
            learned = {path for path in own if path in trained}
            known[id(trace)] = _kept(piece, own, learned, given, trace, size)
        found.append(known[id(trace)])
        flow = {**flow, **trace.writes}
    return found


def _kept(
    piece: Piece,
    own: Mapping[str, WeightSpec],
    learned: Set[str],
    given: Flow,
    trace: PieceTrace,
    size: int,
) -> KeptBytes:
    both = piece_gradients(piece, own, learned, given, trace, size)
    signature = [*both.weights, *both.inputs, *both.seeds]
    counts: list[int] = []

    def whole(*flat: tf.Tensor) -> list[tf.Tensor]:
        _, of_weights, of_inputs = both.function(*flat)
        counts.append(len(of_weights))
        return [tf.identity(t) for t in (*of_weights, *of_inputs)]

    concrete = tf.function(whole, autograph=False).get_concrete_function(*signature)
    cut = GraphCut(concrete, len(both.seeds), num_lasting=len(both.weights))
    of_weights, of_inputs = concrete.outputs[: counts[0]], concrete.outputs[counts[0] :]
    between = cut.kept_between(of_inputs, of_weights)
    there = [*cut.lasting, *cut.kept_for(of_weights), *between, *cut.late]
    lasting = {t.name for t in cut.lasting}
    halves = [t for t in cut.taken(there, of_weights) if t.name not in lasting]
    return KeptBytes(_bytes(cut.kept_for(concrete.outputs), trace), _bytes(halves, trace))


def _root(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor whose memory this one is."""
    while tensor.op.type in _SAME_MEMORY:
        tensor = tensor.op.inputs[0]
    return tensor


def _bytes(tensors: Sequence[Any], trace: PieceTrace) -> float:
    """Bytes of tensors; of all that the piece writes, if the size of one is not known."""
    roots = list({root.name: root for root in map(_root, tensors)}.values())
    if any(t.dtype in (tf.variant, tf.resource) or not t.shape.is_fully_defined() for t in roots):
        return trace.bytes_written
    return math.fsum(math.prod(t.shape.as_list()) * t.dtype.size for t in roots)
