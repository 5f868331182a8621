"""Checks that examples which only fill up a batch do not count in the sums of a task."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from tekso.framework import task_results
from tekso.framework.input.errors import InputError
from tekso.framework.input.input import Input
from tekso.framework.run import wrong_ids
from tekso.framework.run.input_checks import counted, padding
from tekso.framework.run.loss_trial import (
    REPETITIONS,
    Batch,
    Trial,
    TrialSums,
    different_repetition,
)


def check_examples(trial: Trial, inputs: Mapping[str, Input]) -> list[str]:
    """Rejects a task that counts padding; returns warnings about layers that count it.

    Args:
      trial: computes the task.
      inputs: {path in the tree: input}.

    Raises:
      InputError: the loss or a metric counts padding examples.
      DataIdError: an example has an id for which a table has no row.
      LabelError: a label of the examples is no class.
    """
    warnings = []
    for path, input in inputs.items():
        found = padding(input)
        if found is None:
            continue
        step, is_padding = found
        real, padded = _with_padding(trial, input, step, is_padding)
        with wrong_ids.naming(trial, input.batch(0), f"{path}.batch(0)"):
            alone, together = trial.sums(real), trial.sums(padded)
        again = functools.partial(trial.sums, real)
        for what, how in _counted(trial, alone, again, together, TrialSums.named):
            what = what.replace("{}", task_results.source_of_loss(trial.task))
            raise InputError(counted(path, what, is_padding, how))
        for what, how in _counted(trial, alone, again, together, TrialSums.named_of_layers):
            what = what.replace("{}", "ctx.collect_metric")
            warnings.append(
                f"{path}: {what} counts padding examples, which only fill up a batch: {how}. Omit "
                "them in the layer (one of Tekso that takes `is_token` does it if it is given), or "
                f"set {path}.batch_size to a divisor of the number of examples"
            )
            break
    return warnings


def _counted(
    trial: Trial,
    alone: TrialSums,
    again: Callable[[], TrialSums],
    together: TrialSums,
    named: Callable[[TrialSums], dict[str, float]],
) -> Iterator[tuple[str, str]]:
    """Yields the sums that change with padding, and how.

    Args:
      trial: has the tolerance.
      alone: the sums of real examples.
      again: computes them again.
      together: the sums of the same examples with padding.
      named: returns the sums to compare, by name.
    """
    for what, value in named(alone).items():
        padded = named(together)[what]
        if not np.isfinite(value) or np.isclose(padded, value, trial.tolerance, 1e-6):
            continue
        repetitions = (named(again())[what] for _ in range(REPETITIONS))
        if different_repetition(value, padded, repetitions) is None:
            yield what, f"without padding it is {value:g}, with it {padded:g}"


def _with_padding(
    trial: Trial, input: Input, step: int, is_padding: np.ndarray
) -> tuple[Batch, Batch]:
    """Returns some real examples, and the same examples with padding like the batch of a step.

    One padding example may add 0 by chance. So the padding repeats all real examples, and half of
    them once more, which also changes a mean. Arrays that are 0 only for padding are set to 0.
    """
    batch, first = input.batch(step), input.batch(0)
    pads_first = input.is_padding(0)
    rows = np.flatnonzero(~is_padding if pads_first is None else ~pads_first)
    rows = rows[: trial.most_rows(first)]
    real, padding = {}, {}
    for name, array in batch.items():
        real[name] = first[name][rows]
        marks = not array[is_padding].any() and array[~is_padding].any()
        repeated = np.concatenate([real[name], real[name][: (len(rows) + 1) // 2]])
        padding[name] = np.zeros_like(repeated) if marks else repeated
    return real, {name: np.concatenate([real[name], padding[name]]) for name in batch}
