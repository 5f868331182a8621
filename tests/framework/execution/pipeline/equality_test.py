"""A pipeline gives the losses, gradients and weights of a single device, however it is cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest

PROGRAM = Path(__file__).with_name("equality_program.py")


def run(model: str, *pipelines: dict[str, Any], **job: Any) -> list[dict[str, Any]]:
    done = processes.run(
        [str(PROGRAM), json.dumps({"model": model, "pipelines": pipelines, **job})],
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    return results


def pipeline(
    stages: int, micro_batches: int, schedule: str, rematerialize: str, **more: Any
) -> Any:
    return {
        "num_stages": stages,
        "num_micro_batches": micro_batches,
        "schedule": schedule,
        "rematerialize": rematerialize,
        "xla": "none",
        **more,
    }


def check(alone: dict[str, Any], piped: dict[str, Any], *, within: float = 1e-5) -> None:
    assert piped["first"] == alone["first"]
    for one, other in zip(alone["steps"], piped["steps"], strict=True):
        assert set(one) == set(other)
        for name, value in one.items():
            assert other[name] == pytest.approx(value, rel=max(within, 1e-6), nan_ok=True), name
        for name in ("loss", "total_loss"):
            assert other[name] == pytest.approx(one[name], rel=max(within, 1e-7), nan_ok=True), name
    assert set(piped["eval"]) == set(alone["eval"])
    for name, pair in alone["eval"].items():
        np.testing.assert_allclose(piped["eval"][name], pair, rtol=1e-5, atol=1e-6, err_msg=name)
    assert set(piped["weights"]) == set(alone["weights"])
    for path, weight in alone["weights"].items():
        scale = max(np.max(np.abs(weight)), 1e-2)
        difference = np.max(np.abs(np.subtract(piped["weights"][path], weight)))
        assert difference < 2 * within * scale, path
    assert piped["shown"] == pytest.approx(alone["shown"], rel=1e-4)


def test_float64_equals_one_device_and_schedules_give_the_same_bits() -> None:
    alone, *piped = run(
        "skipping",
        *(pipeline(3, 4, name, "none") for name in ("gpipe", "1f1b")),
        size=40,
        optimized=False,
    )
    for one in piped:
        check(alone, one, within=1e-12)
        assert one["weights"] == piped[0]["weights"]
        assert one["steps"] == piped[0]["steps"]


@pytest.mark.slow
def test_float64_with_values_that_jump_stages_and_a_shared_table() -> None:
    pipelines = [  # a single stage and other schedules without balance are in the quick tests
        pipeline(5, 2, "zero_bubble_h1", "except_last"),
        pipeline(2, 8, "interleaved_1f1b", "all"),
        pipeline(3, 5, "1f1b", "none", balance=[7, 1, 1]),
    ]
    alone, *piped = run("skipping", *pipelines, size=40)
    for one in piped:
        check(alone, one, within=1e-12)


EVALUATED = ("repeated", "moe", "sampled", "translation", "pairs")
"""The other models have no piece of their own in evaluation."""


def matrix(*values: Any) -> Any:
    """Parameters of a test that `make test-matrix` runs."""
    return pytest.param(*values, marks=pytest.mark.matrix)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "pipelines"),
    [
        ("repeated", [pipeline(3, 4, "zero_bubble_h1", "all")]),
        ("moe", [pipeline(2, 4, "interleaved_1f1b", "all")]),
        ("adapted", [pipeline(2, 4, "1f1b", "all")]),
        ("sampled", [pipeline(2, 4, "1f1b", "none")]),
        ("remat", [pipeline(2, 2, "1f1b", "none", xla="clusters")]),
        ("lstm", [pipeline(4, 8, "zero_bubble_h1", "none")]),
        ("translation", [pipeline(4, 4, "1f1b", "none")]),
        ("prefix", [pipeline(3, 4, "1f1b", "except_last")]),
        ("pairs", [pipeline(4, 2, "1f1b", "none")]),
        # "untied" is in mesh_stages_test.py, and replicas in learning_test.py. The others are as
        # "repeated" and "translation" together, as "untied" with more layers, as "adapted" and
        # "moe" together, and as "pairs" with another decoder.
        matrix("untied", [pipeline(2, 2, "interleaved_1f1b", "all", num_replicas=2)]),
        matrix("repeated_translation", [pipeline(3, 2, "zero_bubble_h1", "none")]),
        matrix("deep", [pipeline(2, 2, "interleaved_1f1b", "all", num_replicas=2)]),
        matrix("adapted_experts", [pipeline(3, 4, "1f1b", "none")]),
        matrix("pairs_luong", [pipeline(3, 2, "1f1b", "except_last")]),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_language_models(model: str, pipelines: list[Any]) -> None:
    # TensorFlow's graph optimizer, a tenth of the time, is on in the slow test of float64.
    alone, *piped = run(model, *pipelines, optimized=False, evaluate=model in EVALUATED)
    for one in piped:
        check(alone, one)


@pytest.mark.slow
def test_accumulated_parts_add_up() -> None:
    # A later batch is divided into as many parts as it allows: 2, 2 of another size, 1.
    alone, piped = run(
        "blocks", pipeline(2, 2, "1f1b", "none"), accumulation=2, sizes=[8, 6, 5], optimized=False
    )
    check(alone, piped)


def test_statistics_are_of_micro_batches_and_moved_once_by_a_step_that_is_not_skipped() -> None:
    one, several, again = run(
        "statistics",
        pipeline(1, 4, "gpipe", "none"),
        pipeline(3, 4, "1f1b", "none"),
        pipeline(2, 4, "gpipe", "all"),
        size=16,
        steps=2,
        poisoned=[1],
        alone=False,
    )
    check(one, several)
    check(one, again)
    assert [step["nonfinite_total"] for step in several["steps"]] == [0, 1]
    # The first layer sees the batch itself: its moving mean goes to the mean of all 16 examples.
    x = np.random.default_rng(0).normal(size=(16, 6)).astype(np.float32) * 3 + 1
    moved = np.array(several["weights"]["weights/norms/0/moving_mean"])
    np.testing.assert_allclose(moved / x.mean(0), 0.01, rtol=1e-3)  # momentum 0.99, once
