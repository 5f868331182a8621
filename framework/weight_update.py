"""The update of one weight: by which function, and only if the step is applied."""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import tensorflow as tf

from tekso.framework.optimizers.optimizer import Optimizer
from tekso.framework.schedules import Schedule
from tekso.framework.weight_spec import WeightSpec


class GroupLearner(Protocol):
    """The methods that the step calls on the learner of a group; documented in `Learner`."""

    optimizer: Optimizer
    schedule: Schedule

    def slots_of(self, spec: WeightSpec) -> dict[str, WeightSpec]:
        """Returns {slot name: spec} of the state of one weight."""
        ...

    def kind(self, spec: WeightSpec) -> Hashable:
        """Returns a value that is equal for weights with the same update function."""
        ...

    def squared_norm(self, spec: WeightSpec, gradient: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the squared norm of a gradient, before and after its own clipping."""
        ...

    def global_factor(self, squared_norm: tf.Tensor) -> tf.Tensor | None:
        """Returns the factor of all gradients, given their squared norm."""
        ...

    def clipped(self, spec: WeightSpec, gradient: Any, factor: tf.Tensor | None) -> tf.Tensor:
        """Returns a gradient clipped by its own norm and multiplied by a factor."""
        ...

    def update_weight(
        self,
        spec: WeightSpec,
        weight: tf.Tensor,
        gradient: tf.Tensor,
        slots: dict[str, tf.Tensor],
        learning_rate: tf.Tensor,
        applied: tf.Tensor,
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """Returns a new weight and its new slots."""
        ...


def kinds(learner: GroupLearner) -> Callable[[WeightSpec], Hashable]:
    """Returns the function from a spec to its kind.

    In user-defined learners and optimizers the kind is the path, which their update may use.
    """
    if _is_changed(type(learner)) or _is_changed(type(learner.optimizer)):
        return lambda spec: spec.path
    return lambda spec: (spec.most, learner.kind(spec))


def _is_changed(cls: type) -> bool:
    """Returns whether a class outside of Tekso adds methods but does not redefine `kind`."""
    for one in cls.__mro__:
        if "kind" in vars(one):
            return False
        methods = (types.FunctionType, property, classmethod, staticmethod)
        if not one.__module__.startswith("tekso.") and any(
            isinstance(value, methods) for value in vars(one).values()
        ):
            return True
    return False


def updated(
    weight: tf.Tensor,
    gradient: tf.Tensor,
    *given: tf.Tensor,
    learner: GroupLearner,
    spec: WeightSpec,
    names: tuple[str, ...],
) -> list[tf.Tensor]:
    """Returns the new values of a weight and its slots; the old values if the step is skipped.

    Args:
      weight: the weight.
      gradient: its gradient.
      given: its slots, then whether the gradients are finite, the number of earlier updates, the
        learning rate and, if gradients are clipped by their global norm, the clipping factor.
      learner: the learner of the weight.
      spec: spec of this weight, or of another weight of the same kind.
      names: names of the slots.
    """
    slots, (finite, applied, rate, *factor) = given[: len(names)], given[len(names) :]
    new_weight, new_slots = learner.update_weight(
        spec,
        weight,
        learner.clipped(spec, gradient, factor[0] if factor else None),
        dict(zip(names, slots, strict=True)),
        rate,
        applied,
    )
    if spec.most is not None:
        new_weight = tf.minimum(new_weight, tf.constant(spec.most, new_weight.dtype))
    new = [new_weight, *(new_slots[name] for name in names)]
    return [select(finite, n, b) for n, b in zip(new, [weight, *slots], strict=True)]


def is_first_update(applied: tf.Tensor) -> tf.Tensor:
    """Returns whether no update has been applied yet, as a condition for `select` of shape [1]."""
    return tf.equal(tf.reshape(applied, [1]), tf.constant(0, tf.int64))


def select(condition: tf.Tensor, chosen: tf.Tensor, otherwise: tf.Tensor) -> tf.Tensor:
    """Returns one of two tensors of the same shape.

    Args:
      condition: bool. If its shape is [], the result is one of the tensors itself, which takes
        neither time nor memory. If it is [1], all elements are copied; on a mesh it must be,
        because a scalar condition and sharded tensors crash the process (`execution/workarounds`).
      chosen: the result if the condition is true.
      otherwise: the result if it is false.
    """
    if condition.shape.rank == 0:
        return tf.raw_ops.Select(condition=condition, x=chosen, y=otherwise)
    return tf.where(tf.reshape(condition, [1] * len(chosen.shape)), chosen, otherwise)
