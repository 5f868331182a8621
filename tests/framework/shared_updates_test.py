"""Learner: weights of one kind share a compiled update, and others have their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from learner_updates import (
    constant,
    initial_slots,
    make_learner,
    make_spec,
    random_tensors,
    updated,
)

from tekso.framework import optimizers
from tekso.framework.learner import Learner
from tekso.framework.primitives.fusion import SharedTraces
from tekso.framework.weight_spec import WeightSpec

TWINS = {
    spec.path: spec
    for spec in (
        make_spec("a", (3, 4)),
        make_spec("b", (3, 4)),
        make_spec("free/w", (3, 4)),
        make_spec("free/v", (3, 4)),
        make_spec("stacked", (3, 4), stacked=1),
        make_spec("wide", (3, 4), dtype="float64"),
        make_spec("flat", (12,)),
    )
}
EXCLUDED: dict[str, Any] = {"weight_decay": 0.3, "weight_decay_exclude": ["free/.*"]}
TRUSTED: dict[str, Any] = {"weight_decay": 0.3, "trust_exclude": ["free/.*"]}


class Recorded(SharedTraces):
    """Notes whose spec each weight is updated with; shares as XlaFusion does, uncompiled."""

    def __init__(self) -> None:
        super().__init__()
        self.used: list[str] = []

    def __call__(self, function: Any, **static: Any) -> Any:
        self.used.append(static["spec"].path)
        return super().__call__(function, **static)


@pytest.mark.parametrize(
    "optimizer",
    [
        optimizers.SGD.Params(**EXCLUDED),
        optimizers.Momentum.Params(**EXCLUDED),
        optimizers.Nesterov.Params(**EXCLUDED),
        optimizers.RMSProp.Params(**EXCLUDED),
        optimizers.Adagrad.Params(**EXCLUDED),
        optimizers.Adam.Params(**EXCLUDED),
        optimizers.AdamW.Params(**EXCLUDED),
        optimizers.Adafactor.Params(min_dim_to_factor=3, **EXCLUDED),
        optimizers.LARS.Params(**TRUSTED),
        optimizers.LARS.Params(**EXCLUDED),
        optimizers.LAMB.Params(**TRUSTED),
        optimizers.LAMB.Params(**EXCLUDED),
    ],
    ids=lambda params: params.owner.__name__,
)
def test_weights_of_one_kind_share_an_update_and_others_have_their_own(optimizer: Any) -> None:
    learner = make_learner(optimizer, ema_decay=0.5, clip_tensor_norm=2.0, clip_global_norm=3.0)
    step, fusion = tf.constant(3, tf.int64), Recorded()
    weights, gradients = random_tensors(0, TWINS), random_tensors(1, TWINS)
    slots = initial_slots(learner, TWINS)
    for _ in range(2):
        together = updated(learner, TWINS, weights, gradients, slots, step, fuse=fusion)
    assert fusion.used == ["a", "a", "free/w", "free/w", "stacked", "wide", "flat"] * 2
    assert len(fusion._made) == 5
    norms = {p: learner.squared_norm(spec, gradients[p]) for p, spec in TWINS.items()}
    factor = learner.global_factor(tf.add_n([tf.cast(n, tf.float32) for _, n in norms.values()]))
    assert factor is not None and factor < 1
    for path, spec in TWINS.items():
        own = {name: slots[made.path] for name, made in learner.slots_of(spec).items()}
        gradient = learner.clipped(spec, gradients[path], factor)
        weight, new = learner.update_weight(
            spec, weights[path], gradient, own, learner.schedule(step), tf.constant(0, tf.int64)
        )
        np.testing.assert_allclose(together.weights[path], weight, rtol=1e-5, err_msg=path)
        for name, slot in new.items():
            found = together.slots[f"{path}/{name}"]
            np.testing.assert_allclose(found, slot, rtol=1e-5, atol=1e-7, err_msg=path)


class Doubling:
    """Mixed into an optimizer: the update of one path is twice as large."""

    def decrement(self, spec: WeightSpec, *args: Any) -> Any:
        decrement, slots = super().decrement(spec, *args)  # type: ignore[misc]
        return decrement * (2.0 if spec.path == "b" else 1.0), slots


class Mixed(Doubling, optimizers.Momentum):
    """A mixin before one of Tekso's."""


class Below(Mixed):
    """Says nothing itself."""


class OwnKind(Mixed):
    """Says what its update reads."""

    def kind(self, spec: WeightSpec) -> Any:
        return spec.path == "b"


class Renamed(optimizers.Momentum):
    """Changes nothing."""


class OwnLearner(Learner):
    """Reads the path in a helper."""

    def _squares(self, spec: WeightSpec, gradient: tf.Tensor) -> tf.Tensor:
        return super()._squares(spec, gradient) * (4.0 if spec.path == "b" else 1.0)


@pytest.mark.parametrize(
    ("learner", "used"),
    [
        (make_learner(Mixed.Params()), "a b"),
        (make_learner(Below.Params()), "a b"),
        (make_learner(OwnKind.Params()), "a b"),
        (make_learner(Renamed.Params()), "a a"),
        (
            OwnLearner.Params(
                optimizer=optimizers.SGD.Params(), schedule=constant(0.1), clip_tensor_norm=0.5
            ).instantiate(),
            "a b",
        ),
    ],
    ids=["mixed", "below", "own_kind", "renamed", "own_learner"],
)
def test_an_update_of_a_users_own_is_shared_only_if_it_says_so(learner: Learner, used: str) -> None:
    specs = {path: TWINS[path] for path in ("a", "b")}
    weights, fusion = {path: tf.zeros([3, 4]) for path in specs}, Recorded()
    ones = {path: tf.ones([3, 4]) for path in specs}
    slots, step = initial_slots(learner, specs), tf.constant(0, tf.int64)
    new = updated(learner, specs, weights, ones, slots, step, fuse=fusion).weights
    assert fusion.used == used.split()
    ratio = {"a a": 1.0}.get(used, 0.5 if isinstance(learner, OwnLearner) else 2.0)
    np.testing.assert_allclose(new["b"], ratio * new["a"], rtol=1e-5)
