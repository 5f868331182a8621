"""Options of other frameworks: what the hints name exists here."""

from __future__ import annotations

import re

import pytest

from tekso.params.lm import python_source
from tekso.tools import other_frameworks, trainer_flags


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
