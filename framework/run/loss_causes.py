"""Explains why a loss is not a sum over the examples of a batch.

The task is traced for batches of two and of three examples. The dims that differ are those of the
batch, so a difference of tensors of shapes [batch, 1] and [batch] shows as [batch, batch].
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from tekso.framework.context import RANDOM_NUMBERS, Mode
from tekso.framework.graph_errors import place_in
from tekso.framework.run.loss_trial import Batch, Trial, rows_of
from tekso.framework.task import Task

PENALTY = (
    "Multiply a penalty on weights by the number of examples at hand: "
    "tf.cast(tf.shape(x)[0], tf.float32) * penalty"
)
_ARITHMETIC = ("Add", "AddV2", "Sub", "Mul", "RealDiv", "SquaredDifference")
_NOT_RANDOM = frozenset({
    "StatelessCase", "StatelessIf", "StatelessWhile", "StatelessRandomGetAlg",
    "StatelessRandomGetKeyCounter", "StatelessRandomGetKeyCounterAlg",
})  # fmt: skip
_KERAS_LOSSES = f"{os.sep}keras{os.sep}src{os.sep}losses{os.sep}"


class LossError(ValueError):
    """The loss of a task is not a sum over examples."""


class Ops:
    """The ops of a task, traced for two and for three examples.

    Raises:
      ForeignVariableError: the task creates variables, as a Keras layer does, or draws random
        numbers that are not those of the context.
      Exception: the task cannot be traced, for example because it has an `if` on a tensor.
    """

    def __init__(self, trial: Trial, batch: Batch, mode: Mode) -> None:
        two, three = (
            {op.name: op for op in trial.ops(rows_of(batch, [0] * size), mode)} for size in (2, 3)
        )
        pairs = ((op, three.get(name)) for name, op in two.items())
        self._pairs = [(op, other) for op, other in pairs if other and other.type == op.type]

    def broadcast(self) -> str:
        """Returns the shapes and the line of a [batch, 1] with a [batch]; "": there is none."""
        for two, three in self._pairs:
            if two.type not in _ARITHMETIC:
                continue
            shapes = [_shape(x, y) for x, y in zip(two.inputs, three.inputs, strict=True)]
            dims = [_batch_dims(shape) for shape in shapes]
            # Of equal ranks, as [batch, 1] and [1, batch], the pairs of examples are intended.
            is_implicit = len(shapes[0]) != len(shapes[1])
            if is_implicit and all(len(dim) == 1 for dim in dims) and dims[0] != dims[1]:
                one, other = (f"[{', '.join(shape)}]" for shape in shapes)
                result = f"[{', '.join(_shape(two.outputs[0], three.outputs[0]))}]"
                return (
                    f"tensors of shapes {one} and {other} give {result}. Give both the same "
                    f"shape: tf.squeeze(x, 1) turns [batch, 1] into [batch]{_place(two)}"
                )
        return ""

    def stateless(self) -> str:
        """Returns the line of a stateless random op that draws for each example; "": none does."""
        for two, three in self._pairs:
            shape = _shape(two.outputs[0], three.outputs[0]) if is_stateless(two.type) else ()
            if "batch" in shape:
                return _place(two)
        return ""

    def has_keras_loss(self) -> bool:
        """Whether a loss of Keras made one of the ops."""
        return any(_KERAS_LOSSES in frame[0] for op, _ in self._pairs for frame in op.traceback)


def is_stateless(kind: str) -> bool:
    """Whether ops of a type draw random numbers from a seed, as tf.random.stateless_normal."""
    return kind.startswith("Stateless") and kind not in _NOT_RANDOM


def reject_stateless(task: Task, ops: Ops) -> None:
    """Raises a LossError if a stateless random op draws numbers for each example."""
    if place := ops.stateless():
        raise LossError(
            f"{type(task).__name__} draws random numbers of examples with tf.random.stateless_…: "
            "they depend on how the batch is divided, and with a fixed seed they are the same in "
            f"every step. Take them from {RANDOM_NUMBERS}{place}"
        )


def is_penalty(trial: Trial, examples: Batch, mode: Mode, together: float) -> bool:
    """Whether a loss is a sum over the examples, and a number that does not depend on them.

    Args:
      trial: computes the loss.
      examples: two or more examples.
      mode: in which the loss is computed.
      together: the loss of all examples.
    """
    size = len(next(iter(examples.values())))
    if size < 3:
        return False
    singles = [
        trial.sums(rows_of(examples, slice(i, i + 1)), mode=mode, offset=i).loss
        for i in range(size)
    ]
    first = trial.sums(rows_of(examples, slice(2)), mode=mode).loss
    penalty = singles[0] + singles[1] - first
    expected = sum(singles) - (size - 1) * penalty
    scale = sum(map(abs, singles)) + abs(penalty)
    return bool(np.isfinite(expected)) and not trial.differ(together, expected, scale=scale)


def changed_attributes(task: Task, compute: Callable[[], object]) -> list[str]:
    """Returns the attributes of the layers that a computation changes: "Norm.mean (layers/0)".

    Args:
      task: the task.
      compute: computes the task.
    """
    before = _attributes(task)
    compute()
    after = _attributes(task)
    return [name for name in after if name not in before or before[name][1] != after[name][1]]


def _attributes(task: Task) -> dict[str, tuple[Any, Any]]:
    """Returns (value, what shows a change) of all attributes; the value keeps its id in use."""
    found = {}
    for layer in task.walk():
        place = f" ({layer.path})" if layer.path else ""
        for name, value in vars(layer).items():
            shown = (id(value), len(value) if isinstance(value, (list, dict, set)) else 0)
            content = value.tobytes() if isinstance(value, np.ndarray) else b""
            found[f"{type(layer).__name__}.{name}{place}"] = (value, (shown, content))
    return found


def _shape(two: Any, three: Any) -> Sequence[str]:
    """Returns the shape of a tensor, with "batch" for a dim that depends on the batch."""
    if two.shape.rank is None or two.shape.rank != three.shape.rank:
        return ()
    return ["batch" if n != m else str(n) for n, m in zip(two.shape, three.shape, strict=True)]


def _batch_dims(shape: Sequence[str]) -> list[int]:
    """Returns the dims that depend on the batch, counted from the last one, which is 1."""
    return [len(shape) - i for i, dim in enumerate(shape) if dim == "batch"]


def _place(op: Any) -> str:
    frames: Iterable[Any] = op.traceback
    return place_in((frame[0], frame[1], frame[2]) for frame in frames)
