"""Tests of the line that says whether a resumed run continues to the last bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import tensorflow as tf

from tekso.framework import cpu_features, registry
from tekso.framework.execution.parameter_servers import Hybrid
from tekso.framework.run import reproducibility
from tekso.framework.run.checkpoints import Description

TREE = registry.get("lm.python_source.Tiny")().tree().set({"run.deterministic": True})
BEFORE = Description(
    step=4,
    model="lm.python_source.Tiny",
    params=TREE.to_text(),
    conditions=reproducibility.conditions(),
    versions={"tensorflow": tf.__version__},
)
SAME = "the results equal those of an uninterrupted run to the last bit"
ROUNDING = "the results equal those of an uninterrupted run up to rounding: "


def line(settings: dict[str, Any] | None = None, **conditions: Any) -> str:
    now = dataclasses.replace(BEFORE, conditions={**BEFORE.conditions, **conditions})
    return reproducibility.line(BEFORE, now, TREE.copy().set(settings or {}))


def test_the_same_conditions_give_the_same_bits() -> None:
    assert line() == SAME
    assert {type(value) for value in BEFORE.conditions.values()} == {str, int}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("devices", "3 CPU"),
        ("processes", 2),
        ("processor", "another one"),
        ("cores", 1000),
        ("products", "another library"),
    ],
)
def test_what_changes_the_order_of_sums_is_named(name: str, value: Any) -> None:
    change = f"{name} {BEFORE.conditions[name]} -> {value}"
    assert line(**{name: value}) == ROUNDING + change


def test_another_execution_is_a_reason_and_other_params_end_the_comparison() -> None:
    assert line({"execution.xla": "none"}) == ROUNDING + "changed Params of the execution"
    assert line({"learner.schedule.initial_value": 0.5}) == ""
    assert line({"learner.schedule.initial_value": 0.5}, cores=1000) == ""
    devices = BEFORE.conditions["devices"]
    assert line({"run.steps": 7}, devices="3 CPU", processes=2) == (
        f"changed since the checkpoint: devices {devices} -> 3 CPU; processes 1 -> 2"
    )


def test_another_tensorflow_and_nothing_known() -> None:
    old = dataclasses.replace(BEFORE, versions={"tensorflow": "2.0.0"})
    expected = f"{ROUNDING}TensorFlow 2.0.0 -> {tf.__version__}"
    assert reproducibility.line(old, BEFORE, TREE) == expected
    unknown = dataclasses.replace(BEFORE, conditions={})
    assert reproducibility.line(unknown, BEFORE, TREE) == ""


@pytest.mark.parametrize("number", [0, 1])
def test_what_computes_large_products_depends_on_the_threads_of_an_op(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_features, "has_only_avx2", lambda: True)
    threads = tf.config.threading
    monkeypatch.setattr(threads, "get_intra_op_parallelism_threads", lambda: number)
    now = dataclasses.replace(BEFORE, conditions=reproducibility.conditions())
    assert now.conditions["products"] == ("XLA" if number == 1 else "TensorFlow")
    earlier = {k: v for k, v in now.conditions.items() if k not in ("cores", "products")}
    before = dataclasses.replace(BEFORE, conditions=earlier)  # of an earlier version
    expected = f"{ROUNDING}products TensorFlow -> XLA" if number == 1 else SAME
    assert reproducibility.line(before, now, TREE) == expected


@pytest.mark.parametrize(
    ("num_groups", "expected"), [(1, SAME), (2, "the results depend on timing")]
)
def test_workers_that_do_not_wait_for_each_other_repeat_nothing(
    num_groups: int, expected: str
) -> None:
    tree = TREE.copy()
    tree.execution.updates = Hybrid.Params(
        workers=["a:1", "b:1"], parameter_servers=["c:1"], num_groups=num_groups
    )
    before = dataclasses.replace(BEFORE, params=tree.to_text())
    assert reproducibility.line(before, BEFORE, tree).startswith(expected)


def test_without_deterministic_ops_the_line_says_how_to_get_them() -> None:
    tree = TREE.copy().set({"run.deterministic": False})
    before = dataclasses.replace(BEFORE, params=tree.to_text())
    assert "with --deterministic, to the last bit" in reproducibility.line(before, BEFORE, tree)
