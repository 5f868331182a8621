"""Small weights and learners, and the update of a `Step` with them, without a task."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tekso.framework import initializers, optimizers, schedules
from tekso.framework.batch_sums import Sums
from tekso.framework.learner import Learner, LearnerBase
from tekso.framework.primitives.fusion import Fuse, no_fusion
from tekso.framework.state import State
from tekso.framework.step import Flat, Step
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
    on_mesh: bool = False,
) -> Update:
    """Returns the result of `Step.update`; weights that do not change keep their values."""
    task: Any = _Weights(specs)
    total = tf.convert_to_tensor(loss)
    new, metrics = Step(task, learner, seed=0).update(
        State(weights, slots), gradients, Sums(total, total, {}, {}, {}), step,
        fuse=fuse, on_mesh=on_mesh,
    )  # fmt: skip
    return Update({**weights, **new.weights}, new.slots, metrics)


ZEROS = initializers.Zeros.Params().instantiate()
Array = np.ndarray[Any, Any]


def make_spec(
    path: str, shape: tuple[int, ...], *, stacked: int = 0, dtype: str = "float32", **kwargs: Any
) -> WeightSpec:
    dims = ("layers",) * stacked + (None,) * (len(shape) - stacked)
    return WeightSpec(
        path, shape, dims, ZEROS, stacked=stacked, dtype=dtype, template=path, **kwargs
    )


SPECS = {
    spec.path: spec
    for spec in (
        make_spec("embedding/w", (7, 3)),
        make_spec("stack/w", (2, 3, 5), stacked=1),
        make_spec("stack/bias", (2, 5), stacked=1),
        make_spec("scale", ()),
        make_spec("norm/mean", (3,), trainable=False),
    )
}
TRAINABLE = [path for path, spec in SPECS.items() if spec.trainable]


def constant(value: float) -> schedules.Constant.Params:
    return schedules.Constant.Params(value=value)


def make_learner(
    optimizer: optimizers.Optimizer.Params | None = None, rate: float = 0.1, **fields: Any
) -> Learner:
    params = Learner.Params(
        optimizer=optimizer or optimizers.SGD.Params(), schedule=constant(rate), **fields
    )
    return params.instantiate()


def random_tensors(seed: int, specs: Mapping[str, WeightSpec] = SPECS) -> dict[str, tf.Tensor]:
    rng = np.random.default_rng(seed)
    return {p: tf.cast(rng.normal(size=s.shape), s.dtype) for p, s in specs.items()}


def initial_slots(
    learner: LearnerBase, specs: Mapping[str, WeightSpec] = SPECS
) -> dict[str, tf.Tensor]:
    return {p: tf.constant(s.initial_value(0)) for p, s in learner.slots(specs).items()}


def run(
    learner: LearnerBase,
    gradients: list[dict[str, tf.Tensor]],
    specs: Mapping[str, WeightSpec] = SPECS,
    weights: dict[str, tf.Tensor] | None = None,
    first_step: int = 0,
) -> list[Update]:
    weights = weights or random_tensors(0, specs)
    slots = initial_slots(learner, specs)
    updates = []
    for step, gradient in enumerate(gradients, start=first_step):
        made = updated(learner, specs, weights, gradient, slots, tf.constant(step, tf.int64))
        weights, slots = made.weights, made.slots
        updates.append(made)
    return updates


def assert_equal(given: Mapping[str, Any], expected: Mapping[str, Any], rtol: float = 0.0) -> None:
    assert given.keys() == expected.keys()
    for path in given:
        np.testing.assert_allclose(given[path], expected[path], rtol=rtol, err_msg=path)


def norm(tensors: Mapping[str, Any], paths: list[str]) -> float:
    return math.sqrt(sum(np.sum(np.float64(tensors[path]) ** 2) for path in paths))
