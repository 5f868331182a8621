"""Dynamic loss scaling, so that small gradients do not become 0 in float16.

    gradients of scale * loss, in float16 ─► cast to float32, divided by the scale ─► learner
    not finite                            ─► the step is skipped, and the scale is halved
    finite in `growth_steps` consecutive steps ─► the scale is doubled

The scale is at least 1. While it is larger, a skipped step with a finite loss does not count for
`max_consecutive_nonfinite_steps` of the learner, because a smaller scale may be all that is needed.

Scales are powers of 2 if the first one is, so scaling itself causes no rounding.

Source: Micikevicius et al. 2018, "Mixed precision training" (arXiv 1710.03740), section 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tekso.framework import initializers
from tekso.framework.params import Configurable, param
from tekso.framework.weight_spec import WeightSpec

SCALE = "loss_scale/scale"
FINITE_STEPS = "loss_scale/finite_steps"
"""Consecutive finite steps; below 0: minus the consecutive skipped steps that count."""
_SMALLEST = 1.0


class LossScale(Configurable):
    """The factor of the loss in a backward pass; its state is two scalar slots of the learner."""

    class Params(Configurable.Params):
        """Params of LossScale."""

        initial: float = param("The first scale.", default=2.0**15)
        growth_steps: int = param(
            "Number of consecutive finite steps after which the scale is doubled.", default=2000
        )
        largest: float = param("The scale does not grow above this.", default=2.0**24)

    def __init__(self, params: Any) -> None:
        """Checks the Params."""
        super().__init__(params)
        p = self.params
        if not _SMALLEST <= p.initial <= p.largest:
            raise ValueError(
                f"learner.loss_scale: initial is {p.initial:g} and largest is {p.largest:g}, but "
                "1 <= initial <= largest is needed"
            )
        if p.growth_steps < 1:
            raise ValueError(
                f"learner.loss_scale.growth_steps is {p.growth_steps}, but must be at least 1"
            )

    def slots(self) -> dict[str, WeightSpec]:
        """Returns {path: spec} of its slots: float32 and int64 scalars."""
        values = {SCALE: (self.params.initial, "float32"), FINITE_STEPS: (0.0, "int64")}
        return {
            path: WeightSpec(
                path,
                (),
                (),
                initializers.Constant.Params(value=value).instantiate(),
                dtype=dtype,
                trainable=False,
                template=path,
            )
            for path, (value, dtype) in values.items()
        }

    def updated(
        self,
        slots: Mapping[str, tf.Tensor],
        finite: tf.Tensor,
        loss_is_finite: tf.Tensor | None = None,
    ) -> dict[str, tf.Tensor]:
        """Returns the new values of its slots after a step.

        Args:
          slots: {path: value} before the step.
          finite: bool scalar; whether the loss and all gradients of the step were finite.
          loss_is_finite: bool scalar; whether the loss was finite; None: unknown.
        """
        p, scale = self.params, slots[SCALE]
        counts = tf.less_equal(scale, _SMALLEST)
        if loss_is_finite is not None:  # the scale is not the cause of a loss that is not finite
            counts = tf.logical_or(counts, tf.logical_not(loss_is_finite))
        zero, taken = tf.constant(0, tf.int64), tf.cast(finite, tf.int64)
        skipped = tf.minimum(slots[FINITE_STEPS], zero) - tf.cast(counts, tf.int64)
        steps = (tf.maximum(slots[FINITE_STEPS], zero) + 1) * taken + skipped * (1 - taken)
        grows = tf.cast(tf.equal(steps, p.growth_steps), tf.int64)
        doubled = tf.minimum(scale * 2.0, p.largest)
        grown = scale + (doubled - scale) * tf.cast(grows, tf.float32)
        smaller = tf.maximum(scale * 0.5, _SMALLEST)
        is_finite = tf.cast(finite, tf.float32)
        return {
            SCALE: grown * is_finite + smaller * (1.0 - is_finite),
            FINITE_STEPS: steps * (1 - grows),
        }

    @staticmethod
    def skipped_steps(slots: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """Returns the number of consecutive skipped steps that count: an int64 scalar."""
        return tf.maximum(-slots[FINITE_STEPS], tf.constant(0, tf.int64))
