"""Finds, for a plan, that the parts of a batch would have another loss than the whole batch.

Only for tasks that couple examples otherwise than by batch statistics, the plan reads a batch and
initializes the weights: whether the loss differs depends on both.
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tekso.framework.experiment import Tree
from tekso.framework.run import divided_losses, loss_check
from tekso.framework.run.divided_losses import Division
from tekso.framework.run.loss_causes import LossError
from tekso.framework.run.loss_trial import Trial
from tekso.framework.task import Task
from tekso.framework.theta import flatten


@dataclasses.dataclass(frozen=True)
class DividedStep:
    """What was found.

    Attributes:
      problem: why training would be refused, or "".
      warnings: why that could not be found out, or which statistics are those of parts.
    """

    problem: str = ""
    warnings: tuple[str, ...] = ()


def find(
    tree: Tree.Params, task: Task, division: Division, *, assets_dir: str | None
) -> DividedStep:
    """Returns what training would say about the parts of a batch.

    Args:
      tree: the Params.
      task: the task.
      division: how a batch is divided.
      assets_dir: folder of the assets of a run, if there was one.
    """
    found = _compared(tree, task, division, assets_dir)
    statistics = divided_losses.statistics_of_parts(task, division)
    return DividedStep(found.problem, (*statistics, *found.warnings))


def _compared(
    tree: Tree.Params, task: Task, division: Division, assets_dir: str | None
) -> DividedStep:
    """Returns why training would be refused for the loss of the parts of a batch."""
    if division.is_whole or not divided_losses.couples(task):
        return DividedStep()
    if sum(spec.size_bytes for spec in task.specs().values()) > loss_check.MOST_BYTES:
        return DividedStep(warnings=tuple(divided_losses.unchecked(task, division)))
    try:
        with tf.device("CPU:0"):
            trial = Trial(task, flatten(task.init(seed=tree.run.seed)))
            input = tree.input.instantiate(seed=tree.run.seed, assets_dir=assets_dir)
            divided_losses.check(trial, {"input": input}, division=division, trains=True)
    except LossError as error:
        return DividedStep(str(error))
    except Exception as error:
        return DividedStep(warnings=(divided_losses.failed(task, division, error),))
    return DividedStep()
