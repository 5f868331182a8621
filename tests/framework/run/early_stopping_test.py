"""Early stopping: the rule against a plain count, and where a run takes it from."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tekso.framework.experiment import EarlyStopping, Run, Tree
from tekso.framework.run.early_stopping import early_stopping_of
from tekso.framework.run.early_stopping_rule import EarlyStoppingRule
from tekso.framework.task import Goal
from tekso.models.mlp import Mlp
from tekso.tasks.classification.task import Classification


def reason(
    values: list[float | None], *, goal: Goal = "min", patience: int = 2, least: float = 0.0
) -> str:
    history = [(10 * n, value) for n, value in enumerate(values, start=1)]
    return EarlyStoppingRule("dev/loss", goal, patience, least).reason(history)


def test_ends_after_patience_evaluations_without_improvement() -> None:
    assert reason([]) == reason([3.0]) == reason([3.0, 3.5]) == reason([3.0, 3.5, 2.9]) == ""
    want = "none of the last 2 evaluations of dev/loss improved the best 3.0000 at step 10"
    assert reason([3.0, 3.5, 3.0]) == want
    assert reason([3.0, 3.5, 2.9, 3.0, 3.0]).endswith("improved the best 2.9000 at step 30")


def test_a_larger_value_is_better_if_the_goal_says_so() -> None:
    assert reason([1.0, 2.0, 3.0], goal="max") == ""
    assert reason([1.0, 2.0, 3.0], goal="min").endswith("improved the best 1.0000 at step 10")


def test_a_smaller_improvement_than_asked_for_is_none() -> None:
    assert reason([3.0, 2.95, 2.91], least=0.1).endswith("3.0000 at step 10 by more than 0.1")
    assert reason([3.0, 2.95, 2.85], least=0.1) == ""


def test_values_that_are_not_finite_are_no_improvement() -> None:
    assert reason([None, math.nan]) == (
        "none of the last 2 evaluations of dev/loss had a finite value"
    )
    assert reason([None, 5.0]) == ""
    assert reason([5.0, None, -math.inf]).endswith("5.0000 at step 10")


@given(
    st.lists(st.sampled_from([1.0, 1.5, 2.0, 2.5, None]), max_size=12),
    st.integers(1, 4),
    st.sampled_from(["min", "max"]),
)
def test_agrees_with_a_count_from_the_end(
    values: list[float | None], patience: int, goal: Literal["min", "max"]
) -> None:
    better = min if goal == "min" else max
    recent, before = values[-patience:], [v for v in values[:-patience] if v is not None]
    new = [v for v in recent if v is not None]
    improved = bool(new) and (not before or better([*new, better(before)]) != better(before))
    ends = len(values) >= patience and not improved
    assert bool(reason(values, goal=goal, patience=patience)) is ends


def tree(**changes: Any) -> Tree.Params:
    task = Classification.Params(model=Mlp.Params())
    early_stopping = EarlyStopping.Params(**{"patience": 3, **changes})
    run = Run.Params(early_stopping=early_stopping)
    return Tree.Params(task=task, run=run, eval_inputs={"dev": Mlp.Params()})


def test_an_experiment_defines_the_rule_by_its_params() -> None:
    found = early_stopping_of(tree(metric="accuracy", min_improvement=0.5))
    assert found == EarlyStoppingRule("dev/accuracy", "max", 3, 0.5)
    assert early_stopping_of(tree(patience=0)) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"metric": "recall"},
            r"metric \(.*\) is 'recall', .*early_stopping.goal=min if",
        ),
        ({"eval_input": "test"}, "run.early_stopping.eval_input is 'test', .* are: dev"),
    ],
)
def test_a_rule_that_cannot_be_followed_is_refused(changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        early_stopping_of(tree(**changes))


def test_a_run_without_evaluations_cannot_end_early() -> None:
    without = tree()
    without.eval_inputs = {}
    with pytest.raises(ValueError, match="the experiment has no eval_inputs"):
        early_stopping_of(without)
    run = Run.Params(early_stopping=EarlyStopping.Params(patience=3), eval_every_steps=0)
    with pytest.raises(ValueError, match=r"run.eval_every_steps is 0"):
        run.instantiate()
    with pytest.raises(ValueError, match=r"run.early_stopping.patience is -1, .* at least 0"):
        Run.Params(early_stopping=EarlyStopping.Params(patience=-1)).instantiate()
