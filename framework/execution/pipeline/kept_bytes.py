"""How many bytes of a micro-batch each piece keeps from its forward to its backward pass.

Found by tracing a piece with its gradients and cutting the graph as a stage's is cut; allocates
nothing. Pieces that were traced once for all (`piece_traces`) are so here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from typing import Any

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.execution.base import Signature, num_examples
from tekso.framework.execution.pipeline.graph_cut import GraphCut
from tekso.framework.execution.pipeline.piece_traces import PieceTrace, flow_of, rows_of, tensors
from tekso.framework.pieces import LOSS_SUM, METRICS, Flow, Piece
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
    weights = [tf.TensorSpec(spec.shape, spec.dtype) for spec in own.values()]
    inputs = tensors(given)
    made = {name: nest for name, nest in trace.writes.items() if name not in (LOSS_SUM, METRICS)}
    seeds = [leaf for leaf in tensors(made) if leaf.dtype.is_floating]

    def whole(*flat: tf.Tensor) -> list[tf.Tensor]:
        values = iter(flat)
        theta = {path: next(values) for path in own}
        flow = tf.nest.map_structure(lambda spec: None if spec is None else next(values), given)
        sources = [theta[path] for path in own if path in learned]
        sources += [leaf for leaf in tensors(flow) if leaf.dtype.is_floating]
        ctx = StepContext(mode="train", num_examples=size)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(sources)
            after = piece.run(piece.theta(theta), flow, ctx)
            targets = [t for n in made for t in tensors(after[n]) if t.dtype.is_floating]
            loss = tf.cast(after.get(LOSS_SUM, 0.0), tf.float32) + ctx.collected.total("loss")
        gradients = tape.gradient(
            [*targets, loss],
            sources,
            output_gradients=[tf.convert_to_tensor(seed) for seed in values],
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )
        parts = [_parts(gradient) for gradient in gradients]
        return [tf.convert_to_tensor(part) for each in parts for part in each]

    late = [*seeds, tf.TensorSpec((), tf.float32)]
    concrete = tf.function(whole, autograph=False).get_concrete_function(*weights, *inputs, *late)
    cut = GraphCut(concrete, len(late), num_lasting=len(weights))
    roots = {root.name: root for root in map(_root, cut.kept_for(concrete.outputs))}
    sizes = [_bytes(root) for root in roots.values()]
    return None if None in sizes else math.fsum(size for size in sizes if size is not None)


def _parts(gradient: Any) -> list[Any]:
    """The tensors of a gradient; of a large table it is some rows, and the rest is not made."""
    is_sparse = isinstance(gradient, tf.IndexedSlices)
    return [gradient.values, gradient.indices] if is_sparse else [gradient]


def _root(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor whose memory this one is."""
    while tensor.op.type in _SAME_MEMORY:
        tensor = tensor.op.inputs[0]
    return tensor


def _bytes(tensor: Any) -> int | None:
    if tensor.dtype in (tf.variant, tf.resource) or not tensor.shape.is_fully_defined():
        return None
    return math.prod(tensor.shape.as_list()) * tensor.dtype.size
