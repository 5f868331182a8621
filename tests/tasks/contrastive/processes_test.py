"""The contrastive loss over two processes is that of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import clusters
import processes
import pytest

TESTS = Path(__file__).resolve().parents[2]


def trainer(logdir: Path, *flags: str, op_by_op: bool = False) -> processes.Process:
    """Starts 6 steps with two evaluations."""
    return processes.start(
        [
            *("-m", "tekso.tools.trainer", "--import=small_contrast"),
            *("--model=small_contrast.Pairs", f"--logdir={logdir}", "--deterministic"),
            *("--execution=data_parallel", *flags),
        ],
        cwd=TESTS,
        optimized=False,
        op_by_op=op_by_op,
    )


def figures(logdir: Path) -> dict[tuple[int, str], dict[str, Any]]:
    """Returns loss, gradient norm and accuracies by step and split."""
    records = [json.loads(line) for line in (logdir / "metrics.jsonl").read_text().splitlines()]
    names = ("loss", "gradient_norm", "batch_accuracy", "image_to_text_recall_1")
    return {
        (one["step"], one["split"]): {name: one[name] for name in names if name in one}
        for one in records
        if "loss" in one
    }


@pytest.mark.slow
def test_two_processes_compute_what_one_does(tmp_path: Path) -> None:
    cluster = f"--cluster={','.join(clusters.free_addresses(2))}"
    clusters.wait_for(*(trainer(tmp_path / "two", cluster, f"--process={i}") for i in range(2)))
    clusters.wait_for(trainer(tmp_path / "one", op_by_op=True))
    found, expected = figures(tmp_path / "two"), figures(tmp_path / "one")
    assert {split for _, split in found} == {"train", "dev"} and found.keys() == expected.keys()
    assert found[1, "train"]["loss"] != pytest.approx(found[6, "train"]["loss"], rel=0.1)
    for key, own in expected.items():
        assert found[key] == pytest.approx(own, rel=2e-5), key
