"""Image models have the numbers of one device under data parallelism, meshes and pipelines."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
from sampling import sample

PROGRAM = Path(__file__).with_name("image_models_program.py")

ALONE = {"execution": {"kind": "DataParallel", "towers": 1, "xla": "none"}}
REPLICAS = {**ALONE, "devices": 2}


def mesh(axes: str, rules: str) -> dict[str, Any]:
    return {"execution": {"kind": "MeshSharded", "mesh": axes, "rules": rules}, "devices": 4}


def pipeline(stages: int, parts: int = 1, **more: Any) -> dict[str, Any]:
    sizes = {"num_stages": stages, "num_micro_batches": parts, "xla": "none", **more}
    return {"execution": {"kind": "Pipelined", **sizes}, "devices": stages}


def run(model: str, *jobs: dict[str, Any]) -> list[dict[str, Any]]:
    done = processes.run([PROGRAM, json.dumps([{"model": model, **job} for job in jobs])])
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    for one in found:
        assert "error" not in one, one["error"]
    return found


@functools.cache
def alone(model: str) -> dict[str, Any]:
    (found,) = run(model, ALONE)
    assert min(found["gradient_norms"]) > 0.1
    return found


def check(wanted: dict[str, Any], found: dict[str, Any]) -> None:
    np.testing.assert_allclose(found["losses"][:2], wanted["losses"][:2], rtol=1e-9)
    np.testing.assert_allclose(found["losses"], wanted["losses"], rtol=1e-5)
    assert set(found["weights"]) == set(wanted["weights"])
    for path, value in wanted["weights"].items():
        within = 1e-6 if "moving" in path else 1e-9  # statistics are summed in float32
        np.testing.assert_allclose(found["weights"][path], value, within, within, err_msg=path)


# The quick tests compare heads on a mesh with those of a language model (mesh/equality_test.py).
QUICK = [("resnet", "stages"), ("groups_of_3", "replicas")]
SPATIAL = "batch:data;height:model"
CASES = [
    ("resnet", "space", mesh("data:2;model:2", SPATIAL)),
    (
        "resnet",
        "channels",
        mesh("data:2;model:2", "batch:data;channels:model;out_channels:model"),
    ),
    ("resnet", "stages", pipeline(3)),
    ("resnet_basic", "stages", pipeline(2, rematerialize="all")),
    ("groups_of_3", "replicas", REPLICAS),  # a group has examples of both replicas
    ("groups_of_4", "stages", pipeline(2, 2)),  # a group is a micro-batch
    ("transformer", "heads", mesh("data:2;model:2", "batch:data;heads:model;mlp:model")),
    ("transformer", "space", mesh("data:2;model:2", "batch:data;height:model")),
    ("unet", "stages", pipeline(3)),
]


# Other models and tests have what these could find: replicas, dims of an image or a volume
# (windows_test.py has them for all layers of a U-Net), values that jump stages (those of a U-Net
# above; amoebanet_test.py compares the cells with their formulas), groups of examples that are on
# several devices, and stages of Transformers.
MATRIX = [
    ("amoebanet", "stages", pipeline(3)),
    ("unet", "space", mesh("a:2;b:2", "height:a;width:b")),
    ("resnet", "replicas", REPLICAS),
    ("resnet_basic", "space", mesh("a:2;b:2", "height:a;width:b")),
    ("unet3d", "depth", mesh("data:2;model:2", "batch:data;depth:model")),
    ("unet3d", "stages", pipeline(2)),
    ("groups_of_3", "space", mesh("data:2;model:2", SPATIAL)),
    ("transformer", "stages", pipeline(2, 4)),
    ("transformer", "replicas", REPLICAS),
    ("unet3d", "height_and_width", mesh("a:2;b:2", "height:a;width:b")),
]


@pytest.mark.parametrize(
    ("model", "execution", "job"),
    [
        *sample(CASES, quick=[case for case in CASES if case[:2] in QUICK]),
        *(pytest.param(*case, marks=pytest.mark.matrix) for case in MATRIX),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_every_execution_gives_the_numbers_of_one_device(
    model: str, execution: str, job: dict[str, Any]
) -> None:
    (found,) = run(model, job)
    check(alone(model), found)


# For a chain of BatchNorms, pipeline/equality_test.py compares the same cuts in the quick tests.
@pytest.mark.matrix
@pytest.mark.parametrize("model", ["resnet"])
def test_cuts_and_schedules_do_not_change_statistics_of_micro_batches(model: str) -> None:
    wanted, *others = run(model, pipeline(1, 4), pipeline(3, 4), pipeline(2, 4, schedule="1f1b"))
    for found in others:
        check(wanted, found)
