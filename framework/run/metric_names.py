"""Finds out before the first step whether evaluations will report the metric of a rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from tekso.framework import task_results
from tekso.framework.context import StepContext
from tekso.framework.execution.base import signature_of
from tekso.framework.input.held_out import HeldOut
from tekso.framework.input.input import Input
from tekso.framework.run.metric_choice import Rule, metric_of, rules_of, where
from tekso.framework.signature import Signature
from tekso.framework.spelling import close_matches
from tekso.framework.symbolic import new_graph, placeholders, placeholders_of_batch
from tekso.framework.task import LOSS, Task, TaskError


def check(tree: Any, task: Task, eval_inputs: Mapping[str, Input]) -> None:
    """Checks the metrics of early stopping and of the best checkpoint.

    Args:
      tree: the Params of the experiment.
      task: its task.
      eval_inputs: its evaluation inputs.

    Raises:
      ValueError: evaluations do not report the metric; names those that they report.
    """
    for rule in rules_of(tree):
        name, _, metric = metric_of(tree, rule).partition("/")
        if not name or is_declared(task, metric) or eval_inputs[name].num_batches == 0:
            continue
        if why := unreported(task, metric, signature_of(eval_inputs[name].batch(0))):
            raise ValueError(_said(tree, rule, name, metric, why))


def problem(tree: Any, task: Task, batch: Signature) -> str:
    """Returns what `check` finds without the data of evaluations, or "".

    Args:
      tree: the Params of the experiment.
      task: its task.
      batch: arrays of a training batch. Evaluations that change them are not checked.
    """
    for rule in rules_of(tree):
        name, _, metric = metric_of(tree, rule).partition("/")
        if name and is_like_training(tree, name) and (why := unreported(task, metric, batch)):
            return _said(tree, rule, name, metric, why)
    return ""


def _said(tree: Any, rule: Rule, name: str, metric: str, why: str) -> str:
    return f"{where(tree, rule)} is {metric!r}, but an evaluation of eval_inputs.{name} {why}"


def is_like_training(tree: Any, name: str) -> bool:
    """Returns whether the batches of an evaluation input have the arrays of training batches."""
    params = tree.eval_inputs[name]
    return params.owner is HeldOut and not params.part and not params.changes


def is_declared(task: Task, metric: str) -> bool:
    """Returns whether a task declares a metric, or one of which it is a part, in `goals`."""
    names = {metric, metric.rpartition("/")[0], metric.partition("/")[0]}
    return bool(names & _declared(task))


def _declared(task: Task) -> set[str]:
    return {LOSS, *task_results.goals_of(task.params)}


def unreported(
    task: Task,
    metric: str,
    batch: Signature,
    *,
    undeclared: Literal["accepted", "rejected"] = "accepted",
) -> str:
    """Returns what evaluations report if a metric is not among it, or "".

    A metric that the task declares in `goals` is accepted. For others the loss is traced. A task
    that decodes in `score` may report more figures than can be known.

    Args:
      task: the task.
      metric: name of the metric, without the evaluation.
      batch: arrays of a batch of the evaluation.
      undeclared: what becomes of a figure that only `score` could report, but that the task does
        not declare. accepted: unless its name is close to a known one.
    """
    if is_declared(task, metric):
        return ""
    known, declared = _reported(task, batch), _declared(task)
    if known is None or metric in known:
        return ""
    decodes = type(task).score is not Task.score
    close = close_matches(metric, sorted(known | declared), count=1)
    if decodes and not close and undeclared == "accepted":
        return ""
    also = sorted(declared - known) if decodes else []
    more = f", and with decoding {', '.join(also)}" if also else ""
    hint = f"; did you mean {close[0]}?" if close else ""
    if decodes and not close:
        hint = f"; if score() of {type(task).__name__} reports {metric!r}, declare it in its goals"
    return f"reports {', '.join(sorted(known))}{more}{hint}"


def _reported(task: Task, batch: Signature) -> set[str] | None:
    """Returns the names of the figures of an evaluation, without those of decoding.

    None: unknown, because `summarize` of the task fails for invented sums.
    """
    with new_graph().as_default():
        theta, arrays = placeholders(task.specs()), placeholders_of_batch(batch)
        ctx = StepContext(mode="eval")
        sums = task_results.loss(task, task.theta(theta), arrays, ctx)
        names = [LOSS, *ctx.collected.reported(sums.metrics)]
    found: set[str] | None = None
    for mean in (0.5, 1.0):  # with 1 alone, a variance (of means of squares and values) is 0
        try:
            figures = task_results.summarize(task, dict.fromkeys(names, (mean, 1.0)))
        except TaskError:
            raise
        except (ArithmeticError, ValueError):
            continue
        found = (found or set()) | set(figures)
    return found
