"""The experiments that are pipelines train, as they are typed, to what one device gives."""

from __future__ import annotations

import json
from pathlib import Path

import processes
import pytest


def trained(model: str, logdir: Path, *more: str, op_by_op: bool = False) -> dict[str, float]:
    """Returns the figures of two steps and an evaluation."""
    command = ["-m", "tekso.tools.trainer", f"--model={model}", "--steps=2"]
    command += [f"--logdir={logdir}", "--set=task.decode=None"]
    command += ["--set=eval_inputs.dev.max_batches=1", "--set=task.model.stack.num_layers=2"]
    done = processes.run([*command, *more], optimized=False, op_by_op=op_by_op)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (logdir / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {
        f"{record['step']} {record['split']} {name}": record[name]
        for record in records
        for name in ("loss", "gradient_norm", "bits_per_byte")
        if name in record
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    one_device = ("--set=execution.towers=1", "--set=execution.xla=none")
    logdir = tmp_path_factory.mktemp("alone")
    return trained("lm.python_source.Tiny", logdir, *one_device, op_by_op=True)


# ../../../shrunk_experiments_test.py compares the steps of these executions with one device, and
# ../../../shrunk_runs_test.py runs the commands on smaller models.
@pytest.mark.matrix
@pytest.mark.parametrize("model", ["TinyMeshPipeline", "TinySpmdPipeline"])
def test_it_gives_the_figures_of_one_device(
    model: str, alone: dict[str, float], tmp_path: Path
) -> None:
    assert "2 dev bits_per_byte" in alone
    assert trained(f"lm.python_source.{model}", tmp_path) == pytest.approx(alone, rel=1e-5)
