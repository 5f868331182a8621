"""Finds, for a plan, that the parts of a batch would have another loss than the whole batch.

Only for tasks that couple examples otherwise than by batch statistics, the plan reads a batch and
initializes the weights: whether the loss differs depends on both.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from tekso.framework.execution.data_parallel import DataParallel
from tekso.framework.experiment import Tree
from tekso.framework.run import divided_losses, loss_check
from tekso.framework.run.divided_losses import Division
from tekso.framework.run.loss_sums import LossError
from tekso.framework.run.loss_trial import Trial
from tekso.framework.task import Task
from tekso.framework.theta import flatten


@dataclasses.dataclass(frozen=True)
class DividedStep:
    """What was found.

    Attributes:
      problem: why training would be refused, or "".
      warnings: why that could not be found out.
    """

    problem: str = ""
    warnings: tuple[str, ...] = ()


def find(tree: Tree.Params, task: Task, devices: int, *, assets_dir: str | None) -> DividedStep:
    """Returns why training on several devices, or in accumulation steps, would be refused.

    Args:
      tree: the Params.
      task: the task.
      devices: number of devices of the step; 0: those of a mesh, which compute a batch together.
      assets_dir: folder of the assets of a run, if there was one.
    """
    division = _division(tree, devices)
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


def _division(tree: Tree.Params, devices: int) -> Division:
    """Returns how a batch of training is divided; with `execution.updates`, by one worker."""
    execution: Any = tree.execution
    is_divided = issubclass(execution.owner, DataParallel) and not execution.updates
    learner: Any = tree.learner
    towers = (execution.towers or 1) if is_divided else 1
    return Division(max(1, devices * towers) if is_divided else 1, learner.accumulation_steps)
