"""Checks the loss of a task that couples examples, which need not be a sum over parts of a batch.

    loss of a few examples, computed twice, is equal    else it draws np.random, or keeps state
    loss with all weights doubled = twice the loss      else it may be a mean (a warning): divided
                                                        by the weights, it does not change
    loss with as many examples of weight 0 = the loss   else it may be a mean (a warning): divided
                                                        by the number of rows, it is one half

A warning needs a loss that changes as a mean does, so other losses have none: a contrastive loss,
one whose weights only mark padding, or one that takes padding as negatives.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework import task_results
from tekso.framework.context import Mode, StepContext
from tekso.framework.run.divided_losses import loss_tensor, without_zeros
from tekso.framework.run.loss_sums import check_repeats
from tekso.framework.run.loss_trial import Batch, Trial, rows_of
from tekso.framework.run.ran_ops import RanOp, observing

_FEW = 8  # examples
_EQUAL = 1e-5  # relative difference of sums that the same ops compute
_TERMS = ("AddN", "AddV2", "Mean", "Sub", "Sum")
_FUNCTIONS = ("__inference_", "__forward_", "PartitionedCall", "StatefulPartitionedCall")
_HIDDEN = 1e3  # terms that a traced function may add, relative to the loss
_MODES: tuple[Mode, ...] = ("train", "eval")  # batch statistics may hide that numbers differ
_WEIGHTS = "weights"
_QUOTIENTS = ("DivNoNan", "Mean", "RealDiv", "Reciprocal")


def check(trial: Trial, batch: Batch) -> list[str]:
    """Rejects a loss that differs each time; returns the warning about a mean.

    Args:
      trial: the task with its weights.
      batch: examples, of which up to 8 are computed.

    Raises:
      LossError: the loss of the same examples differs each time.
    """
    few = rows_of(batch, slice(min(_FEW, max(2, trial.most_rows(batch)))))
    for mode in _MODES:
        _check_repeats(trial, few, mode)
    try:
        how = _why_mean(trial, few)
    except Exception:  # in user code, which may take only batches of one size
        return []
    if not how:
        return []
    return [
        f"{task_results.source_of_loss(trial.task)} seems to return a mean over the examples: "
        f"{how}. Return the sum (tf.reduce_sum, not tf.reduce_mean), or multiply the mean by "
        "loss_weight: the reported loss, and the loss of a training step, is loss_sum / "
        "loss_weight, so the gradients are too small by the number of examples"
    ]


def _check_repeats(trial: Trial, few: Batch, mode: Mode) -> None:
    """Rejects a loss that differs each time.

    Without biases, a model of ReLUs before a normalization would hide another scale of its inputs.
    Ops may sum in another order each time: the difference is compared with the largest terms of the
    loss, not with the loss itself, which is small if they cancel.
    """
    for one in (*without_zeros(trial, biases=True), trial):
        compute = functools.partial(_loss, one, few, mode)
        terms = _Terms()
        with terms.observing():
            total = _loss_tensor(one, few, mode)
        first, second = float(total), compute()
        if not np.isfinite([first, second]).all():
            continue
        scale = max(abs(first), terms.largest(total, hidden=_HIDDEN * abs(first)))
        if abs(first - second) > _rounding(one) * scale:
            numbers = {"one": first, "expected": second}
            check_repeats(one, few, mode, what="loss", compute=compute, **numbers)
        return


def _rounding(trial: Trial) -> float:
    """Returns the relative tolerance of a sum that is computed twice."""
    has_16_bits = {weight.dtype.size for weight in trial.weights.values()} & {1, 2}
    return trial.tolerance if has_16_bits else _EQUAL


class _Terms:
    """The magnitudes that ops of a block add to scalars, and the tensors that depend on them."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[float | None, list[int]]] = {}  # {id: (terms, ids of inputs)}

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        """Notes the ops of a block."""
        with observing(self._observe):
            yield

    def largest(self, tensor: tf.Tensor, *, hidden: float) -> float:
        """Returns the largest sum of magnitudes on which a tensor depends.

        Args:
          tensor: result of the ops.
          hidden: what to assume of traced functions, whose ops are not seen.
        """
        largest, seen, left = 0.0, set[int](), [tensor._id]
        while left:
            if (one := left.pop()) in seen or one not in self._made:
                continue
            seen.add(one)
            terms, inputs = self._made[one]
            largest = max(largest, hidden if terms is None else terms)
            left += inputs
        return largest

    def _observe(self, op: RanOp) -> None:
        terms: float | None = None if op.kind.startswith(_FUNCTIONS) else 0.0
        if op.kind in _TERMS and op.outputs[0].shape.rank == 0:
            floats = [x.numpy() for x in op.inputs if x.dtype.is_floating]
            total = sum(float(np.abs(x.astype(np.float64)).sum()) for x in floats)
            terms = total if np.isfinite(total) else 0.0
        for output in op.outputs:
            self._made[output._id] = terms, [x._id for x in op.inputs]


def _why_mean(trial: Trial, few: Batch) -> str:
    """Returns how the loss of a few examples changes as a mean does, or ""."""
    names = [name for name, array in few.items() if _is_weights(name, array)]
    if not names:
        return ""
    size = len(few[names[0]])
    ramp = np.linspace(1.0, 2.0, size, dtype=np.float32)

    def weighted(factor: float | np.ndarray) -> Batch:
        return {**few, **{n: (few[n] * factor).astype(few[n].dtype) for n in names}}

    def loss(batch: Mapping[str, np.ndarray]) -> float:
        return _loss(trial, batch, "eval")

    def is_same(one: float, other: float) -> bool:
        return bool(np.isclose(one, other, trial.tolerance, 0.0))

    # Not 1 and 2: scores - 1e9 * (1 - weights) is exact for 1, and rounded for larger weights.
    once, doubled = weighted(2.0), weighted(4.0)
    scales = _loss_weight(trial, doubled), 2 * _loss_weight(trial, once)
    least, most = loss(once), loss(doubled)
    if abs(least) < _EQUAL or not np.isfinite([least, most]).all() or not is_same(*scales):
        return ""
    is_constant = is_same(least, most) and not is_same(loss(weighted(ramp)), least)
    if is_constant and any(map(_is_quotient, trial.ops(few, "eval"))):
        return (
            f"with all weights of {size} examples doubled, loss_weight doubles, but the loss sum "
            f"stays {least:g}"
        )
    plain, absent = loss(few), weighted(0.0)
    padded = loss({name: np.concatenate([few[name], absent[name]]) for name in few})
    if is_same(2 * padded, plain) and not is_same(padded, plain):
        return (
            f"with {size} more examples of weight 0, the loss sum of {size} examples becomes "
            f"{padded:g} instead of {plain:g}"
        )
    return ""


def _is_quotient(op: Any) -> bool:
    """Returns whether an op divides a scalar, as a mean does; sums by marks of padding do not."""
    return op.type in _QUOTIENTS and op.outputs[0].shape.rank == 0


def _is_weights(name: str, array: np.ndarray) -> bool:
    return name.rpartition("/")[2] == _WEIGHTS and array.ndim == 1 and array.dtype.kind == "f"


def _loss(trial: Trial, batch: Batch, mode: Mode) -> float:
    return float(_loss_tensor(trial, batch, mode))


def _loss_tensor(trial: Trial, batch: Batch, mode: Mode) -> tf.Tensor:
    size = len(next(iter(batch.values())))
    ctx = StepContext(mode=mode, num_examples=size, example_offset=0)
    return loss_tensor(trial, batch, ctx)


def _loss_weight(trial: Trial, batch: Batch) -> float:
    return float(tf.reduce_sum(task_results.loss_weight(trial.task, batch)))
