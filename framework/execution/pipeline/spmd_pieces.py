"""Divides the pieces of a task into one repeated stack and the pieces before and after it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from tekso.framework.context import StepContext
from tekso.framework.costs.piece_traces import PieceTrace
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.nests import has_gradient, tensors
from tekso.framework.pieces import Flow, Piece, joined
from tekso.framework.theta import Theta
from tekso.framework.weight_spec import WeightSpec

_INSTEAD = "--execution=pipelined supports any model"


@dataclasses.dataclass(frozen=True)
class StackPieces:
    """The pieces of a task that has one repeated stack.

    Attributes:
      before: the pieces before the stack.
      stack: all layers of the stack as one piece.
      run_rows: see `Piece`.
      after: the pieces after the stack.
      paths: paths of the weights of the stack.
      writes: names of the values that a layer passes to the next layer.
      reads: names of the other values that the layers read.
      after_reads: names of the values that the pieces after the stack read.
    """

    before: tuple[Piece, ...]
    stack: Piece
    run_rows: Callable[[int, Theta, Flow, StepContext], Flow]
    after: tuple[Piece, ...]
    paths: tuple[str, ...]
    writes: tuple[str, ...]
    reads: tuple[str, ...]
    after_reads: tuple[str, ...]


def find(
    pieces: Sequence[Piece],
    traces: Sequence[PieceTrace],
    specs: Mapping[str, WeightSpec],
    num_stages: int,
) -> StackPieces:
    """Returns the stack of a task and the pieces around it.

    Args:
      pieces: the pieces, in order.
      traces: their traces.
      specs: specs of all weights.
      num_stages: number of stages over which the layers are divided.

    Raises:
      ExecutionError: there is no stack or several, the number of stages does not divide its layers,
        or its layers do not output the same values.
    """
    whole = joined(pieces)
    stacks = [i for i, piece in enumerate(whole) if piece.rows is not None]
    run_rows = whole[stacks[0]].run_rows if stacks else None
    if len(stacks) != 1 or run_rows is None:
        which = "no repeated stack" if not stacks else f"{len(stacks)} repeated stacks"
        raise ExecutionError(
            f"the task has {which} among its {len(pieces)} pieces, but "
            "--execution=spmd_pipelined divides the layers of one RepeatedStack over the stages "
            f"(task.model.stack=RepeatedStack.Params); {_INSTEAD}"
        )
    place = stacks[0]
    stack = whole[place]
    paths = tuple(stack.weights(sorted(specs)))
    first, end = stack.rows or (0, 0)
    if first or any(specs[path].shape[0] != end for path in paths):
        raise ExecutionError(
            f"{stack.name} does not include all layers of its repeated stack; {_INSTEAD}"
        )
    if end % num_stages:
        near = [n for n in range(1, end + 1) if end % n == 0]
        raise ExecutionError(
            f"execution.num_stages {num_stages} does not divide the "
            f"{end} layers of {stack.name}; these numbers do: {', '.join(map(str, near))}; "
            f"{_INSTEAD}"
        )
    own = [t for p, t in zip(pieces, traces, strict=True) if p.rows is not None]
    writes = sorted({name for trace in own for name in trace.writes})
    for trace in own:
        if sorted(trace.writes) != writes or str(trace.writes) != str(own[0].writes):
            raise ExecutionError(
                f"the layers of {stack.name} do not all output values of the same names and "
                f"shapes; {_INSTEAD}"
            )
    if any(not has_gradient(leaf) for leaf in tensors(dict(own[0].writes))):
        raise ExecutionError(f"the layers of {stack.name} output integers; {_INSTEAD}")
    reads = sorted({name for trace in own for name in trace.reads} - set(writes))
    end_of_stack = max(i for i, piece in enumerate(pieces) if piece.rows is not None)
    after_reads = {name for trace in traces[end_of_stack + 1 :] for name in trace.reads}
    return StackPieces(
        tuple(whole[:place]),
        stack,
        run_rows,
        tuple(whole[place + 1 :]),
        paths,
        tuple(writes),
        tuple(reads),
        tuple(sorted(after_reads)),
    )
