"""Checks a task on a few examples before the first step: is its loss a sum, is every weight used?

    loss of {0, 1, 2} = loss of {0} + loss of {1, 2}   else it is a mean, or couples examples;
                                                       of evaluation and of training, auxiliary
                                                       losses too
    loss of {0, 1, 2} = that in a larger batch         else it is divided by ctx.num_examples
    metrics of {0, 1, 2} = sums / sums of weights      else they depend on how a batch is divided
    loss of {0, 1}  =  loss of {0, 1} by pieces()      else a pipeline trains another loss
    sums of {0, padding} = sums of {0}                 else they count padding examples
    losses of Task.equal_losses are equal              else a language model is not causal
    a gradient of every learned weight                 else the loss does not depend on it
    scores of a softmax that are not probabilities     else a softmax is applied twice (a warning)
    loss of rows = loss of the same rows, padded to the next bucket
                                                       else the model does not mask padding (a
                                                       warning)
    the states of np.random and random stay            else numbers would be the same in each step
    losses are finite                                  else steps would be skipped (a warning)
    loss of parts = loss of a whole batch              else devices do not gather what they compare,
                                                       or accumulation steps couple examples; see
                                                       divided_losses.py

The host computes these values with the initial weights of the run, op by op (or traced, if there
are long loops, as over time). These checks are independent of the execution and take little time
compared to the first step. Only that of several parts, for a task that couples examples, depends
on their number: it computes up to two whole parts, op by op.

If a layer counts padding in `ctx.collect_metric`, this is only a warning, because a layer may not
know which examples are padding.

The loss of a task that couples examples need not be a sum; see coupled_sums.py for what is checked.

Not checked: models of more than `MOST_BYTES`, executions with `serialize_calls` (meshes over
several processes), and padding of infinite inputs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from tekso.framework import error_advice, task_results
from tekso.framework.context import StepContext
from tekso.framework.error_advice import LabelError
from tekso.framework.input.errors import InputError
from tekso.framework.input.input import Input
from tekso.framework.learning_step import LearnerBase
from tekso.framework.path_patterns import listed
from tekso.framework.pieces import RowsError
from tekso.framework.run import bucket_check, coupled_sums, divided_losses, padding_check, wrong_ids
from tekso.framework.run.divided_losses import UNDIVIDED, Division
from tekso.framework.run.global_draws import DrawingTrial
from tekso.framework.run.label_limits import LabelLimit
from tekso.framework.run.loss_causes import LossError
from tekso.framework.run.loss_sums import check_draws, check_is_sum
from tekso.framework.run.loss_trial import (
    Batch,
    Trial,
    different_repetition,
    fullest,
    kind_of,
    repeated,
    rows_of,
)
from tekso.framework.run.wrong_ids import DataIdError
from tekso.framework.task import Program, Task, TaskError
from tekso.framework.theta import flatten
from tekso.framework.user_mistakes import MistakeError

MOST_BYTES = 512 * 1024**2
"""Larger models are not checked, because their weights would be copied to the host."""
_MISTAKES = (LossError, InputError, TaskError, LabelError, DataIdError, MistakeError)


@dataclasses.dataclass(frozen=True)
class Findings:
    """What the check of a task found that is no error.

    Attributes:
      warnings: possible mistakes, to be shown before the first step.
      unchecked: that, and why, the task could not be checked; else empty. To be shown after the
        first step: if the code of the task has a mistake, that step reports it, with its place.
      label_limits: the arrays that the loss reads as classes, for `BatchCheck`.
    """

    warnings: list[str] = dataclasses.field(default_factory=list)
    unchecked: list[str] = dataclasses.field(default_factory=list)
    label_limits: tuple[LabelLimit, ...] = ()


def check(
    task: Task,
    learner: LearnerBase,
    program: Program,
    inputs: Mapping[str, Input],
    *,
    division: Division = UNDIVIDED,
) -> Findings:
    """Checks a task on examples of its inputs; returns what is no error.

    All processes of a run must call it. Models of more than `MOST_BYTES` are not checked.

    Args:
      task: the task.
      learner: determines which weights are learned.
      program: has the initial weights.
      inputs: {path in the tree: input}; the training input is "input".
      division: how a batch is divided.

    Raises:
      LossError: the loss, or its weight, is not a sum over examples; pieces() computes another
        loss; the losses of `Task.equal_losses` differ; or the parts of a batch have another loss.
      InputError: the loss or a metric counts padding examples.
      TaskError: the task does not return sums.
      ForeignVariableError: the task computes other sums each time, because it creates variables,
        as a Keras layer does, or draws random numbers that are not those of the context.
      LabelError: a label of the examples is no class.
      DataIdError: an example has an id for which a table has no row.
      DrawError: a layer draws the same random numbers twice.
    """

    def tried(trial: Trial) -> list[str]:
        train = inputs["input"]
        warnings: list[str] = []
        unused = list(learner.trainable(task.specs()))
        for step in train.steps_of_each_kind():
            batch = train.batch(step)
            with wrong_ids.naming(trial, batch, f"input.batch({step})"):
                warnings += _check_sums(trial, batch)
                _check_equal(trial, rows_of(batch, [fullest(batch)]))
                _check_pieces(trial, rows_of(batch, [0, -1]))
                unused = trial.unused(rows_of(batch, [0, -1]), unused) if unused else []
                check_draws(trial, batch)
        if trial.not_finite is not None:
            warnings.append(_not_finite(task, *trial.not_finite))
        warnings += _padding_and_labels(trial, inputs) + trial.repeats.warnings()
        if trial.softmax.found:
            warnings.append(
                f"the loss of {type(task).__name__} applies a softmax to probabilities: the "
                "scores of the first examples are in [0, 1], and those of each example sum to 1. "
                "Remove the softmax at the end of the model: the softmax cross-entropy takes "
                "scores (logits)"
            )
        warnings += bucket_check.warnings(trial, train)
        if not unused:
            return warnings
        return [
            *warnings,
            f"the loss does not depend on {listed(unused)}: these learned weights get no gradient. "
            "Use them in fprop, or name them in learner.frozen",
        ]

    return _try(task, program, inputs, tried, division, trains=True, kind=DrawingTrial)


def _not_finite(task: Task, loss: float, arrays: list[str]) -> str:
    """Returns the warning about a loss of the first training examples that is not finite."""
    of_task = f"the loss of {type(task).__name__} is {loss:g} for the first training examples"
    if arrays:
        has = "has" if len(arrays) == 1 else "have"
        return f"{of_task}: {listed(arrays)} of these examples {has} numbers that are not finite"
    return (
        f"{of_task}, although their arrays are finite, and a step whose loss is not finite changes "
        "nothing. Look for a logarithm or a root of a number that is not above 0, a division by 0, "
        "or an overflow"
    )


def check_restored(
    task: Task,
    program: Program,
    inputs: Mapping[str, Input],
    *,
    division: Division = UNDIVIDED,
    trains: bool = True,
) -> Findings:
    """Checks a task whose loss a new run has checked: padding examples, and several devices.

    As `check`, it finds the labels.

    Args:
      task: the task.
      program: has the restored weights.
      inputs: {path in the tree: input}; the training input is "input".
      division: how a batch is divided.
      trains: whether training continues; otherwise the task is only evaluated.

    Raises:
      LossError: the parts of a batch have another loss.
      InputError: the loss or a metric counts padding examples.
      DataIdError: an example has an id for which a table has no row.
    """
    tried = functools.partial(_padding_and_labels, inputs=inputs)
    return _try(task, program, inputs, tried, division, trains=trains)


def _padding_and_labels(trial: Trial, inputs: Mapping[str, Input]) -> list[str]:
    warnings = padding_check.check_examples(trial, inputs)
    _find_labels(trial, inputs)
    return warnings


def _find_labels(trial: Trial, inputs: Mapping[str, Input]) -> None:
    """Computes an example of each kind of batch that the trial has not seen, to find its labels."""
    for path, input in inputs.items():
        if input.num_batches == 0:
            continue
        for step in input.steps_of_each_kind():
            batch = rows_of(input.batch(step), [0])
            if kind_of(batch) in trial.seen:
                continue
            try:
                with wrong_ids.naming(trial, batch, f"{path}.batch({step})"):
                    trial.sums(batch)
            except DataIdError:
                raise
            except Exception:  # in user code, which may need a full batch: as far as it came
                continue


def _try(
    task: Task,
    program: Program,
    inputs: Mapping[str, Input],
    function: Callable[[Trial], list[str]],
    division: Division,
    *,
    trains: bool,
    kind: type[Trial] = Trial,
) -> Findings:
    """Keeps what a function of a trial finds until it fails; compares parts of a batch anyway."""
    warnings: list[str] = []
    labels: list[LabelLimit] = []
    failures: list[Exception] = []
    apart: list[Exception] = []  # of the parts of a batch
    with tf.device("CPU:0"), _noting(failures):
        weights = trial_weights(task, program)
        if weights is None:
            is_large = not program.serialize_calls
            division = division if trains else Division(division.devices)
            return Findings(warnings=divided_losses.unchecked(task, division, is_large=is_large))
        trial = kind(task, weights)
        with _noting(failures):
            warnings = function(trial)
        if failures:
            with _noting(failures):
                _find_labels(trial, inputs)
        with _noting(apart):
            divided_losses.check(trial, inputs, division=division, trains=trains)
        labels = [one for one in trial.labels.found if one.name not in task.unchecked_labels]
    unchecked = [_unchecked(task, error) for error in failures[:1]]
    unchecked += [divided_losses.failed(task, division, error) for error in apart]
    return Findings(warnings=warnings, unchecked=unchecked, label_limits=tuple(labels))


@contextlib.contextmanager
def _noting(failures: list[Exception]) -> Iterator[None]:
    """Keeps an error of user code, which may accept only batches of the full size."""
    try:
        yield
    except _MISTAKES:
        raise
    except Exception as error:
        failures.append(error)


def _unchecked(task: Task, error: Exception) -> str:
    reason = error_advice.text_of(error).partition("\n")[0]
    return (
        f"{type(task).__name__} could not be checked on a few examples (is its loss a sum, "
        f"does it count padding?): {type(error).__name__}: {reason}"
    )


def trial_weights(task: Task, program: Program) -> dict[str, tf.Tensor] | None:
    """Returns the weights of a program by path, as constants; None if the task is not tried.

    All processes of a run must call it.
    """
    specs = task.specs()
    if sum(spec.size_bytes for spec in specs.values()) > MOST_BYTES or program.serialize_calls:
        return None
    with tf.device("CPU:0"):
        return {p: tf.constant(w.numpy()) for p, w in flatten(program.call(_theta)).items()}


def _theta(theta: Any, ctx: StepContext) -> Any:
    del ctx
    return theta


def _check_sums(trial: Trial, batch: Batch) -> list[str]:
    """Rejects a task whose loss is not a sum over the examples of a batch; returns warnings."""
    task = trial.task
    if len(next(iter(batch.values()))) < 2:
        return []
    if divided_losses.couples(task):
        return coupled_sums.check(trial, batch)
    warnings = check_is_sum(trial, batch, "eval")
    if not any(layer.couples_examples for layer in task.walk()):
        check_is_sum(trial, batch, "train")
    return warnings


def _check_equal(trial: Trial, example: Batch) -> None:
    """Rejects a task that has different losses for the batches of `Task.equal_losses`."""
    batches = task_results.equal_losses(trial.task, example)
    if batches is None:
        return
    one, other, problem = batches
    before, after = (trial.sums(batch).loss for batch in (one, other))
    if not trial.differ(before, after, scale=abs(before)):
        return
    again = repeated(lambda: trial.sums(one).loss)
    if different_repetition(before, after, again) is None:
        raise LossError(f"{problem} (a loss of {before:g} became {after:g})")


def _check_pieces(trial: Trial, batch: Batch) -> None:
    """Rejects a task whose own loss() and pieces() compute different losses."""
    loss, pieces = type(trial.task).loss, type(trial.task).pieces
    is_default = loss is Task.loss or pieces is Task.pieces
    if is_default or all(one.__module__.startswith("tekso.") for one in (loss, pieces)):
        return
    whole = trial.sums(batch).loss
    try:
        by_pieces = trial.sums(batch, by=Task.loss).loss
    except RowsError:  # such pieces run only in a pipeline
        return
    if not trial.differ(whole, by_pieces, scale=abs(whole)):
        return
    again = repeated(lambda: trial.sums(batch).loss)
    if different_repetition(whole, by_pieces, again) is None:
        raise LossError(
            f"{task_results.method_of(trial.task, 'loss')} and "
            f"{task_results.method_of(trial.task, 'pieces')} differ: for two examples the sum is "
            f"{whole:g} by loss(), and {by_pieces:g} by pieces(), which a pipeline runs. Both must "
            "compute the same, or remove one of them"
        )
