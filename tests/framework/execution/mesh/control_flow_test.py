"""Loops on a mesh give the gradients of the plain ones, in every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import processes
import pytest

PROGRAM = Path(__file__).with_name("control_flow_program.py")

RECURRENT = [
    "data:2;model:2 batch:data;mlp:model;vocab:model",
    "model:2 embed:model",
]
TRANSFORMER = [
    "model:2 embed:model",
    "data:2 length:data",
    "model:2 head_dim:model",
    "model:3 layers:model",
]


def differences(*arguments: str) -> dict[str, dict[str, Any]]:
    done = processes.run([str(PROGRAM), *arguments])
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def check(report: dict[str, dict[str, Any]]) -> None:
    for layout, found in report.items():
        # float32 sums in another order; of a weight, relative to its largest gradient.
        assert found["outputs"] < 2e-6, (layout, found)
        assert found["gradients"] < 1e-5, (layout, found)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["lstm", "repeated_recurrent"])
def test_loop_over_time_on_a_mesh_equals_the_plain_one(model: str) -> None:
    check(differences(model, *RECURRENT))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layouts"),
    [("repeated", TRANSFORMER), ("repeated_moe", ["model:4 experts:model"])],
)
def test_loop_over_depth_on_a_mesh_equals_the_plain_one(model: str, layouts: list[str]) -> None:
    check(differences(model, *layouts))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["lstm"])
def test_parts_of_a_batch_add_up_on_a_mesh(model: str) -> None:
    check(differences(model, "--accumulation=2", "data:2;model:2 batch:data;mlp:model;vocab:model"))
