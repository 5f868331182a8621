"""Random and chosen models give the numbers of one device, or are refused with a reason."""

from __future__ import annotations

import json
from typing import Any

import fuzz_choices
import fuzz_executions
import numpy as np
import processes
import pytest

SEED, CASES = 7, 4
"""Chosen so that several kinds of tasks and executions are among them."""


def execution(kind: str, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, **fields}


MESH = execution("mesh", mesh="x:2;y:2", rules="batch:x;heads:y;mlp:y;vocab:y")
REPLICAS = execution("replicas", devices=2, xla="none")
STAGES = {"num_stages": 2, "num_micro_batches": 2, "rematerialize": "none", "num_replicas": 1}
PIPELINE = execution("pipeline", schedule="1f1b", **STAGES)
MESH_STAGES = execution(
    "mesh_stages", schedule="gpipe", stages_on={"mesh": "x:2", "rules": "mlp:x;vocab:x"}, **STAGES
)
PADDED = {"vocab": 30, "vocab_multiple": 8, "smoothing": 0.1}
NORMED = {**fuzz_choices.BLOCK, "norm": True}

NAMED: dict[str, dict[str, Any]] = {
    "label smoothing, padded vocabulary, mesh": {**PADDED, "execution": MESH},
    "label smoothing, padded vocabulary, pipeline": {**PADDED, "execution": PIPELINE},
    "repeated stack twice, pipeline": {
        "task": "reused", "stack": "repeated", "layers": 2, "execution": PIPELINE,
    },
    "shared layers, stages on meshes": {
        "stack": "shared", "layers": 2, "execution": MESH_STAGES,
    },
    "BatchNorm, accumulation, mesh": {
        "task": "images", "image": (8, 8), "blocks": [NORMED], "accumulation": 2,
        "execution": execution("mesh", mesh="x:2", rules="batch:x"),
    },
    "several optimizers, packed, pipeline": {
        "optimizers": ["lamb", "adafactor", "lars"], "packed": True, "execution": PIPELINE,
    },
    "GRU, LARS, mesh": {
        "task": "recurrent", "cell": "gru", "optimizers": ["lars"],
        "execution": execution("mesh", mesh="x:2;y:2", rules="batch:x;mlp:y;vocab:y"),
    },
    "grouped queries, LAMB, slots, mesh": {
        "kv_heads": 2, "optimizers": ["lamb"], "execution": {**MESH, "slots_axis": "x"},
    },
    "convolutions, Adafactor, mesh": {
        "task": "images", "image": (8, 8), "blocks": [fuzz_choices.BLOCK],
        "optimizers": ["adafactor"],
        "execution": execution("mesh", mesh="x:2;y:2", rules="height:x;out_channels:y"),
    },
    "sampled softmax, rematerialization, slots, stages on meshes": {
        "softmax": "sampled",
        "execution": {
            **MESH_STAGES, "rematerialize": "all", "num_micro_batches": 1,
            "stages_on": {"mesh": "x:2", "rules": "batch:x", "slots_axis": "x"},
        },
    },
}  # fmt: skip
"""{name: choices that differ from PLAIN}."""


SLOW = (
    "label smoothing, padded vocabulary, pipeline",
    "GRU, LARS, mesh",
    "sampled softmax, rematerialization, slots, stages on meshes",
)
"""The cases that the slow tests train; `make test-matrix` trains the others."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW else pytest.mark.matrix)
        for name in NAMED
    ],
)
def test_a_named_case_equals_one_device(name: str) -> None:
    outcome = fuzz_executions.in_process({**fuzz_choices.PLAIN, **NAMED[name]})
    assert outcome.kind == fuzz_executions.EQUAL, outcome


def test_batch_statistics_with_accumulation_on_several_devices_are_refused() -> None:
    case = {"task": "images", "image": (8, 8), "blocks": [NORMED], "accumulation": 2}
    outcome = fuzz_executions.in_process({**fuzz_choices.PLAIN, **case, "execution": REPLICAS})
    assert outcome.kind == fuzz_executions.REFUSED
    assert "set learner.accumulation_steps=1" in outcome.reason


def test_the_program_repeats_a_case() -> None:
    change = {**fuzz_choices.PLAIN, "batch": 9, "execution": REPLICAS}
    command = [fuzz_executions.FILE, "--case=0:17", f"--change={json.dumps(change)}"]
    done = processes.run(command)
    assert done.returncode == 0, done.stderr
    assert '"batch": 9' in done.stdout
    assert "refused: input.batch_size 9 does not divide evenly over 2 devices" in done.stdout


@pytest.mark.matrix
def test_random_cases_are_equal_or_refused() -> None:
    found = fuzz_executions.run_all(SEED, range(CASES))
    bugs = {case: one for case, one in found.items() if one.kind in fuzz_executions.BUGS}
    assert not bugs
    assert any(one.kind == fuzz_executions.EQUAL for one in found.values())


def test_a_case_is_a_function_of_its_number() -> None:
    one, other = fuzz_choices.draw(3, 5), fuzz_choices.draw(3, 5)
    assert json.dumps(one) == json.dumps(other) != json.dumps(fuzz_choices.draw(3, 6))


def test_another_loss_or_weight_is_different() -> None:
    whole = {
        "steps": [{"loss": 2.0}],
        "evaluation": {},
        "before": {"w": np.zeros(3)},
        "after": {"w": np.ones(3)},
    }
    assert fuzz_executions.compared(whole, whole).kind == fuzz_executions.EQUAL
    other = {**whole, "steps": [{"loss": 2.001}]}
    assert "loss 2 is 2.001" in fuzz_executions.compared(whole, other).reason
    other = {**whole, "after": {"w": np.array([1.0, 1.0, 1.02])}}
    assert "w moved by" in fuzz_executions.compared(whole, other).reason
