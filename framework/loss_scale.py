"""Dynamic loss scaling, so that small gradients do not become 0 in float16.

    gradients of scale * loss, in float16 ─► cast to float32, divided by the scale ─► learner
    not finite                            ─► the step is skipped, and the scale is halved
    finite in `growth_steps` consecutive steps ─► the scale is doubled

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
        if not 1 <= p.initial <= p.largest:
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

    def updated(self, slots: Mapping[str, tf.Tensor], finite: tf.Tensor) -> dict[str, tf.Tensor]:
        """Returns the new values of its slots after a step.

        Args:
          slots: {path: value} before the step.
          finite: bool scalar; whether the loss and all gradients of the step were finite.
        """
        p, scale = self.params, slots[SCALE]
        steps = (slots[FINITE_STEPS] + 1) * tf.cast(finite, tf.int64)
        grows = tf.cast(tf.equal(steps, p.growth_steps), tf.int64)
        doubled = tf.minimum(scale * 2.0, p.largest)
        grown = scale + (doubled - scale) * tf.cast(grows, tf.float32)
        smaller = tf.maximum(scale * 0.5, 1.0)
        is_finite = tf.cast(finite, tf.float32)
        return {
            SCALE: grown * is_finite + smaller * (1.0 - is_finite),
            FINITE_STEPS: steps * (1 - grows),
        }
