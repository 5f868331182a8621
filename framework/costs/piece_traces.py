"""Traces each piece of a task to find what it reads, writes and computes; allocates nothing.

Pieces that a model declares alike (`Piece.kind`), whose layers have the same Params and whose
inputs have the same shapes, are traced once: a thousand layers take the time of a few.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from tekso.framework.context import Mode, StepContext
from tekso.framework.costs import graph_work
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.foreign_variables import refused
from tekso.framework.nests import mapped, tensors
from tekso.framework.pieces import LOSS_SUM, METRICS, Flow, Piece
from tekso.framework.signature import Signature, num_examples
from tekso.framework.symbolic import new_graph, placeholder, placeholders, spec_of, specs_of_batch
from tekso.framework.weight_spec import WeightSpec

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class PieceTrace:
    """The result of tracing a piece.

    Attributes:
      reads: names of the values of the flow that it reads.
      writes: values that it changes or adds: {name: nest of TensorSpecs}.
      flops: floating-point operations of the forward pass over a micro-batch.
      bytes_written: bytes that the forward pass writes.
      weight_bytes: bytes of the weights that it reads.
      product_bytes: bytes of the outputs of its products and convolutions.
      measure: what `trace_all` was asked to measure.
    """

    reads: frozenset[str]
    writes: Mapping[str, Any]
    flops: float
    bytes_written: float
    weight_bytes: float
    product_bytes: float = 0.0
    measure: float = 0.0

    @property
    def bytes_moved(self) -> float:
        """Bytes that the forward pass writes, plus the bytes of the weights that it reads."""
        return self.bytes_written + self.weight_bytes


def rows_of(spec: WeightSpec, rows: tuple[int, int] | None) -> WeightSpec:
    """Returns the spec of some rows of a stacked weight; None means all rows."""
    if rows is None:
        return spec
    return dataclasses.replace(spec, shape=(rows[1] - rows[0], *spec.shape[1:]))


def trace_all(
    pieces: Sequence[Piece],
    specs: Mapping[str, WeightSpec],
    batch: Signature,
    *,
    measure: Callable[[Any], float] = lambda graph: 0.0,
) -> list[PieceTrace]:
    """Traces the pieces of a task one after the other.

    Args:
      pieces: the pieces, in order.
      specs: specs of all weights of the task.
      batch: signature of a micro-batch.
      measure: a further figure of the graph of the forward pass of a piece.

    Raises:
      ExecutionError: dim 0 of an output of a piece does not count examples, a piece draws random
        numbers without the context, or the last piece computes no loss.
    """
    flow: Flow = specs_of_batch(batch)
    size, paths = num_examples(batch), sorted(specs)
    traces, known = [], {}
    for piece in pieces:
        own = {path: rows_of(specs[path], piece.rows) for path in piece.weights(paths)}
        key = _kind(piece, own, flow)
        if key not in known:
            known[key] = _trace(piece, own, flow, size, measure)
        trace = known[key]
        traces.append(trace)
        flow = {**flow, **trace.writes}
    if not pieces or LOSS_SUM not in traces[-1].writes or METRICS not in traces[-1].writes:
        raise ExecutionError(
            f"the last piece of the task adds no {LOSS_SUM!r} and {METRICS!r} to the flow; see "
            "Task.pieces"
        )
    return traces


def of_each(
    pieces: Sequence[Piece],
    traces: Sequence[PieceTrace],
    specs: Mapping[str, WeightSpec],
    batch: Signature,
    find: Callable[[Piece, PieceTrace, dict[str, WeightSpec], Flow], T],
    *,
    apart: Sequence[Any] | None = None,
) -> list[T]:
    """Returns the result of `find` for every piece; it runs once for pieces with the same trace.

    Args:
      pieces: the pieces of the task, in order.
      traces: their traces.
      specs: specs of all weights.
      batch: signature of a micro-batch.
      find: called as `find(piece, trace, own, given)` with the specs of the weights and of the
        values of the flow that the piece reads.
      apart: a value for each piece; pieces with other values have results of their own.
    """
    flow: Flow = specs_of_batch(batch)
    paths = sorted(specs)
    known: dict[Any, T] = {}
    keys = list(zip(map(id, traces), apart or [None] * len(traces), strict=True))
    for piece, trace, key in zip(pieces, traces, keys, strict=True):
        if key not in known:
            own = {path: rows_of(specs[path], piece.rows) for path in piece.weights(paths)}
            given = {name: flow[name] for name in sorted(flow) if name in trace.reads}
            known[key] = find(piece, trace, own, given)
        flow = {**flow, **trace.writes}
    return [known[key] for key in keys]


def _kind(piece: Piece, own: Mapping[str, WeightSpec], flow: Flow) -> Any:
    """Returns a key that is equal for pieces declared alike with equal inputs, otherwise unique."""
    if piece.kind is None:
        return id(piece)
    layers = tuple(layer.params.to_text() for layer in piece.layers.values())
    shapes = tuple((spec.shape, spec.dtype) for spec in own.values())
    return piece.kind, layers, shapes, str(sorted((k, str(v)) for k, v in flow.items()))


class _Noted(dict[str, Any]):
    """A flow that records which names a piece reads.

    Args:
      flow: all values.
      copied: names of the values that a copy of the flow has.
    """

    def __init__(self, flow: Flow, copied: Iterable[str]) -> None:
        super().__init__({name: flow[name] for name in copied})
        self.flow, self.asked = flow, set[str]()

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        return self.flow[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.flow = {**self.flow, name: value}
        super().__setitem__(name, value)

    def __contains__(self, name: object) -> bool:
        self.asked.add(str(name))
        return name in self.flow

    def get(self, name: str, default: Any = None) -> Any:
        """See dict."""
        self.asked.add(name)
        return self.flow.get(name, default)


def _trace(
    piece: Piece,
    own: Mapping[str, WeightSpec],
    flow: Flow,
    size: int,
    measure: Callable[[Any], float],
) -> PieceTrace:
    with new_graph().as_default() as graph:
        reads, writes = _run(graph, piece, own, flow, size, "train", sorted(flow))
        for name, value in writes.items():
            if name not in (LOSS_SUM, METRICS):
                _check_examples(piece, name, value, size)
        work, measured = graph_work.count(graph), measure(graph)
    reads = _reads_of_evaluation(piece, own, flow, size, reads)
    weight_bytes = sum(spec.size_bytes for spec in own.values())
    specs = {name: mapped(spec_of, value) for name, value in writes.items()}
    return PieceTrace(
        frozenset(reads),
        specs,
        work.flops,
        work.bytes_written,
        weight_bytes,
        work.product_bytes,
        measured,
    )


def _reads_of_evaluation(
    piece: Piece, own: Mapping[str, WeightSpec], flow: Flow, size: int, reads: set[str]
) -> set[str]:
    """Returns the names of the values that a piece reads in training or in evaluation.

    If a piece reads a value through a copy of the flow, such as the argument of `loss_weight`, and
    uses only its shape, nothing records this. So copies have only the values recorded so far.

    Args:
      piece: the piece.
      own: specs of its weights.
      flow: the flow before it.
      size: number of examples.
      reads: names of the values that it was seen to read in training.
    """
    while True:
        try:
            with new_graph().as_default() as graph:
                return reads | _run(graph, piece, own, flow, size, "eval", sorted(reads))[0]
        except KeyError as error:
            missing = {name for name in error.args if name in flow} - reads
            if not missing:
                raise
            reads = reads | missing


def _run(
    graph: Any,
    piece: Piece,
    own: Mapping[str, WeightSpec],
    flow: Flow,
    size: int,
    mode: Mode,
    copied: Sequence[str],
) -> tuple[set[str], dict[str, Any]]:
    """Returns the names of the values that a piece reads, and the values that it writes."""
    given = _Noted(mapped(placeholder, flow), copied)
    weights = placeholders(own)
    ctx = StepContext(mode=mode, num_examples=size)
    try:
        with refused(next(iter(piece.layers.values()), None)):
            after = piece.compute(piece.theta(weights), given, ctx)
    except Exception as error:
        error.add_note(
            f"while tracing the piece {piece.name!r}, whose inputs are {', '.join(sorted(flow))}"
        )
        raise
    reads = given.asked & set(flow)
    writes = {
        name: mapped(tf.convert_to_tensor, value)
        for name, value in dict(after).items()
        if name not in flow or not _is_same(value, given.flow[name])
    }
    used = {id(t) for op in graph.get_operations() for t in op.inputs}
    used |= {id(t) for value in writes.values() for t in tensors(value)}
    reads |= {name for name, v in given.flow.items() if any(id(t) in used for t in tensors(v))}
    return reads, writes


def _is_same(value: Any, given: Any) -> bool:
    new, old = tf.nest.flatten(value), tf.nest.flatten(given)
    return len(new) == len(old) and all(a is b for a, b in zip(new, old, strict=True))


def _check_examples(piece: Piece, name: str, value: Any, size: int) -> None:
    for tensor in tensors(value):
        if not tensor.shape.rank or tensor.shape[0] != size:
            raise ExecutionError(
                f"{piece.name} outputs {name!r} with shape {tensor.shape}, but a micro-batch has "
                f"{size} examples: dim 0 of every tensor passed between pieces must count "
                "examples, and a piece that couples the examples of a batch cannot be part of a "
                "pipeline"
            )
