"""Groups pieces into stages: their inputs and outputs, and the weights that each stage stores."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.costs.piece_traces import PieceTrace
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.nests import has_gradient, tensors
from tekso.framework.pieces import LOSS_SUM, METRICS, Flow, Piece, joined
from tekso.framework.signature import Signature
from tekso.framework.symbolic import specs_of_batch
from tekso.framework.theta import SEPARATOR, Theta
from tekso.framework.weight_spec import WeightSpec

BATCH = -1  # the producer of the values of the batch


class Value(NamedTuple):
    """A value that is passed between pieces.

    Attributes:
      name: its name in the flow.
      producer: the stage that computes it, or `BATCH`.
    """

    name: str
    producer: int


Rows = tuple[int, int] | None


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage of a pipeline.

    Attributes:
      index: its position in the order of stages.
      pieces: the pieces that it runs; neighbouring layers of a repeated stack are one piece.
      piece_names: names of the pieces before they were joined.
      traces: traces of the pieces before they were joined.
      inputs: the values that it reads.
      outputs: names of the values that it computes and a later stage reads.
      weights: {path of a weight that it reads: its rows, or None for all rows}.
      is_last: whether it computes the loss.
    """

    index: int
    pieces: tuple[Piece, ...]
    piece_names: tuple[str, ...]
    traces: tuple[PieceTrace, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[str, ...]
    weights: Mapping[str, Rows]
    is_last: bool


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """All stages of a pipeline.

    Attributes:
      stages: the stages, in order.
      values: {value: nest of TensorSpecs}, for a micro-batch.
      owners: {path: stages that hold the weight}. If several stages use all rows of a weight (tied
        tables, stacks that a model computes twice), the first one stores it and the others have
        copies. Of any other stacked weight, each stage stores its own rows.
    """

    stages: tuple[Stage, ...]
    values: Mapping[Value, Any]
    owners: Mapping[str, tuple[int, ...]]

    def learned(self, value: Value) -> list[bool]:
        """Returns for every tensor of a value whether its gradient is sent to its producer."""
        is_made = value.producer != BATCH
        return [is_made and has_gradient(leaf) for leaf in tensors(self.values[value])]

    def learned_inputs(self, stage: Stage) -> list[int]:
        """Returns the indices of the flat inputs of a stage that get a gradient."""
        of_all = [found for value in stage.inputs for found in self.learned(value)]
        return [i for i, is_learned in enumerate(of_all) if is_learned]

    def is_shared(self, path: str) -> bool:
        """Whether several stages read all rows of a weight."""
        holders = self.owners[path]
        return len(holders) > 1 and self.stages[holders[0]].weights[path] is None

    def keeper(self, layer: str, index: int) -> int:
        """Returns the stage that stores a layer's direct weights; if shared, the first stage.

        Args:
          layer: path of the layer.
          index: a stage that runs the layer, and stores its rows of weights that are not shared.
        """
        own = (path for path in self.owners if path.rpartition(SEPARATOR)[0] == layer)
        return next((self.owners[path][0] for path in own if self.is_shared(path)), index)

    def owned(self, index: int) -> dict[str, Rows]:
        """Returns the weights that a stage stores and updates, with its rows of each."""
        return {
            path: rows
            for path, rows in self.stages[index].weights.items()
            if not self.is_shared(path) or self.owners[path][0] == index
        }


def stage_plan(
    pieces: Sequence[Piece],
    traces: Sequence[PieceTrace],
    sizes: Sequence[int],
    specs: Mapping[str, WeightSpec],
    batch: Signature,
) -> StagePlan:
    """Returns the stages that have the given numbers of pieces.

    Args:
      pieces: the pieces of the task, in order.
      traces: their traces.
      sizes: the number of pieces of every stage.
      specs: specs of all weights.
      batch: signature of a micro-batch.

    Raises:
      ExecutionError: no piece reads some weight.
    """
    pieces = _with_whole_stacks(pieces, specs)
    values: dict[Value, Any] = {Value(n, BATCH): spec for n, spec in specs_of_batch(batch).items()}
    latest = {value.name: value for value in values}
    ends = list(itertools.accumulate(sizes))
    read: list[list[Value]] = []
    for index, (size, end) in enumerate(zip(sizes, ends, strict=True)):
        inputs: dict[Value, None] = {}
        written: dict[str, Any] = {}
        for trace in traces[end - size : end]:
            for name in sorted(trace.reads):
                if name not in written:
                    inputs[latest[name]] = None
            written.update(trace.writes)
        read.append(list(inputs))
        for name, spec in written.items():
            latest[name] = Value(name, index)
            if name not in (LOSS_SUM, METRICS):
                values[latest[name]] = spec
    needed = sorted({value for inputs in read for value in inputs})
    paths = sorted(specs)
    stages = []
    for index, (size, end) in enumerate(zip(sizes, ends, strict=True)):
        own = pieces[end - size : end]
        stages.append(
            Stage(
                index,
                tuple(joined(own)),
                tuple(piece.name for piece in own),
                tuple(traces[end - size : end]),
                tuple(read[index]),
                tuple(v.name for v in needed if v.producer == index),
                _weights(own, paths),
                is_last=index == len(sizes) - 1,
            )
        )
    owners: dict[str, list[int]] = {path: [] for path in specs}
    for stage in stages:
        for path in stage.weights:
            owners[path].append(stage.index)
    _check_owners(owners)
    holders = {path: tuple(indices) for path, indices in owners.items()}
    return StagePlan(tuple(stages), {v: values[v] for v in needed}, holders)


def _with_whole_stacks(pieces: Sequence[Piece], specs: Mapping[str, WeightSpec]) -> list[Piece]:
    """Returns the pieces; those of a repeated stack that is read several times read all its rows.

    A stack whose rows are read once and in order is divided over the stages. Any other one is
    shared as a tied table is: every stage that reads it has all rows.

    Raises:
      ExecutionError: no piece reads some row.
    """
    paths = sorted(specs)
    read: dict[str, list[Rows]] = {}
    for piece in pieces:
        for path in piece.weights(paths):
            read.setdefault(path, []).append(piece.rows)
    _check_rows(read, specs)
    divided = {path for path, rows in read.items() if _is_once_in_order(rows, specs[path])}
    return [
        piece
        if piece.rows is None or divided.issuperset(piece.weights(paths))
        else dataclasses.replace(
            piece, rows=None, run_rows=None, run=functools.partial(_run_some_rows, piece)
        )
        for piece in pieces
    ]


def _check_rows(read: Mapping[str, Sequence[Rows]], specs: Mapping[str, WeightSpec]) -> None:
    for path, rows in read.items():
        if None in rows:
            continue
        found = {i for pair in rows if pair for i in range(*pair)}
        if missing := sorted(set(range(specs[path].shape[0])) - found):
            raise ExecutionError(
                f"no piece of the task reads the rows {missing} of the stacked weight {path}: list "
                "a piece for each layer of a repeated stack (see Task.pieces)"
            )


def _is_once_in_order(rows: Sequence[Rows], spec: WeightSpec) -> bool:
    ends = [0]
    for pair in rows:
        if pair is None or pair[0] != ends[-1]:
            return False
        ends.append(pair[1])
    return ends[-1] == spec.shape[0]


def _run_some_rows(piece: Piece, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
    """Runs a piece of a repeated stack, given all rows of the weights."""
    first, end = piece.rows or (0, None)
    return piece.run(tf.nest.map_structure(lambda w: w[first:end], theta), flow, ctx)


def _weights(pieces: Sequence[Piece], paths: Sequence[str]) -> dict[str, Rows]:
    return {path: piece.rows for piece in joined(pieces) for path in piece.weights(paths)}


def _check_owners(owners: Mapping[str, Sequence[int]]) -> None:
    for path, holders in owners.items():
        if not holders:
            raise ExecutionError(
                f"no piece of the task reads the weight {path}: every piece must name the layers "
                "whose weights it reads (see Task.pieces)"
            )
