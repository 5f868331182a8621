"""All that a learner can do comes out of a pipeline as of one device, slots and counts included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest

PROGRAM = Path(__file__).with_name("learning_program.py")
TABLE = "table/w"  # which the first and the last stage share

CASES: dict[str, dict[str, Any]] = {
    "clipped and averaged, in two parts": {
        "learner": {"clip_global_norm": 0.3, "ema_decay": 0.9, "accumulation_steps": 2},
        "pipelines": ["replicas"],
    },
    "frozen, and a step is not finite": {
        "learner": {"frozen": ["blocks/[25]/w", TABLE], "clip_tensor_norm": 0.1, "ema_decay": 0.5},
        "poisoned": [1],
        "pipelines": ["replicas"],  # stages and replicas must agree
    },
}
FROZEN = "frozen, and a step is not finite"


@pytest.fixture(scope="module")
def results() -> dict[str, list[dict[str, Any]]]:
    done = processes.run([str(PROGRAM), json.dumps(CASES)], timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[dict[str, Any]]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_states_and_metrics_are_those_of_one_device(
    results: dict[str, list[dict[str, Any]]], case: str
) -> None:
    alone, *piped = results[case]
    assert len(piped) == len(CASES[case]["pipelines"])
    for one in piped:
        assert not one["misplaced"]  # each stage reads and adds up on its own device
        for step, (state, expected) in enumerate(zip(one["states"], alone["states"], strict=True)):
            assert set(state) == set(expected)
            for key, value in expected.items():
                # Adam divides by the root of small numbers, which takes some digits.
                np.testing.assert_allclose(
                    state[key], value, rtol=1e-9, atol=1e-12, err_msg=f"{key} after step {step}"
                )
        for metrics, wanted in zip(one["metrics"], alone["metrics"], strict=True):
            assert metrics == pytest.approx(wanted, rel=1e-6, nan_ok=True)
        assert set(one["eval"]) == set(alone["eval"])
        for name, pair in alone["eval"].items():
            assert one["eval"][name] == pytest.approx(pair, rel=1e-6), name


@pytest.mark.slow
def test_frozen_weights_stay_and_others_move(results: dict[str, list[dict[str, Any]]]) -> None:
    for one in results[FROZEN]:
        first, last = one["states"][0], one["states"][-1]
        still = {key for key in first if key.startswith("weights/") and first[key] == last[key]}
        assert still == {"weights/blocks/2/w", "weights/blocks/5/w", f"weights/{TABLE}"}
        assert not any(TABLE in slot for slot in first if slot.startswith("learner/"))


@pytest.mark.slow
def test_step_that_is_not_finite_changes_counts_alone(
    results: dict[str, list[dict[str, Any]]],
) -> None:
    for one in results[FROZEN]:
        before, after, last = one["states"]
        changed = {key for key in before if before[key] != after[key]}
        assert changed == {"learner/nonfinite/total", "learner/nonfinite/consecutive"}
        counts = [m["nonfinite_total"] for m in one["metrics"]]
        in_a_row = [m["nonfinite_consecutive"] for m in one["metrics"]]
        assert (counts, in_a_row) == ([0, 1, 1], [0, 1, 0])
        assert last["learner/updates/applied"] == [2]


@pytest.mark.slow
def test_clipping_clips(results: dict[str, list[dict[str, Any]]]) -> None:
    alone = results["clipped and averaged, in two parts"][0]
    assert all(m["gradient_norm"] > 0.3 for m in alone["metrics"])
