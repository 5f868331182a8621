"""Counts the operations of a forward pass by part of the model, for the plan of a run."""

from __future__ import annotations

import re

from tekso.framework import task_results
from tekso.framework.costs.piece_traces import trace_all
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.run import layer_flops
from tekso.framework.signature import Signature
from tekso.framework.task import Task
from tekso.framework.task_values import TaskError
from tekso.framework.theta import SEPARATOR

_NUMBER = re.compile(r"/\d+(?=/|$)")  # of a layer of a stack


def forward_flops(task: Task, batch: Signature) -> dict[str, float]:
    """Returns {part: floating-point operations of the forward pass}, in the order of the model.

    The parts are the pieces of the task (`Task.pieces`), or if these do not divide the model, its
    layers (`layer_flops`). The layers of a stack are one part, such as "stack/layers (sum of 4)",
    unless the model has nothing else and there are few. The result is empty if the loss cannot be
    traced.

    Args:
      task: the task.
      batch: signature of the batch that is counted, such as the global batch.
    """
    parts = _of_pieces(task, batch)
    if any(SEPARATOR in name for name in parts):
        return parts
    try:
        return layer_flops.by_part(layer_flops.layer_flops(task, batch))
    except Exception:  # in the code of the task: the plan of the step says what is wrong
        return parts


def _of_pieces(task: Task, batch: Signature) -> dict[str, float]:
    """Returns the operations of the pieces; empty if they are none for a pipeline."""
    try:
        pieces = task_results.pieces(task)
        traces = trace_all(pieces, task.specs(), batch)
    except (ExecutionError, TaskError):
        return {}
    depth = layer_flops.common_depth([p.name for p in pieces if p.name != layer_flops.LOSS])
    layers: dict[str, list[float]] = {}
    for piece, trace in zip(pieces, traces, strict=True):
        names = piece.name.split(SEPARATOR)
        part, rest = SEPARATOR.join(names[: depth + 1]), SEPARATOR.join(["", *names[depth + 1 :]])
        layers.setdefault(part + _NUMBER.sub("", rest), []).append(trace.flops)
    return {layer_flops.summed(name, len(flops)): sum(flops) for name, flops in layers.items()}
