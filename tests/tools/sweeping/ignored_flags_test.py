"""Flags of a sweep that set the same fields."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tekso.framework.experiment import Run, Tree
from tekso.framework.params import Configurable, param
from tekso.tools.command_errors import UsageError
from tekso.tools.sweeping import ignored_flags


class Part(Configurable):
    class Params(Configurable.Params):
        rate: float = param("A rate.", default=0.1)
        scale: float = param("Another field.", default=1.0)


@pytest.mark.parametrize(
    ("settings", "varied", "ignored"),
    [
        (["*.rate=1"], ["task.rate"], ""),  # that of the input stays 1
        (["*.rate=1", "task.rate=2"], ["*.scale"], ""),
        (["task.*=1"], ["task.rate"], ""),
        (["task.rate=1"], ["*.rate"], "--set task.rate=1 and --sweep *.rate"),
        (["task.ra*=1"], ["task.rate"], "--set task.ra*=1 and --sweep task.rate"),
        (["task.rate=1", "*.rate=2"], [], "--set task.rate=1 and --set *.rate=2"),
        (["task.gone=1"], ["task.gone"], "--set task.gone=1 and --sweep task.gone"),
        (["*.steps=1"], [], "--set *.steps=1 and --steps=7"),
    ],
)
def test_a_flag_whose_fields_are_all_set_again_is_refused(
    settings: Sequence[str], varied: Sequence[str], ignored: str
) -> None:
    tree = Tree.Params(task=Part.Params(), input=Part.Params(), run=Run.Params())
    if not ignored:
        ignored_flags.check(tree, varied, settings=settings, steps=7)
        return
    with pytest.raises(UsageError) as caught:
        ignored_flags.check(tree, varied, settings=settings, steps=7)
    assert str(caught.value) == f"{ignored} set the same field: leave out one of them"
