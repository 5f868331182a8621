"""Checks optimizers before the first step: an update must be a function of its arguments.

An update is traced once, compiled and run in every step. What it keeps in a variable or in an
attribute is not saved in checkpoints, and an attribute changes only while it is traced.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tekso.framework import foreign_variables
from tekso.framework.source_lines import place_of
from tekso.framework.weight_spec import WeightSpec
from tekso.framework.weight_update import GroupLearner

_MOST_UPDATES = 4  # kinds of weights whose update is traced


def check(learner: GroupLearner, specs: Mapping[str, WeightSpec]) -> None:
    """Checks that an optimizer computes from its arguments alone, and returns what it must.

    Raises:
      ValueError: it does not; names the optimizer.
    """
    optimizer = learner.optimizer
    name = f"{type(optimizer).__name__}.update{place_of(type(optimizer).update)}"
    before = [_attributes(one) for one in (learner, optimizer, learner.schedule)]
    kinds = {(spec.dtype, len(spec.shape), spec.stacked): spec for spec in specs.values()}

    def update(spec: WeightSpec) -> None:
        made = learner.slots_of(spec)
        slots = {key: tf.zeros(slot.shape, slot.dtype) for key, slot in made.items()}
        weight = tf.zeros(spec.shape, spec.dtype)
        gradient = learner.clipped(spec, weight, None)
        applied = tf.constant(0, tf.int64)
        rate = tf.cast(learner.schedule(applied), tf.float32)
        new_weight, new_slots = learner.update_weight(spec, weight, gradient, slots, rate, applied)
        _check_update(name, weight, new_weight)
        if set(new_slots) != set(slots):
            raise ValueError(
                f"{name} returns the slots {sorted(new_slots)}, but must return {sorted(slots)}: "
                "those that `slots` declares"
            )
        for key, slot in slots.items():
            _check_update(f"{name}, slot {key!r},", slot, new_slots[key])

    for spec in list(kinds.values())[:_MOST_UPDATES]:
        try:
            foreign_variables.check_function(None, functools.partial(update, spec))
        except foreign_variables.ForeignVariableError as error:
            raise ValueError(
                f"{name} creates or reads a variable, or draws random numbers. An update must be a "
                "function of its arguments: declare what it keeps from step to step in `slots`"
            ) from error
    for one, attributes in zip((learner, optimizer, learner.schedule), before, strict=True):
        changed = [key for key, value in _attributes(one).items() if attributes.get(key) != value]
        if changed:
            raise ValueError(
                f"{type(one).__name__} changes its attribute {changed[0]!r} in an update, which is "
                "traced once and not run in every step, nor saved. Declare what it keeps from step "
                "to step in `slots`; the number of applied updates is an argument"
            )


def _check_update(name: str, before: tf.Tensor, after: Any) -> None:
    if not tf.is_tensor(after) or after.shape != before.shape:
        shape = list(after.shape) if tf.is_tensor(after) else type(after).__name__
        raise ValueError(f"{name} returns {shape}, but must return the shape {list(before.shape)}")


def _attributes(one: Any) -> dict[str, Any]:
    """Returns numbers, and the identities of other attributes and of what containers hold."""
    found: dict[str, Any] = {}
    for name, value in vars(one).items():
        if isinstance(value, (list, tuple)):
            found[name] = [id(item) for item in value]
        elif isinstance(value, Mapping):
            found[name] = {str(key): id(item) for key, item in value.items()}
        else:
            found[name] = value if isinstance(value, (bool, int, float, str)) else id(value)
    return found
