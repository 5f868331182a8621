"""Optimizers and schedules that are no functions of their arguments are errors before a step."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from tekso.framework.initializers import Zeros
from tekso.framework.layer import Layer
from tekso.framework.learner import Learner
from tekso.framework.optimizers.adafactor import Adafactor
from tekso.framework.optimizers.adam import Adam
from tekso.framework.optimizers.optimizer import Optimizer, slot
from tekso.framework.params import param
from tekso.framework.run import update_check
from tekso.framework.schedules import Constant


class Weights(Layer):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.weight("w", [2, 3], dims=("embed", "mlp"), init=Zeros.Params())
        self.weight("b", [3], dims=("mlp",), init=Zeros.Params())


class Wrong(Optimizer):
    """Momentum, with a mistake."""

    class Params(Optimizer.Params):
        """Params of Wrong."""

        way: str = param("Which mistake.", default="none")

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.calls = 0
        self.kept: dict[str, tf.Tensor] = {}

    def slots(self, spec: Any) -> dict[str, Any]:
        return {"m": slot(spec, "m")}

    def update(self, spec: Any, weight: Any, gradient: Any, slots: Any, *rest: Any) -> Any:
        way, m = self.params.way, 0.9 * slots["m"] + gradient
        if way == "counter":
            self.calls += 1
        if way == "dict":
            self.kept[spec.path] = m
        if way == "variable":
            m += VARIABLE
        if way == "noise":
            m += tf.random.normal(m.shape)
        if way == "scalar":
            return tf.reduce_sum(weight), {"m": m}
        if way == "slot of another shape":
            return weight - m, {"m": tf.reduce_sum(m)}
        return weight - 0.1 * m, {} if way == "no slot" else {"m": m}


class Counting(Constant):
    """A schedule that counts its calls."""

    calls = 0

    def __call__(self, step: Any) -> Any:
        self.calls += 1
        return super().__call__(step)


VARIABLE = tf.Variable(1.0)


def check(optimizer: Any, schedule: Any = None) -> None:
    schedule = schedule or Constant.Params(value=0.1)
    learner = Learner.Params(optimizer=optimizer, schedule=schedule, ema_decay=0.9).instantiate()
    update_check.check(learner, Weights.Params().instantiate().specs())


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("counter", r"^Wrong changes its attribute 'calls' in an update"),
        ("dict", r"^Wrong changes its attribute 'kept' in an update"),
        ("variable", r"^Wrong.update \(.*update_check_test.py:\d+\) creates or reads a variable"),
        ("noise", r"^Wrong.update .* draws random numbers. .* in `slots`"),
        ("scalar", r"^Wrong.update .* returns \[\], but must return the shape \["),
        ("slot of another shape", r"^Wrong.update .*, slot 'm', returns \[\], but must return"),
        (
            "no slot",
            r"^Wrong.update .* returns the slots \['ema'\], but must return \['ema', 'm'\]",
        ),
    ],
)
def test_an_update_that_is_no_function_of_its_arguments_is_refused(way: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check(Wrong.Params(way=way))


def test_a_schedule_that_counts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^Counting changes its attribute 'calls'"):
        check(Adam.Params(), Counting.Params(value=0.1))


@pytest.mark.parametrize("optimizer", [Wrong, Adam, Adafactor])
def test_others_pass(optimizer: Any) -> None:
    check(optimizer.Params())
