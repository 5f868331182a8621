"""Computes the saved activations of each piece, and the time of its passes, for a micro-batch.

Nothing is allocated. Times are computed if the speed of this machine is given.

A piece and its gradients are traced, and the graph is cut as the graph of a stage is cut: into
forward pass, gradients of inputs, and gradients of weights. Pieces that share a trace
(`piece_traces`) are computed once.

Equal ops count once: TensorFlow computes equal ops of a function once, and their outputs are one
tensor in memory. So do the differences x - mean that a `BatchNorm` forms in its forward pass and
for its gradient.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import tensorflow as tf

from tekso.framework.costs.equal_ops import Same, kind, same_memory
from tekso.framework.costs.graph_memory import COUNTED_BYTES, changes_of, peak_of
from tekso.framework.costs.graph_walks import above, after
from tekso.framework.costs.loop_lists import list_items
from tekso.framework.costs.piece_gradients import PieceGradients, piece_gradients
from tekso.framework.costs.piece_traces import PieceTrace, of_each
from tekso.framework.costs.this_machine import MachineSpeed
from tekso.framework.execution.pipeline.graph_cut import GraphCut
from tekso.framework.nests import has_gradient, tensors
from tekso.framework.pieces import LOSS_SUM, METRICS, Flow, Piece
from tekso.framework.planning.pass_times import PassSeconds, pass_seconds
from tekso.framework.primitives.fusion import Fuse, no_fusion
from tekso.framework.signature import Signature, num_examples
from tekso.framework.weight_spec import WeightSpec

Leaf = tuple[str, int]
"""A tensor that pieces pass on: the name of the value, and the index of a tensor in its nest."""


class Derived(NamedTuple):
    """A tensor that is computed from one input of a piece alone, without weights.

    Attributes:
      leaf: the input.
      how: equal for tensors that are computed alike.
    """

    leaf: Leaf
    how: str


class Working(NamedTuple):
    """The memory that a piece needs while its backward pass runs, in bytes per micro-batch.

    Attributes:
      backward: beyond the saved tensors.
      recomputed: of a backward pass that recomputes the forward pass, beyond the inputs.
    """

    backward: float
    recomputed: float


TensorName = Leaf | Derived | str
"""What identifies a tensor in a piece: an input, how it is computed from one, or its name."""


class SavedBytes(NamedTuple):
    """The saved tensors of a piece for one micro-batch.

    Attributes:
      for_backward: {tensor: bytes} saved from the forward to the backward pass.
      for_weights: {tensor: bytes} saved from the gradients of inputs to the gradients of weights,
        if the schedule separates them.
      made: {output of the piece: the tensor that it is}.
      working: memory of its backward pass.
      counted: the same without tensors that TensorFlow's statistics leave out, see
        `graph_memory.COUNTED_BYTES`.
      seconds: time of its passes; None: not computed.
    """

    for_backward: Mapping[TensorName, float]
    for_weights: Mapping[TensorName, float]
    made: Mapping[Leaf, TensorName]
    working: Working
    counted: Working
    seconds: PassSeconds | None = None


def saved_bytes(
    pieces: Sequence[Piece],
    traces: Sequence[PieceTrace],
    specs: Mapping[str, WeightSpec],
    trained: Set[str],
    batch: Signature,
    *,
    machine: MachineSpeed | None = None,
    fuse: Fuse = no_fusion,
) -> list[SavedBytes]:
    """Returns the saved tensors of each piece: its inputs, and tensors that it computes.

    Weights do not count. For a piece that saves a tensor of unknown size, such as the list of a
    loop without a largest number of iterations, all bytes that the piece writes are counted.

    Args:
      pieces: pieces of the task, in order.
      traces: traces of the pieces.
      specs: specs of all weights.
      trained: paths of the weights that are learned.
      batch: signature of a micro-batch.
      machine: speed of a core of this machine; None: times are not computed.
      fuse: compiles elementwise clusters.
    """
    computed = _computed_inputs(traces)
    of_piece = {id(piece): names for piece, names in zip(pieces, computed, strict=True)}

    def find(piece: Piece, trace: PieceTrace, own: Mapping[str, WeightSpec], given: Flow) -> Any:
        size, learned = num_examples(batch), trained & own.keys()
        both = piece_gradients(piece, own, learned, given, trace, size, fuse=fuse)
        return _of_piece(both, given, trace, of_piece[id(piece)], machine)

    return of_each(pieces, traces, specs, batch, find, apart=computed)


def _computed_inputs(traces: Sequence[PieceTrace]) -> list[frozenset[str]]:
    """Returns the names of the inputs of each piece that earlier pieces have computed."""
    found, written = [], set[str]()
    for trace in traces:
        found.append(trace.reads & written)
        written.update(trace.writes)
    return found


def together(saved: Sequence[SavedBytes], *, least: float = 0.0) -> tuple[float, float]:
    """Returns the bytes saved for the backward pass, and for gradients of weights, of a stage.

    A tensor that several pieces save counts once: an output of one piece is an input of the next.
    So does a tensor that several pieces compute alike from such an input.

    Args:
      saved: the consecutive pieces of the stage.
      least: tensors of fewer bytes do not count.
    """
    for_backward: dict[Any, float] = {}
    for_weights: dict[Any, float] = {}
    for own in _keyed(saved):
        for_backward |= own[0]
        for_weights |= own[1]
    return _sum(for_backward.values(), least), _sum(for_weights.values(), least)


def working(
    saved: Sequence[SavedBytes], *, counted: bool = False
) -> tuple[float, tuple[float, ...]]:
    """Returns the memory that the backward pass of a stage needs; see `together` and `Working`.

    Its pieces run one after the other, the last one first. If the forward pass is recomputed, the
    saved tensors of all earlier pieces exist while the backward pass of a piece runs.

    Args:
      saved: the consecutive pieces of the stage.
      counted: leave out tensors of fewer than `graph_memory.COUNTED_BYTES`.

    Returns:
      the peak beyond the saved tensors; the peaks during each piece if the forward pass is
      recomputed, beyond the inputs of the stage.
    """
    least = COUNTED_BYTES if counted else 0.0
    own = [piece.counted if counted else piece.working for piece in saved]
    before, recomputed = 0.0, []
    known: set[Any] = set()
    for one, (for_backward, _) in zip(own, _keyed(saved), strict=True):
        recomputed.append(before + one.recomputed)
        new = [k for k in for_backward if k not in known and not isinstance(k[0], str)]
        before += _sum((for_backward[key] for key in new), least)
        known.update(new)
    return max((one.backward for one in own), default=0.0), tuple(recomputed)


def _sum(sizes: Iterable[float], least: float) -> float:
    return math.fsum(size for size in sizes if size >= least)


def _keyed(
    saved: Sequence[SavedBytes],
) -> Iterator[tuple[dict[Any, float], dict[Any, float]]]:
    """Yields the bytes that each piece saves for both gradients, by keys unique in the stage.

    The key of an input of the stage is its Leaf. All other keys begin with no name.
    """
    flow: dict[Leaf, Any] = {}  # {output: its key}
    for number, piece in enumerate(saved):
        own: dict[TensorName, Any] = {}
        for name in (*piece.for_backward, *piece.for_weights, *piece.made.values()):
            own[name] = _key(number, name, flow)
        yield (
            {own[name]: size for name, size in piece.for_backward.items()},
            {own[name]: size for name, size in piece.for_weights.items()},
        )
        flow |= {leaf: own[name] for leaf, name in piece.made.items()}


def _key(number: int, name: TensorName, flow: Mapping[Leaf, Any]) -> Any:
    """Returns the key of a tensor of a piece; `flow` has those of the outputs of earlier pieces."""
    if isinstance(name, str):
        return number, name
    if isinstance(name, Derived):
        return flow.get(name.leaf, name.leaf), name.how
    return flow.get(name, name)


def _of_piece(
    both: PieceGradients,
    given: Flow,
    trace: PieceTrace,
    computed: Set[str],
    machine: MachineSpeed | None,
) -> SavedBytes:
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
    leaves = {tensor.name: leaf for tensor, leaf in inputs}
    same = same_memory(concrete.graph)
    names: dict[str, TensorName] = {**leaves, **_derived(concrete.graph, leaves, same)}
    written = {name: nest for name, nest in trace.writes.items() if name not in (LOSS_SUM, METRICS)}
    roots = [same[tensor.name].name for tensor in outputs[:-1]]  # the last is the loss
    seeds = [t for t in cut.late if t.shape.rank]
    seconds = None
    if machine is not None:
        gradients = of_weights, _of_computed(of_inputs, given, computed)
        ready = _given_to_backward(cut, concrete)
        seconds = pass_seconds(concrete.graph, outputs, gradients, ready, machine)
    return SavedBytes(
        _bytes(cut.saved_for(concrete.outputs), names, same, trace),
        _bytes(halves, names, same, trace),
        {leaf: names.get(root, root) for leaf, root in zip(_leaves(written), roots, strict=True)},
        _working(cut, concrete, of_inputs, seeds, least=0.0),
        _working(cut, concrete, of_inputs, seeds, least=COUNTED_BYTES),
        seconds,
    )


def _of_computed(gradients: Sequence[Any], given: Flow, computed: Set[str]) -> list[Any]:
    """Returns the gradients of inputs that pieces have computed; a batch gets none."""
    names = [n for n, nest in given.items() for leaf in tensors(nest) if has_gradient(leaf)]
    return [g for g, name in zip(gradients, names, strict=True) if name in computed]


def _given_to_backward(cut: GraphCut, concrete: Any) -> set[str]:
    """Returns the names of the tensors that exist when the backward pass of a piece begins."""
    return {t.name for t in (*cut.early, *cut.late, *cut.saved_for(concrete.outputs))}


def _working(
    cut: GraphCut, concrete: Any, of_inputs: Sequence[Any], seeds: Sequence[Any], *, least: float
) -> Working:
    """Simulates the backward pass of a piece.

    The gradients of weights are added to sums that exist, and the gradients of its outputs, the
    seeds, are given. Weights and inputs do not count.
    """
    graph, ends = concrete.graph, [t.op for t in concrete.outputs]
    backward = after(graph, ends, _given_to_backward(cut, concrete))
    whole = above(graph, ends)
    given = _sum(map(_size, seeds), least)
    return Working(
        given + peak_of(changes_of(graph, backward, of_inputs, least=least)),
        given + peak_of(changes_of(graph, whole, of_inputs, least=least)),
    )


def _derived(graph: Any, inputs: Mapping[str, Leaf], same: Same) -> dict[str, Derived]:
    """Returns the tensors that are computed from one input and constants, by their names.

    Args:
      graph: graph of a piece.
      inputs: {name: input of the piece}.
      same: see `Same`.
    """
    found = {name: Derived(leaf, "") for name, leaf in inputs.items()}
    for op in graph.get_operations():
        given = [same[tensor.name] for tensor in op.inputs]
        before = [found.get(tensor.name) for tensor in given]
        leaves = {one.leaf for one in before if one is not None}
        if len(leaves) != 1 or len(op.outputs) != 1 or kind(op, given) == op.name:
            continue
        hows = [
            one.how if one is not None else str(kind(tensor.op, ()))
            for one, tensor in zip(before, given, strict=True)
            if one is not None or tensor.op.type == "Const"
        ]
        if len(hows) == len(given) and op.outputs[0].name not in found:
            how = hashlib.sha256(str((kind(op, ()), hows)).encode()).hexdigest()
            found[op.outputs[0].name] = Derived(leaves.pop(), how)
    return {name: one for name, one in found.items() if name not in inputs}


def _leaves(flow: Mapping[str, Any]) -> list[Leaf]:
    return [(name, i) for name, nest in flow.items() for i, _ in enumerate(tensors(nest))]


def _bytes(
    saved: Sequence[Any], names: Mapping[str, TensorName], same: Same, trace: PieceTrace
) -> dict[TensorName, float]:
    """Returns {tensor: bytes}; if a size is unknown, all bytes that the piece writes.

    Each item of a list is a tensor.
    """
    roots = {same[tensor.name].name: same[tensor.name] for tensor in saved}
    found: dict[TensorName, float] = {}
    for name, tensor in roots.items():
        items = list_items(tensor) if tensor.dtype == tf.variant else None
        if items is not None:
            found |= {f"{items.name}[{i}]": items.each for i in range(items.length) if items.each}
        elif tensor.dtype in (tf.variant, tf.resource) or not tensor.shape.is_fully_defined():
            return {"all that it writes": trace.bytes_written}
        else:
            found[names.get(name, name)] = _size(tensor)
    return found


def _size(tensor: Any) -> float:
    return float(math.prod(tensor.shape.as_list()) * tensor.dtype.size)
