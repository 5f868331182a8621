"""The metric of a rule, and whether larger values are better: declared by the task, or set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tekso.framework.experiment import KeepBest, Run, Tree
from tekso.framework.input.held_out import HeldOut
from tekso.framework.run.checkpoint_description import Description
from tekso.framework.run.checkpoints import Checkpoints
from tekso.framework.run.job import checkpoints_of
from tekso.framework.run.logdir import Logdir
from tekso.framework.run.metric_choice import (
    deciding_metrics,
    declared_metrics,
    goal_of,
    goal_of_best,
)
from tekso.framework.task import Task
from tekso.models.mlp import Mlp
from tekso.models.transformer_lm import TransformerLm
from tekso.tasks.classification.task import Classification
from tekso.tasks.lm.task import LanguageModel

HERE = r"\S*metric_choice_test\.py:\d+"


class Mine(Classification):
    """Says it of a metric more."""

    goals = {"f1": "max", "error": "min"}  # noqa: RUF012


class Graphs(Classification):
    """Declares a metric of two words."""

    goals = {"triangle_r2": "max"}  # noqa: RUF012


def goal(task: Any, metric: str, **changes: Any) -> str:
    run = Run.Params(keep_best=KeepBest.Params(metric=metric, **changes))
    return goal_of(Tree.Params(task=task, run=run), "keep_best")


@pytest.mark.parametrize(
    ("metric", "want"),
    [
        ("loss", "min"),
        ("accuracy", "max"),
        ("f1", "max"),
        ("f1/de", "max"),
        ("error", "min"),
    ],
)
def test_the_task_says_which_end_of_its_metrics_is_good(metric: str, want: str) -> None:
    assert goal(Mine.Params(), metric) == want


def test_the_metrics_of_both_rules_decide() -> None:
    tree = Tree.Params(
        task=Mine.Params(),
        eval_inputs={"dev": HeldOut.Params(), "test": HeldOut.Params(split="test")},
    )
    assert deciding_metrics(tree) == {"dev/loss"}
    tree.run.early_stopping.set(patience=3, metric="f1/de", eval_input="test")
    assert deciding_metrics(tree) == {"dev/loss", "test/f1/de"}
    tree.run.keep_best.count = 0
    assert deciding_metrics(tree) == {"test/f1/de"}
    tree.run.early_stopping.patience = 0
    assert deciding_metrics(tree) == set()
    tree.run.keep_best.count = 1
    tree.eval_inputs = {}
    assert deciding_metrics(tree) == set()


def test_bits_per_byte_are_good_when_small() -> None:
    assert goal(LanguageModel.Params(model=TransformerLm.Params()), "bits_per_byte") == "min"


def test_checkpoints_store_the_goal_of_the_best_one_if_it_is_known() -> None:
    tree = Tree.Params(task=Mine.Params(), eval_inputs={"dev": HeldOut.Params()})
    assert goal_of_best(tree) == "min"
    tree.run.keep_best.metric = "accuracy"
    assert goal_of_best(tree) == "max"
    tree.run.keep_best.metric = "nobody_declares_it"
    assert goal_of_best(tree) == ""
    tree.run.keep_best.set(metric="accuracy", count=0)
    assert goal_of_best(tree) == ""


def test_what_is_set_decides() -> None:
    assert goal(Mine.Params(), "accuracy", goal="min") == "min"
    assert goal(Mine.Params(), "unheard_of", goal="max") == "max"


def test_a_metric_that_differs_in_a_number_is_suggested() -> None:
    class Fit(Mine):
        goals = {"r2": "max", "top5": "max"}  # noqa: RUF012

    for metric, meant in (("r3", "r2"), ("top1", "top5")):
        with pytest.raises(ValueError, match=rf"did you mean {meant}\?"):
            goal(Fit.Params(), metric)


def test_a_metric_of_which_nothing_is_known_is_refused_with_the_setting() -> None:
    known = (
        r"in Mine, with goals = \{'recall': …\}, .*; the declared ones are accuracy \(max\), "
        r"error \(min\)"
    )
    with pytest.raises(
        ValueError, match=rf"^run.keep_best.metric \({HERE}\) is 'recall', .*{known}"
    ) as error:
        goal(Mine.Params(), "recall")
    assert "--set run.keep_best.goal=min if smaller values are better, as of an" in str(error.value)
    with pytest.raises(ValueError, match=r"the declared ones are loss \(min\)$"):
        goal(Mlp.Params(), "recall")


@pytest.mark.parametrize(
    ("metric", "close"),
    [("acuracy", "accuracy"), ("val_accuracy", "accuracy"), ("val_loss", "loss")],
)
def test_a_misspelt_metric_is_refused_with_the_nearest_one(metric: str, close: str) -> None:
    with pytest.raises(ValueError, match=rf"is '{metric}', .* did you mean {close}\? Otherwise --"):
        goal(Mine.Params(), metric)


def test_a_metric_that_is_a_part_of_a_declared_name_is_refused_with_that_name() -> None:
    for metric, close in {"r2": "triangle_r2", "triangle": "triangle_r2"}.items():
        with pytest.raises(ValueError, match=rf"is '{metric}', .* did you mean {close}\?"):
            goal(Graphs.Params(), metric)


@pytest.mark.parametrize("count", [0, 1])
def test_a_best_checkpoint_is_known_if_the_rule_keeps_one(count: int, tmp_path: Path) -> None:
    for step, accuracy in ((1, 0.9), (2, 0.5)):
        folder = tmp_path / "checkpoints" / f"step_{step:08d}"
        folder.mkdir(parents=True)
        about = Description(step, "m", params="", metrics={"dev/accuracy": accuracy})
        (folder / "checkpoint.json").write_text(about.to_json())
    run = Run.Params(keep_best=KeepBest.Params(metric="accuracy", count=count))
    tree = Tree.Params(task=Mine.Params(), run=run, eval_inputs={"dev": HeldOut.Params()})
    found = checkpoints_of(Checkpoints, tree, Logdir(str(tmp_path)), warn=print)
    found.prepare()
    assert found.best_step() == (1 if count else None)
    found.close()


def test_the_metrics_of_the_goals_are_declared() -> None:
    tree = Tree.Params(task=Mine.Params())
    assert declared_metrics(tree) == {"f1", "error", *Classification.goals}
    assert declared_metrics(Tree.Params(task=Mlp.Params())) == set()


@pytest.mark.parametrize("goals", [["f1"], {"f1": "higher"}, {"f1": ["max"]}])
def test_goals_of_another_form_are_rejected_where_the_class_is_defined(goals: Any) -> None:
    with pytest.raises(TypeError, match=r"^Own.goals must be .metric: .*, given .*f1") as caught:
        type("Own", (Task,), {"goals": goals})
    assert str(caught.value).endswith(f"given {goals!r}")
