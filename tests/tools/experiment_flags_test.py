"""--set and --execution change a tree: parts of an experiment, and where the values come from."""

from __future__ import annotations

from typing import Any

import pytest

from tekso.framework import execution
from tekso.framework.learner import Learner
from tekso.framework.params import references
from tekso.params.lm.python_source import Tiny
from tekso.params.mt.text_files import Base
from tekso.tools import experiment_flags
from tekso.tools.command_errors import UsageError


def changed(*settings: str, execution: str | None = None) -> Any:
    tree = Tiny().tree()
    experiment_flags.change(tree, execution=execution, settings=settings)
    return tree


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("learner=SGD", "must be LearnerBase.Params, .*; did you mean learner.optimizer=SGD"),
        ("execution=Adam", "execution: must be Execution.Params"),
        ("input=Linear", "input: must be Input.Params, given 'Linear'"),
        ("eval_inputs.dev=Adam", "eval_inputs.dev: must be Input.Params"),
        ("*.dropuot=0.1", "did you mean task.model.dropout_rate"),
        ("run.early_stopping=3", "given '3': set a field of it, such as patience"),
        ("learning_rate=0.1", "the learning rate is set by learner.schedule.[a-z_]*"),
        ("task.decode.prompts=[hello, you]", """'…=\\["hello", "you"\\]'"""),
        ("learner=tekso.framework.optimizers.adam:Adam", "must be LearnerBase.Params"),
        ("learner.optimizer=Sgd", "did you mean SGD"),
        ("learner.optimizer=adamw", "did you mean AdamW"),
        ("learner.optimizer=Nestrov", "did you mean Nesterov"),
        ("learner.schedule=cosine", "did you mean Cosine"),
    ],
)
def test_a_part_of_another_kind_is_an_error(setting: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        changed(setting)


def test_a_part_is_replaced_by_its_name_or_reference() -> None:
    tree = changed(
        "learner=Learner", "execution=tekso.framework.execution.mesh_sharded:MeshSharded"
    )
    assert type(tree.learner) is Learner.Params
    assert type(tree.execution) is execution.MeshSharded.Params
    assert tree.origin("learner") == "--set"
    assert changed(execution="mesh_sharded").origin("execution") == "--execution"


def test_a_class_of_tekso_needs_no_module_even_if_it_is_not_imported() -> None:
    assert references.own_classes()["Tsv"] == ["tekso.tasks.mt.pair_files:Tsv"]
    assert "Nothing" not in references.own_classes()
    tree = Base().tree()
    experiment_flags.change(tree, execution=None, settings=["input.corpus=Tsv"])
    assert type(tree.input.corpus).owner.__name__ == "Tsv"
