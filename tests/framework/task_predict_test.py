"""Predictions of a task that is used without a Session."""

from __future__ import annotations

from typing import Any

import pytest

from tekso.framework.context import StepContext
from tekso.framework.task import Task

CTX = StepContext(mode="eval")


class Sum(Task):
    """Adds two arrays."""

    def predict(self, theta: Any, batch: Any, ctx: Any) -> Any:
        """See Task."""
        return {"sum": batch["x"] + batch["city"]}


class Doubled(Sum):
    """Adds a key error of its own."""

    def predict(self, theta: Any, batch: Any, ctx: Any) -> Any:
        """See Task."""
        found = super().predict(theta, batch, ctx)
        return {"doubled": 2 * found["total"]}


def test_an_array_that_is_missing_is_named_beside_those_that_are_given() -> None:
    for kind in (Sum, Doubled):
        with pytest.raises(KeyError) as caught:
            kind.Params().instantiate().predict(None, {"x": 1}, CTX)
        assert str(caught.value) == (
            "Sum.predict reads the array 'city', which is not given; given: 'x'"
        )
        assert caught.value.args == ("city",)


def test_another_key_error_of_predict_is_unchanged() -> None:
    with pytest.raises(KeyError, match=r"^'total'$"):
        Doubled.Params().instantiate().predict(None, {"x": 1, "city": 2, "total": 3}, CTX)


def test_a_task_without_a_loss_weight_is_told_what_it_returns() -> None:
    task = Task.Params().instantiate()
    with pytest.raises(NotImplementedError, match=r"Task has no loss_weight\(\): define loss_w"):
        task.loss_weight({})
