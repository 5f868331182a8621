"""The program that compares golden losses finds every kind of difference."""

from __future__ import annotations

import copy
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from tekso.framework import execution

FILE = Path(__file__).with_name("golden_losses.py")
BEFORE: dict[str, Any] = {
    "steps": [{"loss": (2.0).hex()}, {"loss": (1.5).hex()}],
    "evaluation": {"loss": [(3.0).hex(), (2.0).hex()]},
    "state": "ab",
}


@pytest.fixture
def golden(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("PYTHONPATH", "TF_CPP_MIN_LOG_LEVEL"):  # the program sets them for its processes
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("golden_losses", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_kind_of_difference_is_found(golden: Any) -> None:
    def changed(**values: Any) -> str:
        return str(golden.difference(BEFORE, {**copy.deepcopy(BEFORE), **values}))

    assert changed() == ""
    last = [BEFORE["steps"][0], {"loss": (1.5 + 2**-52).hex()}]  # the last bit
    assert changed(steps=last) == "step 1, loss: 1.5 != 1.5000000000000002"
    assert "step 0, norm: missing != 1.0" in changed(
        steps=[{**BEFORE["steps"][0], "norm": (1.0).hex()}, BEFORE["steps"][1]]
    )
    assert changed(evaluation={"loss": [(3.0).hex(), (1.0).hex()]}).startswith("evaluation: ")
    assert changed(state="ac") == "state: ab != ac"
    refused = {"refused": "no such mesh"}
    assert golden.difference(BEFORE, refused) == "was: it trains\n    now: no such mesh"
    assert golden.difference(refused, BEFORE) == "was: no such mesh\n    now: it trains"
    assert golden.difference(refused, {"refused": "another"}) and not golden.difference(
        refused, dict(refused)
    )


def test_models_and_executions_of_the_cases_exist(golden: Any) -> None:
    models = FILE.with_name("small_models.py").read_text()
    assert all(f'    "{name}": ' in models for name in golden.MODELS)
    for fields in golden.EXECUTIONS.values():
        own = {f: v for f, v in fields.items() if f not in ("kind", "accumulation", "cpu_devices")}
        if stages_on := own.pop("stages_on", None):
            own["stages_on"] = execution.StagesOnMesh.Params().set(stages_on)
        getattr(execution, fields["kind"]).Params().set(own)
    assert golden.cases(["dense"]) == [f"dense/{name}" for name in golden.EXECUTIONS]
