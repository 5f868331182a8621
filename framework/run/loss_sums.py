"""Checks that the losses and the metrics of a task are sums over the examples of a batch.

It compares the sums of a few examples with those of two parts of them:

    loss and loss weight                               else a mean, or the loss couples examples
    auxiliary losses, means of statistics              else they depend on the number of devices
    metrics: sums / sums of weights                    else they depend on how a batch is divided

If the task reads `ctx.num_examples`, it also compares losses with those of the same examples in a
global batch that is twice as large, because a sum / `ctx.num_examples` is a mean.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from tekso.framework import task_results
from tekso.framework.context import RANDOM_NUMBERS, Mode
from tekso.framework.foreign_variables import NO_STATE
from tekso.framework.run.loss_causes import (
    PENALTY,
    LossError,
    Ops,
    changed_attributes,
    is_penalty,
    is_stateless,
    reject_stateless,
)
from tekso.framework.run.loss_couplings import combination
from tekso.framework.run.loss_trial import (
    Batch,
    Trial,
    TrialSums,
    different_repetition,
    repeated,
    rows_of,
)

_Value = Callable[[TrialSums], float]
"""Returns one of the sums, or what is reported of them."""
_Metrics = Callable[[TrialSums], Mapping[str, tuple[float, float]]]
"""Returns the metrics of the task, or those that layers collect."""

_LOSSES: Mapping[str, _Value] = {
    "loss": operator.attrgetter("loss"),
    "loss_weight": operator.attrgetter("weight"),
}
"""{method of the task: what it returns}."""

_PENALTY = (
    "ctx.collect_loss(name, value) takes a sum over examples, and adds its mean over the global "
    f"batch to the loss. {PENALTY}."
)

_NUMBER = f"It contains a number that does not depend on the examples. {PENALTY}"


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
    size = len(next(iter(examples.values())))
    division = _Division(
        trial=trial,
        examples=examples,
        mode=mode,
        together=trial.sums(examples, mode=mode),
        parts=(
            trial.sums(rows_of(examples, slice(1)), mode=mode, whole=size),
            trial.sums(rows_of(examples, slice(1, None)), mode=mode, offset=1, whole=size),
        ),
    )
    _check_losses(division)
    _check_auxiliary_losses(division)
    if trial.reads_size:
        _check_size(division)
    _check_statistics(division)
    return _check_metrics(division)


def check_draws(trial: Trial, batch: Batch) -> None:
    """Rejects stateless random ops that draw numbers for each example, if the trial has run any.

    Raises:
      LossError: the task has such an op.
    """
    if any(map(is_stateless, trial.kinds)):
        reject_stateless(trial.task, Ops(trial, rows_of(batch, [0]), "train"))


class _Division(NamedTuple):
    """The sums of some examples, and of two parts of them.

    Attributes:
      trial: computes the sums.
      examples: the examples.
      mode: in which the sums are computed.
      together: the sums of all examples.
      parts: the sums of the first example, and of the others.
    """

    trial: Trial
    examples: Batch
    mode: Mode
    together: TrialSums
    parts: tuple[TrialSums, TrialSums]

    @property
    def size(self) -> int:
        """Number of examples."""
        return len(next(iter(self.examples.values())))

    def values(self, value: _Value) -> tuple[float, list[float]]:
        """Returns a value of the examples together, and of each part."""
        return value(self.together), [value(part) for part in self.parts]


def _check_losses(division: _Division) -> None:
    """Rejects a loss or a loss weight of the task that is no sum, such as a mean."""
    trial, size = division.trial, division.size
    for method, value in _LOSSES.items():
        together, apart = division.values(value)
        mean = apart[0] / size + apart[1] * (size - 1) / size
        equals = [np.isclose(together, x, trial.tolerance, 0.0) for x in (sum(apart), mean)]
        is_mean = equals == [False, True]
        if not is_mean and not trial.differ(together, sum(apart), scale=sum(map(abs, apart))):
            continue
        _check_repeats(division, method, value, sum(apart))
        name = task_results.method_of(trial.task, method)
        if method == "loss":
            name = task_results.source_of_loss(trial.task)
        causes = Ops(trial, division.examples, division.mode)
        reject_stateless(trial.task, causes)
        if method == "loss" and (pairs := causes.broadcast()):
            raise LossError(f"{name} combines every example with every other one: {pairs}")
        when = " in training" if division.mode == "train" else ""
        raise LossError(
            f"{name} is not a sum over the examples of a batch{when}: for {size} examples together "
            f"it is {together:g}, and for two parts of them {apart[0]:g} and {apart[1]:g}. "
            f"{_cause(division, method, together, is_mean=is_mean, causes=causes)}"
        )


def _cause(division: _Division, method: str, together: float, *, is_mean: bool, causes: Ops) -> str:
    """Returns why a loss or a loss weight is no sum, and what to write instead.

    Args:
      division: the examples, and the mode in which it is computed.
      method: "loss" or "loss_weight".
      together: its value for all examples.
      is_mean: it equals the mean of its parts.
      causes: the ops of the task.
    """
    if is_mean and method == "loss" and causes.has_keras_loss():
        return (
            "A Keras loss returns a mean. Compute the loss of each example with ops of "
            'TensorFlow, such as tf.square(y - batch["y"]), and return '
            'tf.reduce_sum(batch["weights"] * losses)'
        )
    if is_mean:
        return (
            "It is a mean. Return the sum (tf.reduce_sum, not tf.reduce_mean): the reported loss "
            "is loss_sum / loss_weight, both over the global batch"
        )
    if method == "loss" and is_penalty(division.trial, division.examples, division.mode, together):
        return _NUMBER
    found = combination(division.trial, division.examples, division.mode)
    if found is not None and found.is_draw:
        return (
            "Random numbers of ctx whose shape does not begin with the batch differ between its "
            "parts. Draw them with shared=True, as in ctx.uniform(self, shape, shared=True), or "
            f"for each example{found.place}"
        )
    name = type(division.trial.task).__name__
    where = f"{name}, or in the layer that couples them"
    if found is not None and found.layer:
        where = found.layer
    combined = " The examples are first combined at the line below." if found is not None else ""
    return (
        "What one example adds depends on the other examples, or on their number: look for random "
        f"numbers that are not from ctx, and for batch statistics, which the layer BatchNorm has."
        f"{combined} If examples are coupled on purpose, set couples_examples = True in {where}"
        f"{found.place if found is not None else ''}"
    )


def _check_auxiliary_losses(division: _Division) -> None:
    """Rejects a loss of ctx.collect_loss that is no sum over the examples."""
    for name in division.together.auxiliary:
        value = _auxiliary(name)
        together, apart = division.values(value)
        if division.trial.differ(together, sum(apart), scale=sum(map(abs, apart))):
            _check_repeats(division, f"auxiliary loss {name!r}", value, sum(apart))
            raise LossError(
                f"the auxiliary loss {name!r} of ctx.collect_loss is not a sum over the examples: "
                f"for {division.size} examples together it is {together:g}, and for two parts of "
                f"them {apart[0]:g} and {apart[1]:g}. It would depend on the number of devices and "
                f"micro-batches. {_PENALTY}"
            )


def _check_size(division: _Division) -> None:
    """Rejects a loss that depends on the number of examples of the global batch."""
    trial, size = division.trial, division.size
    larger = trial.sums(division.examples, mode=division.mode, whole=2 * size)
    values = {"": _LOSSES["loss"], **{n: _auxiliary(n) for n in division.together.auxiliary}}
    for name, value in values.items():
        one, other = value(division.together), value(larger)
        is_same, is_mean = (
            bool(np.isclose(x, one, trial.tolerance, 0.0)) for x in (other, 2 * other)
        )
        if is_same or not (is_mean or trial.differ(one, other, scale=abs(one))):
            continue
        _check_repeats(division, f"auxiliary loss {name!r}" if name else "loss", value, other)
        source = f"the auxiliary loss {name!r} of ctx.collect_loss"
        if not name:
            source = task_results.source_of_loss(trial.task)
        when = " in training" if division.mode == "train" else ""
        raise LossError(
            f"{source} is not a sum over the examples of a batch{when}, because it depends on "
            f"ctx.num_examples: for {size} examples it is {one:g} if they are the global batch, "
            f"and {other:g} if that has {2 * size} examples. "
            f"{_PENALTY if name else _cause_of_size(division, is_mean=is_mean)}"
        )


def _cause_of_size(division: _Division, *, is_mean: bool) -> str:
    """Returns why a loss depends on the size of the global batch, and what to write instead."""
    together = division.together.loss
    if is_mean:
        return (
            "It is a mean. Return the sum, without dividing it by the number of examples: the "
            "reported loss is loss_sum / loss_weight, both over the global batch"
        )
    if is_penalty(division.trial, division.examples, division.mode, together):
        return _NUMBER
    return "Return the sum of what each example adds, whatever the size of the global batch"


def _check_statistics(division: _Division) -> None:
    """Rejects a statistic of a layer whose mean depends on how a batch is divided."""
    for name, pair in division.together.statistics.items():
        pairs = [part.statistics.get(name, (np.nan, np.nan)) for part in division.parts]
        together, added = _mean(*pair), _mean(*(sum(each) for each in zip(*pairs, strict=True)))
        scale, apart = (np.max(np.abs(np.nan_to_num(x))) for x in (together, together - added))
        if division.trial.differ(float(apart), 0.0, scale=float(scale)):
            place = int(np.argmax(np.nan_to_num(np.abs(together - added))))
            expected = float(added.flat[place])
            _check_repeats(division, f"statistic {name!r}", _statistic(name, place), expected)
            raise LossError(
                f"the statistic {name!r} of ctx.collect_statistic depends on how a batch is "
                f"divided: updated_statistics gets sum / weight over the global batch, which is "
                f"{together.flat[place]:g} for {division.size} examples together, and "
                f"{added.flat[place]:g} from the sums of two parts. Collect a sum over the "
                "examples, and the number of its terms as the weight, which needs no guard: "
                "0 / 0 is 0. For a sum over the batch instead of a mean: (sum * ctx.num_examples, "
                "number of examples); for a value that all parts share: (value, 1)"
            )


def _mean(total: np.ndarray | float, weight: np.ndarray | float) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.atleast_1d(np.divide(total, weight))


def _check_metrics(division: _Division) -> list[str]:
    """Rejects a metric that depends on how a batch is divided; returns warnings about weights.

    A metric of a layer may have sums that depend on rounding, such as the number of examples of an
    expert, so it is rejected only if its weight does not add up either.
    """
    trial, warnings = division.trial, []
    of_task: _Metrics = operator.attrgetter("metrics")
    of_layers: _Metrics = operator.attrgetter("of_layers")
    source = task_results.source_of_loss(trial.task)
    for where, metrics in ((source, of_task), ("ctx.collect_metric", of_layers)):
        for metric, (total, weight) in metrics(division.together).items():
            pairs = [metrics(part).get(metric, (np.nan, np.nan)) for part in division.parts]
            together = _ratio(total, weight)
            added = _ratio(*(sum(column) for column in zip(*pairs, strict=True)))
            apart = [weight for _, weight in pairs]
            adds_up = not trial.differ(weight, sum(apart), scale=sum(map(abs, apart)))
            may_differ = metrics is of_layers and adds_up
            if trial.differ(together, added, scale=abs(together)) and not may_differ:
                value = _metric(metrics, metric)
                _check_repeats(division, f"metric {metric!r}", value, added)
                raise LossError(
                    f"the metric {metric!r} of {where} depends on "
                    f"how a batch is divided: for {division.size} examples together it is "
                    f"{together:g}, and from the sums of two parts {added:g}. Return it as (sum "
                    "over the examples, sum of their weights): the report divides them once, over "
                    "the global batch, so a weight of 0 needs no guard. Task.summarize computes a "
                    "root or a ratio of such metrics; a maximum cannot be reported"
                )
            if metrics is of_task and total == 0 and not adds_up:
                warnings.append(
                    f"the weight of the metric {metric!r} does not add up: for {division.size} "
                    f"examples together it is {weight:g}, and for two parts of them {apart[0]:g} "
                    f"and {apart[1]:g}. Unless the metric is always 0, return the sum of the "
                    "weights of the examples"
                )
    return warnings


def _check_repeats(division: _Division, what: str, value: _Value, expected: float) -> None:
    """Rejects a task that computes another number for the same examples each time.

    Args:
      division: the examples, and the mode in which it is computed.
      what: the number: loss, loss_weight, an auxiliary loss, a statistic or a metric.
      value: returns it from sums.
      expected: what it should be.
    """
    trial, examples, mode = division.trial, division.examples, division.mode

    def compute() -> float:
        return value(trial.sums(examples, mode=mode))

    one = value(division.together)
    check_repeats(trial, examples, mode, what=what, compute=compute, one=one, expected=expected)


def check_repeats(
    trial: Trial,
    examples: Batch,
    mode: Mode,
    *,
    what: str,
    compute: Callable[[], float],
    one: float,
    expected: float,
) -> None:
    """Rejects a task that computes another number for the same examples each time.

    Args:
      trial: has the task.
      examples: two or more examples.
      mode: in which the number is computed.
      what: the number: loss, loss_weight, an auxiliary loss, a statistic or a metric.
      compute: computes it again.
      one: what it was.
      expected: what it should be.

    Raises:
      LossError: a repetition differs.
    """
    if (other := different_repetition(one, expected, repeated(compute))) is None:
        return
    text = (
        f"{type(trial.task).__name__} computes a different {what} each time for the same "
        f"examples and weights ({one:g}, then {other:g}): "
    )
    if changed := changed_attributes(trial.task, compute):
        raise LossError(f"{text}each call changes {', '.join(changed)}. {NO_STATE}")
    Ops(trial, examples, mode)  # rejects Keras layers and tf.random
    raise LossError(
        f"{text}a layer or the task uses tf.random, np.random, Python's random, the time, or an "
        "attribute that it changes in a call. Checkpoints would not reproduce its figures. Take "
        f"random numbers from {RANDOM_NUMBERS}"
    )


def _auxiliary(name: str) -> _Value:
    return lambda sums: sums.auxiliary.get(name, 0.0)


def _statistic(name: str, place: int) -> _Value:
    def value(sums: TrialSums) -> float:
        pair = sums.statistics.get(name)
        return np.nan if pair is None else float(_mean(*pair).flat[place])

    return value


def _metric(metrics: _Metrics, name: str) -> _Value:
    return lambda sums: _ratio(*metrics(sums).get(name, (np.nan, np.nan)))


def _ratio(one: float, weight: float) -> float:
    return one / weight if weight else np.nan
