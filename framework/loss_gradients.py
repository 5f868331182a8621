"""The gradients of several losses of one forward pass, each with respect to the shared weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.task_values import LossSums
from tekso.framework.theta import SEPARATOR


def totals(
    end: LossSums, ctx: StepContext, total_weight: tf.Tensor, losses: Sequence[str]
) -> list[tf.Tensor]:
    """Returns the share of a part of a batch in the total of every loss.

    Args:
      end: loss sums of the part, a vector.
      ctx: context in which it was computed; the auxiliary losses "<loss>/…" belong to that loss.
      total_weight: loss weights of the global batch, a vector.
      losses: names of the losses.
    """
    weight = tf.cast(total_weight, end.loss_sum.dtype)
    means: list[tf.Tensor] = tf.unstack(tf.math.divide_no_nan(end.loss_sum, weight), len(losses))
    for number, name in enumerate(losses):
        for auxiliary, (value, _) in ctx.collected.sums["loss"].items():
            if auxiliary.startswith(name + SEPARATOR):
                means[number] += tf.cast(value, means[number].dtype)
    return means


def separate(
    forward: Callable[[], tuple[LossSums, StepContext]],
    total_weight: tf.Tensor,
    trained: Mapping[str, tf.Tensor],
    shared: Set[str],
    losses: Sequence[str],
    scale: tf.Tensor | None,
) -> tuple[dict[str, Any], tuple[LossSums, StepContext]]:
    """Returns the gradients of a part of a batch, and what `forward` returned.

    Each loss reads its own part of the graph, so this costs as much as one gradient of their sum.

    Args:
      forward: computes the part.
      total_weight: loss weights of the global batch.
      trained: {path: tensor} to differentiate with respect to.
      shared: paths of the weights that several losses read.
      losses: names of the losses.
      scale: factor of the losses in the backward pass; None: 1.

    Returns: {path: gradient, or for a shared weight a tuple with one for each loss}.
    """
    with tf.GradientTape(watch_accessed_variables=False, persistent=True) as tape:
        tape.watch(trained)
        end, ctx = forward()
        each = totals(end, ctx, total_weight, losses)
    by_loss = []
    for total in each:
        seed = tf.ones_like(total) if scale is None else tf.cast(scale, total.dtype)
        by_loss.append(tape.gradient(total, dict(trained), output_gradients=seed))
    found: dict[str, Any] = {}
    for path, weight in trained.items():
        own = [gradients[path] for gradients in by_loss]
        dense = [None if g is None else tf.convert_to_tensor(g) for g in own]
        if path in shared:
            found[path] = tuple(tf.zeros_like(weight) if g is None else g for g in dense)
        else:
            there = [g for g in dense if g is not None]
            found[path] = tf.add_n(there) if there else tf.zeros_like(weight)
    return found, (end, ctx)
