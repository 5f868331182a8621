"""One forward pass of a stage over a micro-batch, under any step context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tekso.framework.execution.pipeline.piece_traces import tensors
from tekso.framework.execution.pipeline.stages import Stage, Value
from tekso.framework.pieces import LOSS_SUM, METRICS, run_all
from tekso.framework.task import LossSums


class StageRun(NamedTuple):
    """What a stage makes of a micro-batch.

    Attributes:
      outputs: the flat tensors that later stages read.
      total: its share of the total loss.
      sums: of losses, metrics and statistics, by kind.
    """

    outputs: list[tf.Tensor]
    total: tf.Tensor
    sums: dict[str, Any]


def run_stage(
    stage: Stage,
    values: Mapping[Value, Any],
    weights: Mapping[str, tf.Tensor],
    inputs: Sequence[tf.Tensor],
    ctx: Any,
    *,
    total_weight: tf.Tensor,
) -> StageRun:
    """Runs the pieces of a stage.

    Args:
      stage: the stage.
      values: TensorSpecs of what flows between the stages.
      weights: {path: tensor} of those that it reads.
      inputs: flat tensors of what it reads of the flow.
      ctx: step context; what the pieces collect is among the sums.
      total_weight: of the global batch.
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
    end = LossSums(flow[LOSS_SUM], flow[METRICS]) if stage.is_last else LossSums(tf.constant(0.0))
    metrics = ctx.collected.reported(end.metrics)
    total = ctx.collected.total("loss")
    if stage.is_last:
        total = end.total(total_weight, total)
    sums = {
        "loss": end.loss_sum,
        "total": total,
        "metric": tf.nest.map_structure(tf.convert_to_tensor, metrics),
        "aux": {f"aux/{n}": v for n, (v, _) in ctx.collected.sums["loss"].items()},
        "statistic": ctx.collected.sums["statistic"],
    }
    return StageRun(outputs, total, sums)
