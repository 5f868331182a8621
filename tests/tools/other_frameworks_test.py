"""Options of other frameworks: what the hints name exists here."""

from __future__ import annotations

import re

import pytest

from tekso.params.lm import python_source
from tekso.tools import experiment_flags, other_frameworks, trainer_flags
from tekso.tools.command_errors import UsageError


@pytest.mark.parametrize("name", ["epochs", "Max-Epochs", "gpus", "fp16", "resume", "config"])
def test_an_option_of_another_framework_has_a_hint(name: str) -> None:
    assert other_frameworks.hint(name)


def test_a_name_that_is_not_known_has_none() -> None:
    assert other_frameworks.hint("hidden_dim") == other_frameworks.hint("") == ""


def test_the_flags_and_settings_in_the_hints_exist() -> None:
    hints = " ".join(other_frameworks._HINTS)
    flags, settings = re.findall(r"--(\w+)", hints), re.findall(r"--set ([\w.]+)=", hints)
    assert set(flags) >= {"steps", "logdir", "set"} and len(settings) == 4
    assert [flag for flag in flags if flag not in trainer_flags.FLAGS] == []
    tree = python_source.Tiny().tree()
    assert [setting for setting in settings if setting not in tree] == []


@pytest.mark.parametrize(
    ("name", "execution"),
    [
        ("DDP", "data_parallel"),
        ("fsdp", "mesh_sharded"),
        ("tensor-parallel", "mesh_sharded"),
        ("gpipe", "pipelined"),
    ],
)
def test_an_execution_of_another_framework_has_a_hint(name: str, execution: str) -> None:
    assert f"--execution={execution}" in other_frameworks.execution_hint(name)
    with pytest.raises(UsageError, match=rf"--execution={name}: .*; .*--execution={execution}"):
        experiment_flags.change(python_source.Tiny().tree(), execution=name, settings=[])


def test_the_executions_and_settings_in_the_hints_exist() -> None:
    for hint in other_frameworks._EXECUTIONS:
        [execution] = re.findall(r"--execution=(\w+)", hint)
        settings = re.findall(r"--set '?(execution\.[^' ]+)", hint)
        assert len(settings) == hint.count("--set")
        tree = python_source.Tiny().tree()
        experiment_flags.change(tree, execution=execution, settings=settings)


def test_a_misspelt_execution_is_answered_with_a_similar_name() -> None:
    assert other_frameworks.execution_hint("mesh") == ""
    with pytest.raises(UsageError, match=r"is unknown; did you mean mesh_sharded\? there"):
        experiment_flags.change(python_source.Tiny().tree(), execution="mesh-shard", settings=[])
