"""How many bytes of a micro-batch each piece keeps from its forward to its backward pass.

Found by tracing a piece with its gradients and cutting the graph as a stage's is cut; allocates
nothing. Pieces that were traced once for all (`piece_traces`) are so here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from typing import Any

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


def kept_bytes(
    pieces: Sequence[Piece],
    traces: Sequence[PieceTrace],
    specs: Mapping[str, WeightSpec],
    trained: Set[str],
    batch: Signature,
) -> list[float]:
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
    known: dict[int, float] = {}
    found = []
    for piece, trace in zip(pieces, traces, strict=True):
        if id(trace) not in known:
            own = {path: rows_of(specs[path], piece.rows) for path in piece.weights(paths)}
            given = {name: flow[name] for name in sorted(flow) if name in trace.reads}
            kept = _kept(piece, own, {path for path in own if path in trained}, given, trace, size)
            known[id(trace)] = trace.bytes_written if kept is None else kept
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
) -> float | None:
    """Bytes of a piece; None if they cannot be told."""
    both = piece_gradients(piece, own, learned, given, trace, size)
    signature = [*both.weights, *both.inputs, *both.seeds]
    whole = tf.function(lambda *flat: both.function(*flat)[1], autograph=False)
    concrete = whole.get_concrete_function(*signature)
    cut = GraphCut(concrete, len(both.seeds), num_lasting=len(both.weights))
    roots = {root.name: root for root in map(_root, cut.kept_for(concrete.outputs))}
    sizes = [_bytes(root) for root in roots.values()]
    return None if None in sizes else math.fsum(size for size in sizes if size is not None)


def _root(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor whose memory this one is."""
    while tensor.op.type in _SAME_MEMORY:
        tensor = tensor.op.inputs[0]
    return tensor


def _bytes(tensor: Any) -> int | None:
    if tensor.dtype in (tf.variant, tf.resource) or not tensor.shape.is_fully_defined():
        return None
    return math.prod(tensor.shape.as_list()) * tensor.dtype.size
