"""A small classifier, with batch statistics, gives the same under every execution."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import processes

PROGRAM = Path(__file__).with_name("classifier_program.py")


def run(*executions: str, **job: Any) -> list[dict[str, Any]]:
    done = processes.run([str(PROGRAM), json.dumps({"executions": executions, **job})])
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def test_a_float64_model_runs_under_every_execution() -> None:
    alone, *others = run("alone", "mesh", "stages", "stages on meshes", dtype="float64")
    assert len(alone["changed"]) == 8
    for one in others:
        np.testing.assert_allclose(one["losses"], alone["losses"], rtol=1e-12)
        for path, value in alone["weights"].items():
            within = 1e-6 if "moving" in path else 1e-12  # statistics are summed in float32
            np.testing.assert_allclose(one["weights"][path], value, within, err_msg=path)


def test_activations_are_bfloat16_under_every_execution() -> None:
    (full,) = run("alone")
    alone, *others = run("alone", "mesh", "stages", "stages on meshes", activation_dtype="bfloat16")
    assert alone["losses"] != full["losses"]
    np.testing.assert_allclose(alone["losses"], full["losses"], rtol=0.03)
    for one in others:
        np.testing.assert_allclose(one["losses"], alone["losses"], rtol=0.01)


def test_the_type_of_activations_may_be_set_as_earlier_versions_did() -> None:
    (half,), (wanted,) = run("half"), run("mesh", activation_dtype="bfloat16")
    assert half["losses"] == wanted["losses"]


def test_frozen_batch_statistics_stay_as_they_are_under_every_execution() -> None:
    names = ("alone", "mesh", "stages", "stages on meshes")
    found = run(*names, frozen=["model/norm/.*", "model/mlp/layers/1/b"])
    alone = found[0]
    learned = [f"weights/model/mlp/layers/{name}" for name in ("0/b", "0/w", "1/w")]
    for name, one in zip(names, found, strict=True):
        assert one["changed"] == learned, name
        np.testing.assert_allclose(one["losses"], alone["losses"], rtol=1e-5, err_msg=name)
        for path, value in alone["weights"].items():
            np.testing.assert_allclose(one["weights"][path], value, atol=1e-6, err_msg=path)
