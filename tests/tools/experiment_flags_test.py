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
    ("setting", "expected"),
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
        (
            "learner.schedule=0.1",
            r"given '0.1': write Constant.Params\(value=0.1\), or as settings …=Constant and "
            "….value=0.1$",
        ),
        ("learner.schedule=nan", "given 'nan': set a field of it"),
        ("learner.schedule=None", "given None, which this setting cannot be$"),
        ("learner.schedule=Constant(0.1)", "name only the class, …=Constant, and set its fields"),
        ("learner.schedule=Constant.Params(value=1)", "name only the class, …=Constant, and"),
    ],
)
def test_a_part_of_another_kind_is_an_error(setting: str, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        changed(setting)


@pytest.mark.parametrize("rate", [0.1, 3])
def test_a_number_as_a_schedule_is_answered_with_the_params_of_a_constant(rate: float) -> None:
    tree = Tiny().tree()
    with pytest.raises(TypeError, match=rf"\(write Constant.Params\(value={rate}\)\)$"):
        tree.learner.schedule = rate
    for other in (True, float("nan")):
        with pytest.raises(TypeError) as caught:
            tree.learner.schedule = other
        assert "write" not in str(caught.value)
    changed("learner.schedule=Constant", f"learner.schedule.value={rate}")


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
