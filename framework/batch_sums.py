"""The sums over the examples of a batch or of a part of it, and how they are summed over parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tekso.framework.collected import Pairs, added_pairs
from tekso.framework.context import StepContext
from tekso.framework.task import LossSums


class Sums(NamedTuple):
    """The results of a part of a batch, to be summed over all parts.

    Attributes:
      loss: scalar; the sum of the losses of its examples. [losses] of a task with several.
      total: scalar; its share of the total loss, which is differentiated.
      metrics: {name: (sum, weight)}, scalars.
      auxiliary: {name: scalar}; its share of every auxiliary loss.
      statistics: {path of a weight: (sum, weight)}, in the shape of the weight.
    """

    loss: tf.Tensor
    total: tf.Tensor
    metrics: Pairs
    auxiliary: dict[str, tf.Tensor]
    statistics: Pairs


def part_sums(end: LossSums | None, ctx: StepContext, total_weight: tf.Tensor) -> Sums:
    """Returns the sums of a part of a batch in a training step.

    Args:
      end: loss sums of the part; None in a stage of a pipeline that is not the last.
      ctx: the step context in which it was computed.
      total_weight: loss weight of the global batch.
    """
    collected = ctx.collected
    auxiliary = collected.total("loss")
    return Sums(
        tf.constant(0.0) if end is None else end.loss_sum,
        auxiliary if end is None else end.total(total_weight, auxiliary),
        collected.reported({} if end is None else end.metrics),
        {name: value for name, (value, _) in collected.sums["loss"].items()},
        collected.sums["statistic"],
    )


def joined_sums(stages: Sequence[Sums]) -> Sums:
    """Returns the sums of a batch, given the sums of each stage; the last stage has the losses.

    The result has no statistics: each stage updates its weights from its own statistics.
    """
    dtype = stages[-1].loss.dtype
    # Shares of a mean, so they are summed over parts and stages.
    auxiliary: dict[str, tf.Tensor] = {}
    for name, value in (pair for sums in stages for pair in sums.auxiliary.items()):
        auxiliary[name] = auxiliary[name] + value if name in auxiliary else value
    return Sums(
        stages[-1].loss,
        added([tf.cast(sums.total, dtype) for sums in stages]),
        added_pairs([sums.metrics for sums in stages]),
        auxiliary,
        {},
    )


def added(parts: Iterable[Any]) -> Any:
    """Returns the sum of nests of equal structure: gradients, or sums, of several parts."""
    return tf.nest.map_structure(lambda *x: tf.add_n(x) if len(x) > 1 else x[0], *parts)
