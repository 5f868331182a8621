"""The rules of a run, read from the text of its Params."""

from __future__ import annotations

from typing import Any

import pytest

from tekso.framework.experiment import EarlyStopping, KeepBest, Run, Tree
from tekso.framework.input.input import Input
from tekso.framework.run.stored_rules import StoredRule, stored_rule, texts


@pytest.mark.parametrize(
    ("early", "best_goal", "expected"),
    [
        ({}, "", StoredRule("dev", "loss", "min")),
        ({}, "max", StoredRule("dev", "loss", "min")),  # the goal of the accuracy
        ({"metric": "bleu"}, "max", StoredRule("dev", "bleu", None)),
        ({"metric": "bleu", "goal": "max"}, "min", StoredRule("dev", "bleu", "max")),
        ({"metric": "accuracy"}, "max", StoredRule("dev", "accuracy", "max")),
        ({"metric": "accuracy"}, "", StoredRule("dev", "accuracy", None)),
        ({"eval_input": "test"}, "", StoredRule("test", "loss", "min")),
    ],
)
def test_the_metric_and_the_goal_of_a_rule_are_those_of_the_run(
    early: dict[str, Any], best_goal: str, expected: StoredRule
) -> None:
    run = Run.Params(
        early_stopping=EarlyStopping.Params(**early), keep_best=KeepBest.Params(metric="accuracy")
    )
    tree = Tree.Params(eval_inputs={"dev": Input.Params(), "test": Input.Params()}, run=run)
    for text in (tree.to_text(), tree.to_text(origins=True)):
        assert stored_rule(texts(text), "early_stopping", best_goal=best_goal) == expected


def test_a_run_without_evaluations_and_a_damaged_text_have_the_defaults() -> None:
    assert stored_rule({}, "keep_best", best_goal="") == StoredRule("", "loss", "min")
    damaged = {"run.keep_best.metric": '"bleu', "eval_inputs": "{"}
    assert stored_rule(damaged, "keep_best", best_goal="max") == StoredRule("", "loss", "max")
