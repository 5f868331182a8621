"""The base class of optimizers, which update one weight at a time.

An optimizer has no state. It declares slots for the spec of a weight. `update` is a pure function
from (weight, gradient, slots) to (weight, slots). It consists of elementwise operations and
reductions only, so XLA can compile it as one cluster, and it works on sharded weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Mapping
from typing import ClassVar, Literal

import tensorflow as tf

from tekso.framework import initializers
from tekso.framework.params import Configurable, param
from tekso.framework.path_patterns import PathPatterns
from tekso.framework.weight_spec import WeightSpec

Slots = dict[str, tf.Tensor]


class Optimizer(Configurable):
    """Base class of all optimizers.

    A subclass declares slots and computes `decrement`, which is subtracted from the weight. This
    class adds weight decay, decoupled or as the gradient of the loss weight_decay / 2 * |weight|^2:

        weight -= decrement + weight_decay * learning_rate * weight     scaling "learning_rate"
        weight -= decrement + weight_decay * weight                     scaling "independent"
        gradient += weight_decay * weight, before the decrement         scaling "gradient"

    Updates are computed in float64 for float64 weights and in float32 for all others. The new
    weight is rounded to the dtype of the weight.

    Source:
      Loshchilov & Hutter 2019 (arXiv 1711.05101), decoupled weight decay.
    """

    class Params(Configurable.Params):
        """Params of an optimizer."""

        other_names: ClassVar[Mapping[str, str]] = dict.fromkeys(
            ("learning_rate", "lr"),
            "the learner has the learning rate, as a schedule: "
            "Learner.Params(optimizer=…, schedule=Constant.Params(value=…))",
        )

        weight_decay: float = param("Rate of weight decay per step; 0: no decay.", default=0.0)
        weight_decay_scaling: Literal["learning_rate", "independent", "gradient"] = param(
            "Whether the rate is multiplied by the learning rate of the step, or not, or whether "
            "decay is added to the gradient, like the gradient of an L2 loss.",
            default="learning_rate",
        )
        weight_decay_exclude: list[str] = param(
            "Weights without decay: regular expressions that match whole weight paths, for example "
            '[".*/(b|bias|scale)"]: biases of layers (b), and norms.',
            default=[],
        )

    decay_is_decoupled = True
    """False in subclasses whose `decrement` includes weight decay."""

    def __init__(self, params: Optimizer.Params) -> None:
        """Checks the Params."""
        super().__init__(params)
        self._require("weight_decay", self.params.weight_decay >= 0, "0 or more")
        self._undecayed = self._patterns("weight_decay_exclude")

    def slots(self, spec: WeightSpec) -> dict[str, WeightSpec]:
        """Returns {slot name: spec} of the optimizer's slots for a weight."""
        del spec
        return {}

    def update(
        self,
        spec: WeightSpec,
        weight: tf.Tensor,
        gradient: tf.Tensor,
        slots: Slots,
        learning_rate: tf.Tensor,
        step: tf.Tensor,
    ) -> tuple[tf.Tensor, Slots]:
        """Returns the new weight and the new slots.

        Shapes:
          weight, gradient: spec.shape
          slots: {name: tensor}, as declared by `slots(spec)`
          learning_rate: []
          step: [], int64: number of earlier updates of these slots, from 0
          returns: the same shapes and dtypes
        """
        dtype = tf.as_dtype(state_dtype(spec))
        w, g = tf.cast(weight, dtype), tf.cast(gradient, dtype)
        t = tf.cast(tf.cast(step, tf.int64) + tf.constant(1, tf.int64), dtype)
        rate = self.effective_learning_rate(tf.cast(learning_rate, dtype), t)
        scaling, decay = self.params.weight_decay_scaling, self.params.weight_decay
        adds_decay = self.decay_is_decoupled and self.decays(spec)
        if scaling == "gradient" and adds_decay:
            g += decay * w
        decrement, new_slots = self.decrement(spec, w, g, slots, rate, t)
        if scaling != "gradient" and adds_decay:
            decrement += (decay if scaling == "independent" else decay * rate) * w
        return tf.cast(w - decrement, weight.dtype), new_slots

    def effective_learning_rate(self, learning_rate: tf.Tensor, t: tf.Tensor) -> tf.Tensor:
        """Returns the optimizer's own learning rate at its t-th update, from the schedule's."""
        del t
        return learning_rate

    def decrement(
        self,
        spec: WeightSpec,
        weight: tf.Tensor,
        gradient: tf.Tensor,
        slots: Slots,
        learning_rate: tf.Tensor,
        t: tf.Tensor,
    ) -> tuple[tf.Tensor, Slots]:
        """Returns the decrement of the weight, and the new slots; t counts from 1."""
        raise NotImplementedError(f"{type(self).__name__} has no decrement()")

    def kind(self, spec: WeightSpec) -> Hashable:
        """Returns the values that `update` reads from a spec besides shape, dtype and stack dims.

        Weights for which all these values are equal share one compiled update function. In a
        subclass that adds or overrides other methods but not this one, every weight has its own
        update function.
        """
        return self.decays(spec)

    def decays(self, spec: WeightSpec) -> bool:
        """Returns whether weight decay applies to the weight."""
        return self.params.weight_decay > 0 and spec.path not in self._undecayed

    def check(self, paths: Iterable[str]) -> None:
        """Checks the Params against the paths of all weights of the optimizer.

        Raises:
          ValueError: no pattern of a list matches any weight.
        """
        self._check_patterns(self._undecayed, paths)

    def _check_patterns(self, patterns: PathPatterns, paths: Iterable[str]) -> None:
        paths = list(paths)
        missed = patterns.missed(paths)
        if missed and len(missed) == len(patterns.patterns):
            raise ValueError(patterns.explain_miss(missed, paths))

    def _patterns(self, field: str) -> PathPatterns:
        return PathPatterns(getattr(self.params, field), name=f"{type(self).__name__}.{field}")

    def _require(self, field: str, holds: bool, allowed: str) -> None:
        if not holds:
            given = getattr(self.params, field)
            raise ValueError(f"{type(self).__name__}: {field} is {given!r}, but must be {allowed}")

    def _require_share(self, *fields: str) -> None:
        for field in fields:
            self._require(field, 0 <= getattr(self.params, field) < 1, "in [0, 1)")

    def _require_positive(self, *fields: str) -> None:
        for field in fields:
            self._require(field, getattr(self.params, field) > 0, "above 0")


def state_dtype(spec: WeightSpec) -> str:
    """Returns the dtype of the update of a weight and of its slots."""
    return "float64" if spec.dtype == "float64" else "float32"


def slot(
    spec: WeightSpec, name: str, *, value: float = 0.0, without_dim: int | None = None
) -> WeightSpec:
    """Returns the spec of a slot with the shape and dims of a weight, optionally without one dim.

    Args:
      spec: spec of the weight.
      name: name of the slot.
      value: initial value.
      without_dim: the dim to omit; None: omit none.
    """
    shape, dims = list(spec.shape), list(spec.dims)
    if without_dim is not None:
        del shape[without_dim], dims[without_dim]
    return dataclasses.replace(
        spec,
        path=f"{spec.path}/{name}",
        template=f"{spec.template}/{name}",
        shape=tuple(shape),
        dims=tuple(dims),
        init=initializers.Constant.Params(value=value).instantiate(),
        dtype=state_dtype(spec),
        trainable=False,
    )


def layer_sum(x: tf.Tensor, spec: WeightSpec) -> tf.Tensor:
    """Sums a weight-shaped tensor over all but the stack dims.

    Shapes:
      x: [*stack, *inner]
      returns: [*stack, 1, …, 1], which broadcasts against x
    """
    return tf.reduce_sum(x, axis=list(range(spec.stacked, len(spec.shape))), keepdims=True)


def layer_norm(x: tf.Tensor, spec: WeightSpec) -> tf.Tensor:
    """Returns the Euclidean norm of each layer of a stacked weight; shapes as in `layer_sum`."""
    return tf.sqrt(layer_sum(tf.square(x), spec))


def layer_root_mean_square(x: tf.Tensor, spec: WeightSpec) -> tf.Tensor:
    """Returns the root mean square of each layer of a stacked weight; shapes as in `layer_sum`."""
    axes = list(range(spec.stacked, len(spec.shape)))
    return tf.sqrt(tf.reduce_mean(tf.square(x), axis=axes, keepdims=True))
