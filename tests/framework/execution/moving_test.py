"""A checkpoint moves from one execution to the other, and training continues as on one device.

The program also compares the state that each execution saves and restores, bit by bit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest

from tekso.framework.run.checkpoints import Checkpoints

PROGRAM = Path(__file__).with_name("moving_program.py")

ALONE = {"execution": "data_parallel", "params": {"towers": 1, "xla": "none"}}
LEGS: list[dict[str, Any]] = [
    {
        "execution": "pipelined",
        "params": {"num_stages": 3, "num_micro_batches": 2, "rematerialize": "all"},
    },
    {
        "execution": "mesh_sharded",
        "params": {"mesh": "data:2;model:2", "rules": "batch:data;mlp:model;vocab:model"},
    },
    {
        "execution": "mesh_sharded",
        "params": {"mesh": "data:2;model:2", "rules": "2d", "slots_axis": "data"},
    },
    {
        "execution": "pipelined",
        "params": {"num_stages": 2, "num_micro_batches": 2, "num_replicas": 2,
                   "schedule": "zero_bubble_h1"},
    },
    {"execution": "data_parallel", "params": {"xla": "none"}, "cpu_devices": 2},
    {"execution": "pipelined", "params": {"num_stages": 4, "num_micro_batches": 4}},
]  # fmt: skip


def run(folder: Path, *legs: dict[str, Any]) -> list[list[float]]:
    done = processes.run([str(PROGRAM), str(folder), json.dumps(legs)], timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    losses: list[list[float]] = json.loads(done.stdout.strip().splitlines()[-1])
    return losses


def newest(folder: Path, step: int) -> dict[str, np.ndarray]:
    good = Checkpoints(str(folder)).newest_good()
    assert good is not None and good.description.step == step
    return {key: good.read(key) for key in good.keys}


@pytest.mark.parametrize(
    "legs",
    [
        pytest.param(
            [LEGS[0], LEGS[2], LEGS[4]], marks=pytest.mark.slow, id="pipeline-mesh-replicas"
        ),
        pytest.param(LEGS[1:4], marks=pytest.mark.matrix, id="mesh-slots-replicas_of_stages"),
        pytest.param(LEGS[4:], marks=pytest.mark.matrix, id="replicas-pipeline"),
    ],
)
def test_run_that_changes_its_execution_every_two_steps_is_that_of_one_device(
    tmp_path: Path, legs: list[dict[str, Any]]
) -> None:
    moved = run(tmp_path / "moved", *({**leg, "steps": 2} for leg in legs))
    (alone,) = run(tmp_path / "alone", {**ALONE, "steps": 2 * len(legs)})
    losses = [loss for leg in moved for loss in leg]
    assert losses == pytest.approx(alone, rel=2e-5)
    found, expected = (newest(tmp_path / name, 2 * len(legs)) for name in ("moved", "alone"))
    assert set(found) == set(expected)
    assert {key.partition("/")[0] for key in found} == {"weights", "learner"}
    assert any(key.endswith("/ema") for key in found) and "learner/updates/applied" in found
    for key, value in expected.items():
        scale = max(np.max(np.abs(value)), 1e-2)
        assert np.max(np.abs(found[key] - value)) <= 1e-4 * scale, key
