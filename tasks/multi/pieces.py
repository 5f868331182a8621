"""The pieces of several tasks as one list, of which a batch uses those of its tasks.

    lm  embed      layer 0      layer 1      …                  together, in the order of their
    mt       embed      layer 0      layer 1      …  last       positions in their own lists

Layers that two tasks share are then near each other, mostly in one stage of a pipeline. The last
pieces of all tasks are one piece, which returns the losses.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tekso.framework.context import StepContext
from tekso.framework.input.task_inputs import is_in, named, of_task
from tekso.framework.layer import Layer
from tekso.framework.pieces import Flow, Piece
from tekso.framework.shared_weights import SharedWeights
from tekso.framework.theta import SEPARATOR, Theta

InTask = Callable[[str, StepContext, Callable[[StepContext], Any]], Any]
"""`in_task(task, ctx, compute)` returns `compute(ctx of the task)`."""

End = Callable[[Mapping[str, Flow], StepContext], Flow]
"""`end({task: its flow after its last piece}, ctx)` returns the flow with the losses."""


@dataclasses.dataclass(frozen=True)
class SharingPiece(Piece):
    """A piece of a model with shared weights: it reads the stored weights.

    Attributes:
      stored: {path: path of the stored weight}.
    """

    stored: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def weights(self, paths: Sequence[str]) -> list[str]:
        """See Piece: those of the stored paths that this piece reads."""
        read = {self.stored[path] for path in super().weights(sorted(self.stored))}
        return [path for path in paths if path in read]

    def owns(self, path: str) -> bool:
        """See Piece."""
        return path in self.weights([path])

    def theta(self, flat: Mapping[str, Any]) -> Theta:
        """See Piece; a weight has all its paths."""
        return super().theta({p: flat[at] for p, at in self.stored.items() if at in flat})


class TaskFlow(dict[str, Any]):
    """The values of one task in a flow, by their own names; the flow notes which ones are read."""

    def __init__(self, flow: Flow, task: str) -> None:
        self._flow, self._head = flow, task + SEPARATOR
        super().__init__(of_task(task, flow))

    def __getitem__(self, name: str) -> Any:
        return self._flow[self._head + name]

    def __contains__(self, name: object) -> bool:
        return f"{self._head}{name}" in self._flow

    def get(self, name: str, default: Any = None) -> Any:
        """See dict."""
        return self._flow.get(self._head + name, default)


def merged(
    pieces: Mapping[str, Sequence[Piece]], shared: SharedWeights, in_task: InTask, end: End
) -> list[Piece]:
    """Returns the pieces of all tasks.

    Args:
      pieces: {task: its pieces}.
      shared: the stored paths of the weights.
      in_task: runs a function in the context of a task.
      end: turns the results of the tasks into losses.
    """
    placed = []
    for number, (task, own) in enumerate(pieces.items()):
        for i, piece in enumerate(own[:-1]):
            placed.append(((i / (len(own) - 1), number), _of_task(task, piece, shared, in_task)))
    last = {task: own[-1].below(task) for task, own in pieces.items()}
    layers: dict[str, Layer] = {}
    for piece in last.values():
        layers |= piece.layers
    whole = SharingPiece(
        "losses",
        layers,
        functools.partial(_run_last, last, in_task, end),
        stored=shared.stored,
    )
    return [*(piece for _, piece in sorted(placed, key=lambda pair: pair[0])), whole]


def _of_task(task: str, piece: Piece, shared: SharedWeights, in_task: InTask) -> Piece:
    own = piece.below(task)

    def run(compute: Callable[..., Flow], *args: Any) -> Flow:
        *first, theta, flow, ctx = args
        if not is_in(task, flow):
            unchanged: Flow = flow
            return unchanged
        given = TaskFlow(flow, task)
        after = in_task(task, ctx, lambda ctx: compute(*first, theta, given, ctx))
        return {**flow, **named(task, after)}

    return SharingPiece(
        own.name,
        own.layers,
        functools.partial(run, own.run),
        rows=own.rows,
        run_rows=own.run_rows and functools.partial(run, own.run_rows),
        kind=own.kind,
        stored=shared.stored,
    )


def _run_last(
    last: Mapping[str, Piece],
    in_task: InTask,
    end: End,
    theta: Theta,
    flow: Flow,
    ctx: StepContext,
) -> Flow:
    found = {}
    for task, piece in last.items():
        if is_in(task, flow):
            given = TaskFlow(flow, task)
            run = functools.partial(piece.run, theta, given)
            found[task] = in_task(task, ctx, run)
    return {**flow, **end(found, ctx)}
