"""A small classifier, with batch statistics, gives the same under every execution."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
from sampling import sample

PROGRAM = Path(__file__).with_name("classifier_program.py")
ALL = ["alone", "mesh", "stages", "stages on meshes"]


def run(*executions: str, **job: Any) -> list[dict[str, Any]]:
    job = {"executions": executions, **job}
    done = processes.run([str(PROGRAM), json.dumps(job)], optimized=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def test_a_float64_model_and_a_skipped_step_are_the_same_under_every_execution() -> None:
    alone, *others = run(*ALL, dtype="float64", steps=4, poisoned=[1, 2])
    assert len(alone["changed"]) == 8
    assert alone["skipped"] == 2 and alone["skipped_in_a_row"] == [0, 1, 2, 0]
    assert np.isfinite(alone["losses"]).tolist() == [True, False, False, True, True, True]
    for one in others:
        assert one["skipped"] == 2 and one["skipped_in_a_row"] == [0, 1, 2, 0]
        np.testing.assert_allclose(one["losses"], alone["losses"], rtol=1e-12)
        for path, value in alone["weights"].items():
            within = 1e-6 if "moving" in path else 1e-12  # statistics are summed in float32
            np.testing.assert_allclose(one["weights"][path], value, within, err_msg=path)


@functools.cache
def in_bfloat16() -> list[dict[str, Any]]:
    return run(*ALL, activation_dtype="bfloat16")


def test_activations_are_bfloat16_under_every_execution() -> None:
    (full,) = run("alone")
    alone, *others = in_bfloat16()
    assert alone["losses"] != full["losses"]
    np.testing.assert_allclose(alone["losses"], full["losses"], rtol=0.03)
    for one in others:
        np.testing.assert_allclose(one["losses"], alone["losses"], rtol=0.01)


ALONE_AND_STAGES = ["alone", "stages"]
NAMES = sample([ALONE_AND_STAGES, ALL], quick=[ALONE_AND_STAGES])


@pytest.mark.parametrize("names", NAMES)
def test_a_scale_of_the_loss_changes_no_bit_of_float32_under_any_execution(
    names: list[str],
) -> None:
    scaled = run(*names, loss_scale={"initial": 1024.0, "growth_steps": 2}, steps=4)
    for name, one, plain in zip(names, scaled, run(*names, steps=4), strict=True):
        assert one["losses"] == plain["losses"] and one["weights"] == plain["weights"], name
        assert one["scales"] == [1024.0, 1024.0, 2048.0, 2048.0] and plain["scales"] == [], name


@pytest.mark.parametrize("names", NAMES)
def test_float16_skips_steps_until_the_scale_fits_under_every_execution(
    names: list[str],
) -> None:
    largest = 2.0**24  # the gradients of activations overflow at first
    full, *found = run("alone", steps=12) + run(
        *names, activation_dtype="float16", loss_scale={"initial": largest}, steps=12
    )
    alone = found[0]
    skipped = alone["skipped"]
    assert 0 < skipped < 12
    halved = [largest / 2**n for n in range(skipped + 1)]
    assert alone["scales"] == halved + halved[-1:] * (12 - skipped - 1)
    for name, one in zip(names, found, strict=True):
        assert one["skipped"] == skipped and one["scales"] == alone["scales"], name
        np.testing.assert_allclose(one["losses"], alone["losses"], rtol=2e-3, err_msg=name)
    # After the skipped steps, the losses are those of float32 at its first steps.
    rest = alone["losses"][skipped:12]
    np.testing.assert_allclose(rest, full["losses"][: len(rest)], rtol=5e-3)


def test_a_model_learns_in_bfloat16_and_in_float16_as_in_float32() -> None:
    (full,) = run("alone", steps=60)
    first, last = full["losses"][0], full["losses"][59]
    assert last < 0.6 * first
    half = {"activation_dtype": "float16", "loss_scale": {"initial": 1024.0}}
    for kind in ({"activation_dtype": "bfloat16"}, half):
        (found,) = run("alone", steps=60, **kind)
        np.testing.assert_allclose(found["losses"][59], last, rtol=0.05, err_msg=str(kind))


def test_the_type_of_activations_may_be_set_as_earlier_versions_did() -> None:
    (half,) = run("half")
    assert half["losses"] == in_bfloat16()[ALL.index("mesh")]["losses"]


def test_frozen_batch_statistics_stay_as_they_are_under_every_execution() -> None:
    found = run(*ALL, frozen=["model/norm/.*", "model/mlp/layers/1/b"])
    alone = found[0]
    learned = [f"weights/model/mlp/layers/{name}" for name in ("0/b", "0/w", "1/w")]
    for name, one in zip(ALL, found, strict=True):
        assert one["changed"] == learned, name
        np.testing.assert_allclose(one["losses"], alone["losses"], rtol=1e-5, err_msg=name)
        for path, value in alone["weights"].items():
            np.testing.assert_allclose(one["weights"][path], value, atol=1e-6, err_msg=path)
