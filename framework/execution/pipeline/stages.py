"""Groups pieces into stages: their inputs and outputs, and the weights that each stage stores."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tekso.framework.execution.base import Signature
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.pipeline.piece_traces import PieceTrace, flow_of, tensors
from tekso.framework.pieces import LOSS_SUM, METRICS, Piece, joined
from tekso.framework.theta import SEPARATOR
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
        tables), the first one stores it and the others have copies. Of a stacked weight, each stage
        stores its own rows.
    """

    stages: tuple[Stage, ...]
    values: Mapping[Value, Any]
    owners: Mapping[str, tuple[int, ...]]

    def learned(self, value: Value) -> list[bool]:
        """Returns for every tensor of a value whether its gradient is sent to its producer."""
        is_made = value.producer != BATCH
        return [is_made and leaf.dtype.is_floating for leaf in tensors(self.values[value])]

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
      ExecutionError: no piece reads some weight, or a weight cannot be divided over the stages that
        read it.
    """
    values: dict[Value, Any] = {Value(n, BATCH): spec for n, spec in flow_of(batch).items()}
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
    _check_owners(stages, owners, specs)
    holders = {path: tuple(indices) for path, indices in owners.items()}
    return StagePlan(tuple(stages), {v: values[v] for v in needed}, holders)


def _weights(pieces: Sequence[Piece], paths: Sequence[str]) -> dict[str, Rows]:
    found: dict[str, Rows] = {}
    for piece in joined(pieces):
        for path in piece.weights(paths):
            if path in found and (found[path] != piece.rows or piece.rows is not None):
                raise ExecutionError(
                    f"several pieces of one stage use rows of {path}: a repeated stack that a "
                    "model uses twice cannot be part of a pipeline"
                )
            found[path] = piece.rows
    return found


def _check_owners(
    stages: Sequence[Stage], owners: Mapping[str, Sequence[int]], specs: Mapping[str, WeightSpec]
) -> None:
    for path, holders in owners.items():
        if not holders:
            raise ExecutionError(
                f"no piece of the task reads the weight {path}: every piece must name the layers "
                "whose weights it reads (see Task.pieces)"
            )
        rows = [stages[i].weights[path] for i in holders]
        if len(rows) > 1 and any(rows) and not all(rows):
            stage, (first, end) = next(
                (i, pair) for i, pair in zip(holders, rows, strict=True) if pair
            )
            raise ExecutionError(
                f"stage {holders[rows.index(None)]} uses all layers of the stacked weight "
                f"{path!r}, stage {stage} only rows {first} to {end - 1}; give both the same "
                "layers or untie them"
            )
        pairs = [pair for pair in rows if pair is not None]
        ends = [0, *(end for _, end in pairs)]
        if pairs and (
            [first for first, _ in pairs] != ends[:-1] or ends[-1] != specs[path].shape[0]
        ):
            raise ExecutionError(
                f"the stages read rows {pairs} of {path}, which has {specs[path].shape[0]} rows: "
                "every row must be read once, in order; a repeated stack that a model uses twice "
                "cannot be part of a pipeline"
            )
