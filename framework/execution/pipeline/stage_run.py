"""Runs the forward pass of a stage over some examples, with any step context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tekso.framework import task_results
from tekso.framework.batch_sums import Sums, part_sums
from tekso.framework.context import StepContext
from tekso.framework.execution.pipeline.stages import Stage, Value
from tekso.framework.nests import filled, tensors
from tekso.framework.pieces import Flow, run_all
from tekso.framework.task import LossSums, Task


def run_stage(
    stage: Stage,
    task: Task,
    values: Mapping[Value, Any],
    weights: Mapping[str, tf.Tensor],
    inputs: Sequence[tf.Tensor],
    ctx: StepContext,
    *,
    total_weight: tf.Tensor,
) -> tuple[list[tf.Tensor], Sums]:
    """Runs the pieces of a stage; returns the flat tensors that later stages read, and the sums.

    Args:
      stage: the stage.
      task: the task.
      values: TensorSpecs of the values that are passed between stages.
      weights: weights that the stage reads, {path: tensor}.
      inputs: flat tensors of the values that it reads.
      ctx: step context; the sums include what the pieces collect.
      total_weight: loss weight of the global batch.
    """
    given = iter(inputs)
    flow = {value.name: filled(values[value], given) for value in stage.inputs}
    outputs, end = run_pieces(stage, task, weights, flow, ctx)
    flat = tensors([outputs[name] for name in stage.outputs])
    return flat, part_sums(end, ctx, total_weight)


def run_pieces(
    stage: Stage, task: Task, weights: Mapping[str, tf.Tensor], flow: Flow, ctx: StepContext
) -> tuple[Flow, LossSums | None]:
    """Runs the pieces of a stage; returns what later stages read, and the loss sums if it is last.

    Args:
      stage: the stage.
      task: the task; it is named if the loss sums are missing.
      weights: weights that the stage reads, {path: tensor}.
      flow: the values that it reads.
      ctx: step context, which receives what the pieces collect.

    Raises:
      TaskError: the last piece does not return the loss sums.
    """
    flow = run_all(stage.pieces, weights, flow, ctx)
    end = task_results.sums_of_flow(task, flow) if stage.is_last else None
    return {name: flow[name] for name in stage.outputs}, end
