"""Finds out before the first step whether evaluations will report the metric of a rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tekso.framework import task_results
from tekso.framework.context import StepContext
from tekso.framework.execution.base import signature_of
from tekso.framework.input.input import Input
from tekso.framework.run.metric_choice import Rule, metric_of, where
from tekso.framework.signature import Signature
from tekso.framework.spelling import close_matches
from tekso.framework.task import LOSS, Task, TaskError


def check(tree: Any, task: Task, eval_inputs: Mapping[str, Input]) -> None:
    """Checks the metrics of early stopping and of the best checkpoint.

    A metric that the task declares in `goals` is accepted. For others the loss is traced. A task
    that decodes in `score` may report more figures than can be known; then only a name that is
    close to a known one is an error.

    Args:
      tree: the Params of the experiment.
      task: its task.
      eval_inputs: its evaluation inputs.

    Raises:
      ValueError: evaluations do not report the metric; names those that they report.
    """
    rules: list[Rule] = ["keep_best"]
    if tree.run.early_stopping.patience:
        rules.append("early_stopping")
    for rule in rules:
        name, _, metric = metric_of(tree, rule).partition("/")
        declared = {LOSS, *task_results.goals_of(task.params)}
        if not name or {metric, metric.rpartition("/")[0], metric.partition("/")[0]} & declared:
            continue
        input = eval_inputs[name]
        if input.num_batches == 0:
            continue
        known = _reported(task, signature_of(input.batch(0)))
        if known is None or metric in known:
            continue
        decodes = type(task).score is not Task.score
        close = close_matches(metric, sorted(known | declared), count=1)
        if close or not decodes:
            also = sorted(declared - known) if decodes else []
            more = f", and with decoding {', '.join(also)}" if also else ""
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(
                f"{where(tree, rule)} is {metric!r}, but an evaluation of eval_inputs.{name} "
                f"reports {', '.join(sorted(known))}{more}{hint}"
            )


def _reported(task: Task, batch: Signature) -> set[str] | None:
    """Returns the names of the figures of an evaluation, without those of decoding.

    None: unknown, because `summarize` of the task fails for invented sums.
    """
    with tf.Graph().as_default():
        theta = {
            path: tf.raw_ops.Placeholder(dtype=spec.dtype, shape=spec.shape)
            for path, spec in task.specs().items()
        }
        arrays = {
            name: tf.raw_ops.Placeholder(dtype=dtype, shape=shape)
            for name, (shape, dtype) in batch.items()
        }
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
