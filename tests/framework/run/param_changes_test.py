"""What a run that resumes says about its Params: changes, and settings that were not repeated."""

from __future__ import annotations

from typing import Any

from tekso.framework.experiment import EarlyStopping, Run, Tree
from tekso.framework.params import Configurable, param
from tekso.framework.run import param_changes


class One(Configurable):
    class Params(Configurable.Params):
        rate: float = param("A rate.", default=0.1)
        towers: int = param("Only here.", default=2)


class Other(Configurable):
    class Params(Configurable.Params):
        rate: float = param("A rate.", default=0.1)
        stages: int = param("Only here.", default=3)


def tree(execution: Any = None, **run: Any) -> Tree.Params:
    part = One.Params
    return Tree.Params(
        task=part(), input=part(), learner=part(), execution=execution or part(),
        run=Run.Params(**run),
    )  # fmt: skip


def test_another_class_is_one_line_and_common_fields_have_theirs() -> None:
    now = tree().set_text("execution", f"{__name__}:Other", origin="--execution")
    assert param_changes.lines(tree(), now) == ["execution : One -> Other  # --execution"]
    now.set_text("execution.rate", "0.5").set_text("run.steps", "7", origin="--steps")
    assert param_changes.lines(tree(), now) == [
        "execution : One -> Other  # --execution",
        "execution.rate : 0.1 -> 0.5  # --set",
        "run.steps : 1000 -> 7  # --steps",
    ]


def test_settings_that_a_command_did_not_repeat_are_found() -> None:
    registered = tree(eval_every_steps=500)
    patience = EarlyStopping.Params(patience=2)
    before = tree(eval_every_steps=20, early_stopping=patience, steps=60, seed=3)
    now = tree(eval_every_steps=500, steps=120)  # a new value; the seed is set back by a flag
    now.set_text("run.seed", "0", origin="--seed")
    found = ["run.eval_every_steps", "run.early_stopping.patience"]
    assert param_changes.reset(before, now, registered) == found
    assert param_changes.reset(before, before, registered) == []
