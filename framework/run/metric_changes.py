"""Finds metrics that a run which resumes computes differently from before.

If the Params of the task changed, both tasks compute their figures of the same examples with the
restored weights. A metric whose figures differ has another definition now (another weight of a
loss, for example), so earlier evaluations cannot be compared with later ones; see `comparable`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

import tensorflow as tf

from tekso.framework import task_results
from tekso.framework.input.input import Input
from tekso.framework.params import Params
from tekso.framework.run import param_changes
from tekso.framework.run.loss_trial import Trial
from tekso.framework.task import LOSS, Task

_OF_MODEL = "model."
_TOLERANCE = 1e-4  # relative; a setting may change the order of float32 operations


@dataclasses.dataclass(frozen=True)
class MetricChanges:
    """What became of the metrics that decide about checkpoints and early stopping.

    Attributes:
      changed: "evaluation/metric" of those with another definition.
      unknown: of those that cannot be compared, although Params of the task outside of its model
        changed: those of decoding, and all if the task cannot be computed here.
    """

    changed: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    def text(self, step: int) -> str:
        """Returns the warning of a run that resumes at a step; "" without a change."""
        texts = []
        if self.changed:
            texts.append(
                f"the definition of {', '.join(self.changed)} changed after step {step}: the best "
                "checkpoint and the patience of early stopping start again from that step; the "
                "checkpoint that was best stays"
            )
        if self.unknown:
            texts.append(
                f"settings of the task changed after step {step}: if they change what "
                f"{', '.join(self.unknown)} means, the best checkpoint is compared with others of "
                "another meaning"
            )
        return "; ".join(texts)


def find(
    before: str,
    task: Task,
    weights: Mapping[str, tf.Tensor] | None,
    eval_inputs: Mapping[str, Input],
    metrics: Iterable[str],
) -> MetricChanges:
    """Returns which metrics have another definition than in the task of a checkpoint.

    Args:
      before: the Params of the task in the checkpoint, as text.
      task: the task now.
      weights: the restored weights by path; None: they are too large for a trial.
      eval_inputs: the evaluation inputs by name.
      metrics: "evaluation/metric" of the metrics that decide.
    """
    try:
        params = Params.from_text(before)
        lines = param_changes.lines(params, task.params)
    except (ValueError, ImportError, AttributeError, TypeError):
        return MetricChanges()  # reported with the changes of all settings
    if not lines:
        return MetricChanges()
    metrics = sorted(metrics)
    changed: list[str] = []
    compared: set[str] = set()
    for name in {metric.partition("/")[0] for metric in metrics} if weights is not None else ():
        try:
            with tf.device("CPU:0"):
                old, new = _figures(params.instantiate(), task, weights or {}, eval_inputs[name])
        except Exception:  # of user code; the evaluation will say what is wrong
            continue
        compared |= {f"{name}/{metric}" for metric in old.keys() & new.keys()}
        changed += [
            f"{name}/{metric}"
            for metric in old.keys() & new.keys()
            if _differ(old[metric], new[metric])
        ]
    unknown = []
    if any(not line.startswith(_OF_MODEL) for line in lines):
        unknown = [metric for metric in metrics if metric not in compared]
    return MetricChanges(tuple(m for m in metrics if m in changed), tuple(unknown))


def _figures(
    before: Task, now: Task, weights: Mapping[str, tf.Tensor], input: Input
) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the figures of both tasks for the same examples, without those of decoding."""
    trials = [Trial(task, weights) for task in (before, now)]
    whole = input.batch(0)
    rows = min(trial.most_rows(whole) for trial in trials)
    batch = {name: array[:rows] for name, array in whole.items()}
    found = []
    for trial in trials:
        sums = trial.sums(batch)
        pairs = {**sums.of_layers, **sums.metrics, LOSS: (sums.loss, sums.weight)}
        found.append(task_results.summarize(trial.task, pairs))
    return found[0], found[1]


def _differ(one: float, other: float) -> bool:
    return not math.isclose(one, other, rel_tol=_TOLERANCE, abs_tol=1e-9)
