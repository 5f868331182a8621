"""The update of a `Step` with a learner and weights, without a task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from tekso.framework.learner import LearnerBase
from tekso.framework.primitives.fusion import Fuse, no_fusion
from tekso.framework.state import State
from tekso.framework.step import Flat, Step, Sums
from tekso.framework.weight_spec import WeightSpec


class Update(NamedTuple):
    """All weights and slots after a step, and the metrics of the learner."""

    weights: Flat
    slots: Flat
    metrics: Flat


class _Weights:
    """A task that has only weights."""

    gradients = None
    losses = ()

    def __init__(self, specs: Mapping[str, WeightSpec]) -> None:
        self._specs = specs

    def specs(self) -> dict[str, WeightSpec]:
        return dict(self._specs)

    def new_statistics(self, *_: Any) -> Flat:
        return {}


def updated(
    learner: LearnerBase,
    specs: Mapping[str, WeightSpec],
    weights: Flat,
    gradients: Flat,
    slots: Flat,
    step: tf.Tensor,
    *,
    loss: Any = 0.0,
    fuse: Fuse = no_fusion,
) -> Update:
    """Returns the result of `Step.update`; weights that do not change keep their values."""
    task: Any = _Weights(specs)
    total = tf.convert_to_tensor(loss)
    new, metrics = Step(task, learner, seed=0).update(
        State(weights, slots), gradients, Sums(total, total, {}, {}, {}), step, fuse=fuse
    )
    return Update({**weights, **new.weights}, new.slots, metrics)
