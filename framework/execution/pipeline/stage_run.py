"""Runs the forward pass of a stage over a micro-batch, with any step context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.execution.pipeline.piece_traces import tensors
from tekso.framework.execution.pipeline.stages import Stage, Value
from tekso.framework.pieces import LOSS_SUM, METRICS, run_all
from tekso.framework.step import Sums, part_sums
from tekso.framework.task import LossSums


def run_stage(
    stage: Stage,
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
      values: TensorSpecs of the values that are passed between stages.
      weights: weights that the stage reads, {path: tensor}.
      inputs: flat tensors of the values that it reads.
      ctx: step context; the sums include what the pieces collect.
      total_weight: loss weight of the global batch.
    """
    given = iter(inputs)
    flow = {
        value.name: tf.nest.map_structure(
            lambda spec: None if spec is None else next(given), values[value]
        )
        for value in stage.inputs
    }
    flow = run_all(stage.pieces, weights, flow, ctx)
    outputs = tensors([flow[name] for name in stage.outputs])
    end = LossSums(flow[LOSS_SUM], flow[METRICS]) if stage.is_last else None
    return outputs, part_sums(end, ctx, total_weight)
