"""Adafactor: adaptive updates with slots of size rows + columns for a matrix."""

from __future__ import annotations

from typing import Any, Literal

import tensorflow as tf

from tekso.framework.optimizers.adam import unseen_share
from tekso.framework.optimizers.optimizer import Optimizer, Slots, layer_root_mean_square, slot
from tekso.framework.params import param
from tekso.framework.weight_spec import WeightSpec


class Adafactor(Optimizer):
    """Adafactor: factored second moments, clipped updates, and updates relative to the weight.

        square = gradient**2 + gradient_epsilon
        row    = beta2_t * row    + (1 - beta2_t) * mean of square over the columns
        column = beta2_t * column + (1 - beta2_t) * mean of square over the rows
        update = gradient / sqrt(row * column / mean(row))
        update /= max(1, rms(update) / clipping_threshold)
        weight -= rate_t * max(rms(weight), scale_epsilon) * update
        beta2_t = 1 - t**-decay_exponent,   rate_t = learning_rate * min(t**-0.5, max_relative_step)
        t = 1, 2, …

    Rows and columns are the two largest dims of a weight (of one layer of a stacked weight), if
    both have at least `min_dim_to_factor` elements. For all other weights, the second moment is not
    factored. Root mean squares are computed for each layer of a stacked weight. With the default
    `step_size`, the learner's schedule is a factor of the relative step: use `Constant` with value
    1. Weight decay is multiplied by rate_t.

    Source:
      Shazeer & Stern 2018 (arXiv 1804.04235), algorithms 4 and 5; dims of tensors of higher rank as
      in Mesh-TensorFlow (arXiv 1811.02084).
    """

    class Params(Optimizer.Params):
        """Params of Adafactor."""

        step_size: Literal["relative", "learning_rate"] = param(
            "rate_t: learning_rate * min(t**-0.5, max_relative_step), or learning_rate.",
            default="relative",
        )
        max_relative_step: float = param("Largest relative step.", default=0.01)
        weight_scale: Literal["rms", "none"] = param(
            "Whether an update is multiplied by the root mean square of its weight.", default="rms"
        )
        scale_epsilon: float = param(
            "Lower bound of this root mean square: epsilon 2 of the paper.", default=1e-3
        )
        decay: Literal["power", "adam"] = param(
            "beta2_t: 1 - t**-decay_exponent, or beta2 * (1 - beta2**(t-1)) / (1 - beta2**t).",
            default="power",
        )
        decay_exponent: float = param('Exponent in beta2_t with decay "power".', default=0.8)
        beta2: float = param('Limit of beta2_t with decay "adam".', default=0.999)
        clipping_threshold: float | None = param(
            "Maximum root mean square of an update; None: no limit.", default=1.0
        )
        gradient_epsilon: float = param(
            "Added to squared gradients: epsilon 1 of the paper.", default=1e-30
        )
        min_dim_to_factor: int = param("Minimum size of factored dims.", default=128)
        beta1: float = param("Decay of the first moment; 0: no first moment.", default=0.0)

    def __init__(self, params: Any) -> None:
        """Checks the Params."""
        super().__init__(params)
        self._require_share("beta1", "beta2")
        self._require_positive(
            "max_relative_step", "scale_epsilon", "decay_exponent", "gradient_epsilon"
        )
        threshold = self.params.clipping_threshold
        self._require("clipping_threshold", threshold is None or threshold > 0, "None or above 0")
        self._require("min_dim_to_factor", self.params.min_dim_to_factor >= 1, "1 or more")

    def slots(self, spec: WeightSpec) -> dict[str, WeightSpec]:
        """Declares the slots in the class docstring."""
        factored = self._factored_dims(spec)
        if factored is None:
            slots = {"second_moment": slot(spec, "second_moment")}
        else:
            row, column = factored
            slots = {
                "row_second_moment": slot(spec, "row_second_moment", without_dim=column),
                "column_second_moment": slot(spec, "column_second_moment", without_dim=row),
            }
        if self.params.beta1:
            slots["first_moment"] = slot(spec, "first_moment")
        return slots

    def effective_learning_rate(self, learning_rate: tf.Tensor, t: tf.Tensor) -> tf.Tensor:
        """Returns rate_t of the class docstring."""
        if self.params.step_size == "learning_rate":
            return learning_rate
        return learning_rate * tf.minimum(tf.math.rsqrt(t), self.params.max_relative_step)

    def decrement(
        self,
        spec: WeightSpec,
        weight: tf.Tensor,
        gradient: tf.Tensor,
        slots: Slots,
        learning_rate: tf.Tensor,
        t: tf.Tensor,
    ) -> tuple[tf.Tensor, Slots]:
        """Computes the formula of the class docstring."""
        p = self.params
        update, new_slots = self._scaled_gradient(spec, gradient, slots, self._mixing(t))
        rate = learning_rate
        if p.weight_scale == "rms":
            rate *= tf.maximum(layer_root_mean_square(weight, spec), p.scale_epsilon)
        if p.clipping_threshold is not None:
            size = layer_root_mean_square(update, spec)
            rate /= tf.maximum(size / p.clipping_threshold, 1.0)
        decrement = rate * update
        if p.beta1:
            decrement = p.beta1 * slots["first_moment"] + (1.0 - p.beta1) * decrement
            new_slots["first_moment"] = decrement
        return decrement, new_slots

    def _scaled_gradient(
        self, spec: WeightSpec, gradient: tf.Tensor, slots: Slots, mixing: tf.Tensor
    ) -> tuple[tf.Tensor, Slots]:
        square = tf.square(gradient) + self.params.gradient_epsilon
        factored = self._factored_dims(spec)
        if factored is None:
            moment = (1.0 - mixing) * slots["second_moment"] + mixing * square
            return gradient * tf.math.rsqrt(moment), {"second_moment": moment}
        row_dim, column_dim = factored
        row = (1.0 - mixing) * slots["row_second_moment"]
        row += mixing * tf.reduce_mean(square, axis=column_dim)
        column = (1.0 - mixing) * slots["column_second_moment"]
        column += mixing * tf.reduce_mean(square, axis=row_dim)
        mean = tf.reduce_mean(row, axis=row_dim, keepdims=True)
        row_factor = tf.expand_dims(tf.math.rsqrt(row / mean), column_dim)
        column_factor = tf.expand_dims(tf.math.rsqrt(column), row_dim)
        new_slots = {"row_second_moment": row, "column_second_moment": column}
        return gradient * row_factor * column_factor, new_slots

    def _mixing(self, t: tf.Tensor) -> tf.Tensor:
        """Returns 1 - beta2_t, computed directly, because 1 - float32(beta2_t) would be rounded."""
        p = self.params
        if p.decay == "power":
            return tf.pow(t, -p.decay_exponent)
        return (1.0 - p.beta2) / unseen_share(p.beta2, t)

    def _factored_dims(self, spec: WeightSpec) -> tuple[int, int] | None:
        """Returns the row dim and the column dim, in ascending order; None: not factored."""
        inner = range(spec.stacked, len(spec.shape))
        largest = sorted(inner, key=lambda d: (spec.shape[d], d))[-2:]
        if len(largest) < 2 or spec.shape[largest[0]] < self.params.min_dim_to_factor:
            return None
        return min(largest), max(largest)
