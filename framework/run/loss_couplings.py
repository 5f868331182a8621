"""Finds the line of a task at which the examples of a batch are combined.

The ops of the task run one by one for some examples, and for two parts of them. An op combines the
examples if the rows of its inputs are the same in both cases, and those of its output are not:

    y                      rows are the same
    tf.reduce_mean(y, 0)   has no rows
    y - …                  rows differ: this line is named
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from tekso.framework.context import Mode
from tekso.framework.graph_errors import is_own_file, place_in
from tekso.framework.layer import Layer
from tekso.framework.run.loss_trial import Batch, Trial, rows_of
from tekso.framework.run.ran_ops import RanOp, observing

_DEEPEST = 200  # frames of a stack that are read
_NUMBER_OF_TRACE = re.compile(r"(?<=_)\d+$")


class Combination(NamedTuple):
    """Where examples are combined.

    Attributes:
      place: the line, as `place_in` returns it.
      layer: the class of the layer or task that has the line; "": unknown.
      is_draw: whether random numbers of the context without a batch dimension combine them.
    """

    place: str
    layer: str
    is_draw: bool


@dataclasses.dataclass
class _Recorder:
    """Records the ops of a call, and the stack of one of them.

    Attributes:
      stack_of: index of the op whose stack is recorded; None: of none.
      ops: the ops; their tensors are kept, so that their ids are unique.
      frames: (file, line, function) of the stack, the innermost last.
      layer: the class of the layer or task that has the line.
    """

    stack_of: int | None = None
    ops: list[RanOp] = dataclasses.field(default_factory=list)
    frames: list[tuple[str, int, str]] = dataclasses.field(default_factory=list)
    layer: str = ""

    def __call__(self, op: RanOp) -> None:
        if len(self.ops) == self.stack_of:
            self._read_stack()
        name = _NUMBER_OF_TRACE.sub("", op.kind)  # each trace of a function has another number
        self.ops.append(op._replace(kind=name))

    def _read_stack(self) -> None:
        frame: FrameType | None = sys._getframe(3)  # of TensorFlow, called by the layer
        while frame is not None and len(self.frames) < _DEEPEST:
            code = frame.f_code
            self.frames.insert(0, (code.co_filename, frame.f_lineno, code.co_name))
            owner = frame.f_locals.get("self")
            if not self.layer and isinstance(owner, Layer) and not is_own_file(code.co_filename):
                self.layer = type(owner).__name__
            frame = frame.f_back


def combination(trial: Trial, examples: Batch, mode: Mode) -> Combination | None:
    """Returns where a task combines the examples of a batch; None: it is not found.

    An error of this search is no error of the task: it returns None.

    Args:
      trial: computes the task.
      examples: two or more examples.
      mode: in which the task is computed.
    """
    try:
        return _combination(trial, examples, mode)
    except Exception:  # the caller has found that the loss is wrong, and says that
        return None


def _combination(trial: Trial, examples: Batch, mode: Mode) -> Combination | None:
    size = len(next(iter(examples.values())))
    whole = _recorded(trial, examples, mode)
    parts = (
        _recorded(trial, rows_of(examples, slice(1)), mode, whole=size),
        _recorded(trial, rows_of(examples, slice(1, None)), mode, offset=1, whole=size),
    )
    for i, ops in enumerate(zip(whole.ops, *(part.ops for part in parts), strict=False)):
        if len({op.kind for op in ops}) > 1:
            return None  # the task computes something else
        if any(_differ(trial, *each) for each in zip(*(op.outputs for op in ops), strict=False)):
            found = _recorded(trial, examples, mode, stack_of=i)
            if (place := place_in(found.frames)) == "":
                return None
            return Combination(place, found.layer, _is_draw(trial, whole, parts, ops))
    return None


def _recorded(
    trial: Trial,
    examples: Batch,
    mode: Mode,
    *,
    offset: int = 0,
    whole: int | None = None,
    stack_of: int | None = None,
) -> _Recorder:
    """Returns the ops of a task for some examples."""
    recorder = _Recorder(stack_of)
    with observing(recorder):
        trial.sums(examples, mode=mode, offset=offset, whole=whole)
    return recorder


def _differ(trial: Trial, whole: Any, first: Any, second: Any) -> bool:
    """Whether the rows of a tensor differ from those of the parts; False for one without rows."""
    if (axis := _axis(whole, first, second)) is None or not whole.dtype.is_floating:
        return False
    rows = np.concatenate([_numbers(first), _numbers(second)], axis)
    return _are_different(trial, _numbers(whole), rows)


def _axis(whole: Any, first: Any, second: Any) -> int | None:
    """Returns the dim that has the rows of a tensor; None: it has none."""
    shapes = [tuple(one.shape) for one in (whole, first, second)]
    if len({len(shape) for shape in shapes}) > 1:
        return None
    sizes = list(zip(*shapes, strict=True))
    dims = [i for i, (n, *_) in enumerate(sizes) if set(sizes[i]) != {n}]
    if len(dims) != 1 or sizes[dims[0]][0] != sum(sizes[dims[0]][1:]):
        return None
    return dims[0]


def _is_draw(
    trial: Trial, whole: _Recorder, parts: Sequence[_Recorder], ops: Sequence[RanOp]
) -> bool:
    """Whether an input of an op has other values in the parts, and depends on no example."""
    made: dict[int, int] = {}
    for i, op in enumerate(whole.ops):
        made.update(dict.fromkeys(map(id, op.outputs), i))
    for tensors in zip(*(op.inputs for op in ops), strict=False):
        if len({tuple(one.shape) for one in tensors}) > 1 or not tensors[0].dtype.is_floating:
            continue
        values = [_numbers(one) for one in tensors]
        if not any(_are_different(trial, values[0], value) for value in values[1:]):
            continue
        pending, seen = [tensors[0]], set[int]()
        while pending:
            index = made.get(id(pending.pop()))
            if index is None or index in seen:
                continue
            seen.add(index)
            inputs = [one.ops[index].inputs for one in (whole, *parts)]
            same = zip(*inputs, strict=False)
            if any(len({tuple(one.shape) for one in each}) > 1 for each in same):
                return False  # it depends on examples
            pending += inputs[0]
        return True
    return False


def _numbers(tensor: Any) -> np.ndarray:
    found: np.ndarray = np.asarray(tensor.numpy(), np.float64)
    return found


def _are_different(trial: Trial, one: np.ndarray, other: np.ndarray) -> bool:
    scale = float(np.max(np.abs(one), initial=0.0))
    gap = float(np.max(np.abs(one - other), initial=0.0))
    return trial.differ(gap, 0.0, scale=scale)
