"""Random and chosen models give the numbers of one device, or are refused with a reason."""

from __future__ import annotations

import functools
import hashlib
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
    # This layout once ended the process.
    "convolutions, batch statistics, accumulation, two optimizers, mesh": {
        "task": "images", "image": (9, 9), "batch": 12, "accumulation": 2,
        "blocks": [{**NORMED, "channels": 6}, {**NORMED, "channels": 3}],
        "optimizers": ["adam", "sgd"],
        "execution": execution("mesh", mesh="y:2;z:3", rules="batch:y;channels:z;out_channels:z"),
    },
    "sampled softmax, rematerialization, slots, stages on meshes": {
        "softmax": "sampled",
        "execution": {
            **MESH_STAGES, "rematerialize": "all", "num_micro_batches": 1,
            "stages_on": {"mesh": "x:2", "rules": "batch:x", "slots_axis": "x"},
        },
    },
    "bfloat16, grouped queries, mesh": {
        "activation_dtype": "bfloat16", "kv_heads": 2, "execution": MESH,
    },
    "float16, accumulation, pipeline": {
        "activation_dtype": "float16", "accumulation": 2, "execution": PIPELINE,
    },
}  # fmt: skip
"""{name: choices that differ from PLAIN}."""


SLOW = ("label smoothing, padded vocabulary, pipeline",)
"""The cases that the slow tests train, besides two random ones; `make test-matrix` trains the
others. Recurrent models on meshes, LARS, and slots of stages on meshes have tests of their own."""


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


def test_a_window_that_is_larger_than_its_image_is_refused() -> None:
    block = {**fuzz_choices.BLOCK, "padding": "VALID", "kernel_shape": (1, 3), "dilations": (1, 2)}
    case = {"task": "images", "image": (2, 2), "blocks": [block], "execution": REPLICAS}
    outcome = fuzz_executions.in_process({**fuzz_choices.PLAIN, **case})
    assert outcome.kind == fuzz_executions.REFUSED, outcome
    assert outcome.reason.startswith("no execution: a window of 5 "), outcome


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


@pytest.mark.slow
def test_two_cheap_random_cases_are_equal() -> None:
    found = fuzz_executions.run_all(881203, (65, 67))  # recurrent models on meshes
    assert [one.kind for one in found.values()] == [fuzz_executions.EQUAL] * 2, found


def test_a_case_is_a_function_of_its_number() -> None:
    one, other = fuzz_choices.draw(3, 5), fuzz_choices.draw(3, 5)
    assert json.dumps(one) == json.dumps(other) != json.dumps(fuzz_choices.draw(3, 6))


def test_the_type_of_activations_is_drawn_and_changes_no_other_choice() -> None:
    cases = [fuzz_choices.draw(seed, i) for seed in (0, 7) for i in range(20)]
    types = {case.pop("activation_dtype") for case in cases}
    assert types == {"float32", "bfloat16", "float16"}
    digest = hashlib.sha256(json.dumps(cases).encode()).hexdigest()
    assert digest.startswith("1489a23fa9d843d9"), "reports name cases by their numbers"


def test_16_bits_may_differ_by_their_own_error_and_no_more() -> None:
    def result(loss: float, w: float) -> dict[str, Any]:
        steps = [{"loss": loss, "accuracy": loss}]
        state = {"before": {"w": np.zeros(3)}, "after": {"w": np.full(3, w)}}
        return {"steps": steps, "evaluation": {}, **state}

    full, whole = result(2.0, 1.0), result(2.1, 1.1)
    near, other_loss, other_weight = result(2.4, 1.3), result(2.5, 1.1), result(2.1, 1.5)
    for dtype in ("bfloat16", "float16"):
        compared = functools.partial(fuzz_executions.compared, whole, full=full, dtype=dtype)
        assert compared(near).kind == fuzz_executions.EQUAL
        assert compared(other_loss).reason == "step 0 loss 2.1 is 2.5"
        assert "w moved by 1.91, and is 0.693 apart" in compared(other_weight).reason
    assert "accuracy" in fuzz_executions.compared(whole, near).reason


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


def test_a_weight_that_moves_by_rounding_alone_may_move_elsewhere() -> None:
    def result(weight: float) -> dict[str, Any]:
        before, after = {"w": np.zeros(2)}, {"w": np.array([weight, 0.0])}
        steps = [{"loss": 2.0}]
        return {"steps": steps, "evaluation": {}, "before": before, "after": after}

    whole, full = result(1e-3), result(1e-7)
    kinds = [
        fuzz_executions.compared(whole, result(w), full, "bfloat16").kind for w in (-4e-3, -2e-2)
    ]
    assert kinds == [fuzz_executions.EQUAL, fuzz_executions.DIFFERENT]
    of_float32 = fuzz_executions.compared(whole, result(-4e-3))
    assert of_float32.kind == fuzz_executions.DIFFERENT
