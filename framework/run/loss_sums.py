"""Checks that the losses and the metrics of a task are sums over the examples of a batch.

It compares the sums of a few examples with those of two parts of them:

    loss and loss weight                               else a mean, or the loss couples examples
    auxiliary losses                                   else they depend on the number of devices
    metrics: sums / sums of weights                    else they depend on how a batch is divided
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tekso.framework import task_results
from tekso.framework.context import RANDOM_NUMBERS, Mode
from tekso.framework.run.loss_trial import (
    Batch,
    Trial,
    TrialSums,
    different_repetition,
    repeated,
    rows_of,
)

_SHAPES = (
    "The difference of tensors of shapes [batch, 1] and [batch] has the shape [batch, batch]: "
    "tf.squeeze(x, 1) makes the first one like the second one. "
)
_PENALTY = (
    "ctx.collect_loss(name, value) takes a sum over examples, and adds its mean over the global "
    "batch to the loss. Multiply a penalty on weights by the number of examples at hand: "
    "tf.cast(tf.shape(x)[0], tf.float32) * penalty."
)


class LossError(ValueError):
    """The loss of a task is not a sum over examples."""


def check_is_sum(trial: Trial, batch: Batch, mode: Mode) -> list[str]:
    """Rejects losses and metrics that are no sums over the examples; returns warnings.

    Args:
      trial: computes the sums.
      batch: two or more examples, of which up to three are computed.
      mode: in which they are computed.

    Raises:
      LossError: a loss, a loss weight, an auxiliary loss or a metric is no sum, or the task
        computes another one each time.
    """
    examples = rows_of(batch, [0, 1, -1] if len(next(iter(batch.values()))) > 2 else [0, -1])
    division = _Division(
        examples=examples,
        mode=mode,
        together=trial.sums(examples, mode=mode),
        parts=(
            trial.sums(rows_of(examples, slice(1)), mode=mode),
            trial.sums(rows_of(examples, slice(1, None)), mode=mode, offset=1),
        ),
    )
    _check_losses(trial, division)
    _check_auxiliary_losses(trial, division)
    return _check_metrics(trial, division)


class _Division(NamedTuple):
    """The sums of some examples, and of two parts of them.

    Attributes:
      examples: the examples.
      mode: in which the sums are computed.
      together: the sums of all examples.
      parts: the sums of the first example, and of the others.
    """

    examples: Batch
    mode: Mode
    together: TrialSums
    parts: tuple[TrialSums, TrialSums]

    @property
    def size(self) -> int:
        """Number of examples."""
        return len(next(iter(self.examples.values())))


def _check_losses(trial: Trial, division: _Division) -> None:
    """Rejects a loss or a loss weight of the task that is no sum, such as a mean."""
    size, both, parts = division.size, division.together, division.parts
    for method, together, apart in (
        ("loss", both.loss, [part.loss for part in parts]),
        ("loss_weight", both.weight, [part.weight for part in parts]),
    ):
        mean = apart[0] / size + apart[1] * (size - 1) / size
        equals = [np.isclose(together, x, trial.tolerance, 0.0) for x in (sum(apart), mean)]
        is_mean = equals == [False, True]
        if not is_mean and not trial.differ(together, sum(apart), scale=sum(map(abs, apart))):
            continue
        _check_repeats(
            trial,
            method,
            functools.partial(_sum_of, method),
            together,
            sum(apart),
            division,
        )
        when = " in training" if division.mode == "train" else ""
        raise LossError(
            f"{task_results.method_of(trial.task, method)} is not a sum over the examples of a "
            f"batch{when}: for {size} examples together it is {together:g}, and for two parts of "
            f"them {apart[0]:g} and {apart[1]:g}. Return sums (tf.reduce_sum, not tf.reduce_mean): "
            "the reported loss is loss_sum / loss_weight, both over the global batch. "
            f"{_SHAPES if method == 'loss' else ''}{_PENALTY} If examples are coupled on purpose, "
            f"set couples_examples = True in {type(trial.task).__name__}, or in the layer that "
            "couples them"
        )


def _check_auxiliary_losses(trial: Trial, division: _Division) -> None:
    """Rejects a loss of ctx.collect_loss that is no sum over the examples."""
    for name, together in division.together.auxiliary.items():
        apart = [part.auxiliary.get(name, 0.0) for part in division.parts]
        if trial.differ(together, sum(apart), scale=sum(map(abs, apart))):
            _check_repeats(
                trial,
                f"auxiliary loss {name!r}",
                functools.partial(_auxiliary_of, name),
                together,
                sum(apart),
                division,
            )
            raise LossError(
                f"the auxiliary loss {name!r} of ctx.collect_loss is not a sum over the examples: "
                f"for {division.size} examples together it is {together:g}, and for two parts of "
                f"them {apart[0]:g} and {apart[1]:g}. It would depend on the number of devices and "
                f"micro-batches. {_PENALTY}"
            )


def _check_metrics(trial: Trial, division: _Division) -> list[str]:
    """Rejects a metric that depends on how a batch is divided; returns warnings about weights."""
    warnings = []
    for metric, (total, weight) in division.together.metrics.items():
        pairs = [part.metrics.get(metric, (np.nan, np.nan)) for part in division.parts]
        together = _ratio(total, weight)
        added = _ratio(*(sum(column) for column in zip(*pairs, strict=True)))
        if trial.differ(together, added, scale=abs(together)):
            _check_repeats(
                trial,
                f"metric {metric!r}",
                functools.partial(_metric_of, metric),
                together,
                added,
                division,
            )
            raise LossError(
                f"the metric {metric!r} of {task_results.method_of(trial.task, 'loss')} depends on "
                f"how a batch is divided: for {division.size} examples together it is "
                f"{together:g}, and from the sums of two parts {added:g}. Return it as (sum over "
                "the examples, sum of their weights): the report divides them once, over the "
                "global batch"
            )
        apart = [weight for _, weight in pairs]
        if total == 0 and trial.differ(weight, sum(apart), scale=sum(map(abs, apart))):
            warnings.append(
                f"the weight of the metric {metric!r} does not add up: for {division.size} "
                f"examples together it is {weight:g}, and for two parts of them {apart[0]:g} and "
                f"{apart[1]:g}. Unless the metric is always 0, return the sum of the weights of "
                "the examples"
            )
    return warnings


def _check_repeats(
    trial: Trial,
    what: str,
    of: Callable[[TrialSums], float],
    one: float,
    other: float,
    division: _Division,
) -> None:
    """Rejects a task that computes another number for the same examples each time.

    Args:
      trial: computes the sums.
      what: the number: loss, loss_weight, an auxiliary loss or a metric.
      of: returns it from sums.
      one: its value for the examples.
      other: the value that should be the same.
      division: the examples, and the mode in which it is computed.
    """

    def compute() -> float:
        return of(trial.sums(division.examples, mode=division.mode))

    if (again := different_repetition(one, other, repeated(compute))) is not None:
        raise LossError(
            f"{type(trial.task).__name__} computes a different {what} each time for the same "
            f"examples and weights ({one:g}, then {again:g}): a layer or the task uses "
            "tf.random, np.random, Python's random, the time, or an attribute that it changes in "
            "a call. Checkpoints would not reproduce its figures. Take random numbers from "
            f"{RANDOM_NUMBERS}"
        )


def _sum_of(method: str, sums: TrialSums) -> float:
    return sums.loss if method == "loss" else sums.weight


def _auxiliary_of(name: str, sums: TrialSums) -> float:
    return sums.auxiliary.get(name, np.nan)


def _metric_of(metric: str, sums: TrialSums) -> float:
    return _ratio(*sums.metrics.get(metric, (np.nan, np.nan)))


def _ratio(one: float, weight: float) -> float:
    return one / weight if weight else np.nan
