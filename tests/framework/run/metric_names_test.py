"""A misspelt metric of early stopping or of the best checkpoint ends a run before step 1."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from tekso.framework.execution.base import signature_of
from tekso.framework.experiment import EarlyStopping, KeepBest, Run, Tree
from tekso.framework.run import metric_names
from tekso.framework.task import Scored
from tekso.models.mlp import Mlp
from tekso.tasks.classification.task import Classification


class Counting(Classification):
    """Adds figures in `summarize`."""

    def summarize(self, sums: Any) -> dict[str, float]:
        return {**super().summarize(sums), "recall": 1.0}


class Decoding(Counting):
    """Adds figures that are known only after decoding."""

    goals = {"bleu": "max"}  # noqa: RUF012

    def score(self, program: Any, input: Any, *, is_last: bool, stopped: Any = None) -> Scored:
        raise AssertionError("not before the first step")


class Ratio(Classification):
    """Reports a figure that is no mean, by a division."""

    def summarize(self, sums: Any) -> dict[str, float]:
        figures = super().summarize(sums)
        return {**figures, "r2": 1 - figures["loss"] / (figures["loss"] - figures["accuracy"] ** 2)}


class Guarded(Ratio):
    """As `Ratio`, but without the figure if it is not defined."""

    def summarize(self, sums: Any) -> dict[str, float]:
        return {} if sums["accuracy"][0] == 1.0 else super().summarize(sums)


class Undefined(Classification):
    """Reports nothing for sums that no data has."""

    def summarize(self, sums: Any) -> dict[str, float]:
        raise ZeroDivisionError


class Images:
    num_batches = 3

    def batch(self, step: int) -> dict[str, np.ndarray]:
        return {
            "x": np.zeros([2, 3], np.float32),
            "labels": np.zeros([2], np.int32),
            "weights": np.ones([2], np.float32),
        }


def check(cls: Any, metric: str, *, rule: str = "early_stopping", **changes: Any) -> None:
    task = cls.Params(num_classes=2, model=Mlp.Params(input_dim=3, output_dim=2, hidden_dims=[4]))
    chosen: Any = (EarlyStopping if rule == "early_stopping" else KeepBest).Params(
        metric=metric, goal="max"
    )
    chosen.set({"patience": 2, **changes} if rule == "early_stopping" else changes)
    run = Run.Params().set(**{rule: chosen})
    tree = Tree.Params(task=task, run=run, eval_inputs={"dev": Mlp.Params()})
    inputs: Any = {"dev": Images()}
    metric_names.check(tree, task.instantiate(), inputs)


@pytest.mark.parametrize("metric", ["loss", "accuracy", "recall"])
def test_metrics_that_evaluations_report_are_accepted(metric: str) -> None:
    check(Counting, metric)
    check(Counting, metric, rule="keep_best")


@pytest.mark.parametrize("cls", [Ratio, Guarded, Undefined])
def test_summaries_that_divide_do_not_fail_for_invented_sums(cls: Any) -> None:
    check(cls, "r2")
    if cls is not Undefined:  # of which no names are known
        with pytest.raises(ValueError, match=r"'rr2', but .*reports .*r2; did you mean r2\?"):
            check(cls, "rr2")


@pytest.mark.parametrize("rule", ["early_stopping", "keep_best"])
def test_a_misspelt_metric_is_an_error_that_names_those_there_are(rule: str) -> None:
    said = (
        rf"run.{rule}.metric \(\S*metric_names_test.py:\d+\) is 'recal', but an evaluation of "
        "eval_inputs.dev reports accuracy, "
    )
    with pytest.raises(ValueError, match=said + r".*loss.*recall.*; did you mean recall\?"):
        check(Counting, "recal", rule=rule)
    with pytest.raises(ValueError, match=r"\) is 'f1', but .* reports accuracy, "):
        check(Counting, "f1", rule=rule)


def test_figures_of_decoding_are_known_if_the_task_declares_them() -> None:
    check(Decoding, "bleu/de")
    check(Decoding, "exact_match")  # perhaps: the first evaluation shows
    with pytest.raises(ValueError, match=r"and with decoding .*bleu; did you mean bleu\?"):
        check(Decoding, "bleuu")


def test_figures_of_decoding_can_be_rejected_unless_the_task_declares_them() -> None:
    model = Mlp.Params(input_dim=3, output_dim=2, hidden_dims=[4])
    batch = signature_of(Images().batch(0))

    def why(cls: Any, metric: str) -> str:
        task = cls.Params(num_classes=2, model=model).instantiate()
        return metric_names.unreported(task, metric, batch, undeclared="rejected")

    assert why(Decoding, "bleu/de") == why(Decoding, "recall") == ""
    assert re.match(
        r"reports accuracy, loss, .*recall, and with decoding bleu; if score\(\) of Decoding "
        r"reports 'exact_match', declare it in its goals$",
        why(Decoding, "exact_match"),
    )
    assert why(Decoding, "bleuu").endswith("; did you mean bleu?")
    assert "decoding" not in why(Counting, "exact_match")


def test_no_rule_needs_no_metric() -> None:
    check(Counting, "unheard_of", patience=0)
    check(Counting, "unheard_of", rule="keep_best", count=0)
