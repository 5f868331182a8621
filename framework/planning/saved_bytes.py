"""Computes the saved activations of each piece: bytes per micro-batch, without allocating any.

A piece and its gradients are traced, and the graph is cut as the graph of a stage is cut: into
forward pass, gradients of inputs, and gradients of weights. Pieces that share a trace
(`piece_traces`) are computed once.

Equal ops count once: TensorFlow computes equal ops of a function once, and their outputs are one
tensor in memory. So do the differences x - mean that a `BatchNorm` forms in its forward pass and
for its gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

import tensorflow as tf

from tekso.framework.costs.op_kinds import SAME_MEMORY
from tekso.framework.costs.piece_gradients import piece_gradients
from tekso.framework.costs.piece_traces import PieceTrace, of_each
from tekso.framework.execution.pipeline.graph_cut import GraphCut
from tekso.framework.nests import tensors
from tekso.framework.pieces import LOSS_SUM, METRICS, Flow, Piece
from tekso.framework.signature import Signature, num_examples
from tekso.framework.weight_spec import WeightSpec

Same = Mapping[str, tf.Tensor]
"""{name of a tensor: the first tensor of the graph in the same memory}."""
Leaf = tuple[str, int]
"""A tensor that pieces pass on: the name of the value, and the index of a tensor in its nest."""
SavedTensor = Leaf | str
"""A saved tensor: an input of the piece, or the name of a tensor that the piece computes."""


class SavedBytes(NamedTuple):
    """The saved tensors of a piece for one micro-batch.

    Attributes:
      for_backward: {tensor: bytes} saved from the forward to the backward pass.
      for_weights: {tensor: bytes} saved from the gradients of inputs to the gradients of weights,
        if the schedule separates them.
      made: {output of the piece: the tensor that it is}.
    """

    for_backward: Mapping[SavedTensor, float]
    for_weights: Mapping[SavedTensor, float]
    made: Mapping[Leaf, SavedTensor]


def saved_bytes(
    pieces: Sequence[Piece],
    traces: Sequence[PieceTrace],
    specs: Mapping[str, WeightSpec],
    trained: Set[str],
    batch: Signature,
) -> list[SavedBytes]:
    """Returns the saved tensors of each piece: its inputs, and tensors that it computes.

    Weights do not count. A tensor list of a loop has no known size. For a piece that saves one, all
    bytes that the piece writes are counted.

    Args:
      pieces: pieces of the task, in order.
      traces: traces of the pieces.
      specs: specs of all weights.
      trained: paths of the weights that are learned.
      batch: signature of a micro-batch.
    """

    def find(piece: Piece, trace: PieceTrace, own: Mapping[str, WeightSpec], given: Flow) -> Any:
        return _kept(piece, own, trained & own.keys(), given, trace, num_examples(batch))

    return of_each(pieces, traces, specs, batch, find)


def together(saved: Sequence[SavedBytes]) -> tuple[float, float]:
    """Returns the bytes saved for the backward pass, and for gradients of weights, of a stage.

    `saved` has the consecutive pieces of the stage. A tensor that several pieces save counts once:
    an output of one piece is an input of the next.
    """
    flow: dict[Leaf, Any] = {}  # {output: (number of the piece, its name for the tensor)}
    sizes: tuple[dict[Any, float], dict[Any, float]] = {}, {}
    for number, piece in enumerate(saved):
        own: dict[SavedTensor, Any] = {}
        for name in (*piece.for_backward, *piece.for_weights, *piece.made.values()):
            own[name] = (number, name) if isinstance(name, str) else flow.get(name, name)
        for found, given in zip(sizes, (piece.for_backward, piece.for_weights), strict=True):
            found.update({own[name]: size for name, size in given.items()})
        flow |= {leaf: own[name] for leaf, name in piece.made.items()}
    return math.fsum(sizes[0].values()), math.fsum(sizes[1].values())


def _kept(
    piece: Piece,
    own: Mapping[str, WeightSpec],
    learned: Set[str],
    given: Flow,
    trace: PieceTrace,
    size: int,
) -> SavedBytes:
    both = piece_gradients(piece, own, learned, given, trace, size)
    signature = [*both.weights, *both.inputs, *both.seeds]
    counts: list[int] = []
    outputs: list[tf.Tensor] = []

    def whole(*flat: tf.Tensor) -> list[tf.Tensor]:
        made, of_weights, of_inputs = both.function(*flat)
        counts.append(len(of_weights))
        outputs.extend(made)
        return [tf.identity(t) for t in (*of_weights, *of_inputs)]

    concrete = tf.function(whole, autograph=False).get_concrete_function(*signature)
    cut = GraphCut(concrete, len(both.seeds), num_lasting=len(both.weights))
    of_weights, of_inputs = concrete.outputs[: counts[0]], concrete.outputs[counts[0] :]
    between = cut.saved_between(of_inputs, of_weights)
    there = [*cut.lasting, *cut.saved_for(of_weights), *between, *cut.late]
    lasting = {t.name for t in cut.lasting}
    halves = [t for t in cut.taken(there, of_weights) if t.name not in lasting]
    inputs = zip(cut.early[len(cut.lasting) :], _leaves(given), strict=True)
    names: dict[str, SavedTensor] = {tensor.name: leaf for tensor, leaf in inputs}
    same = _same_memory(concrete.graph)
    written = {name: nest for name, nest in trace.writes.items() if name not in (LOSS_SUM, METRICS)}
    roots = [same[tensor.name].name for tensor in outputs[:-1]]  # the last is the loss
    return SavedBytes(
        _bytes(cut.saved_for(concrete.outputs), names, same, trace),
        _bytes(halves, names, same, trace),
        {leaf: names.get(root, root) for leaf, root in zip(_leaves(written), roots, strict=True)},
    )


def _leaves(flow: Mapping[str, Any]) -> list[Leaf]:
    return [(name, i) for name, nest in flow.items() for i, _ in enumerate(tensors(nest))]


def _same_memory(graph: Any) -> Same:
    """Returns the tensors of a graph by the names of all that share their memory."""
    found: dict[str, tf.Tensor] = {}
    first: dict[Any, tf.Operation] = {}
    for op in graph.get_operations():
        given = [found.get(tensor.name, tensor) for tensor in op.inputs]
        if op.type in SAME_MEMORY:
            own = given[: len(op.outputs)]
        else:
            own = first.setdefault(_kind(op, given), op).outputs
        found.update({tensor.name: one for tensor, one in zip(op.outputs, own, strict=True)})
    return found


def _kind(op: tf.Operation, given: Sequence[tf.Tensor]) -> Any:
    """Returns a key that ops share which compute the same of the same inputs."""
    if op.op_def.is_stateful or op.control_inputs or op.type == "Placeholder":
        return op.name
    node = op.node_def
    attributes = (
        (name, value.SerializeToString())
        for name, value in node.attr.items()
        if not name.startswith("_")
    )
    return op.type, tuple(tensor.name for tensor in given), tuple(sorted(attributes))


def _bytes(
    saved: Sequence[Any], names: Mapping[str, SavedTensor], same: Same, trace: PieceTrace
) -> dict[SavedTensor, float]:
    """Returns {tensor: bytes}; if a size is unknown, all bytes that the piece writes."""
    roots = {same[tensor.name].name: same[tensor.name] for tensor in saved}
    for t in roots.values():
        if t.dtype in (tf.variant, tf.resource) or not t.shape.is_fully_defined():
            return {"all that it writes": trace.bytes_written}
    return {
        names.get(name, name): float(math.prod(t.shape.as_list()) * t.dtype.size)
        for name, t in roots.items()
    }
