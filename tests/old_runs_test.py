"""Runs of earlier versions are evaluated and trained on, with the figures they logged.

`data/old_runs/` has small runs, named by their execution and the date of the code that wrote them:
their Params, assets, log, and the checkpoint of step 3 of 6.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import processes
import pytest
from sampling import sample

DATA = Path(__file__).parent / "data" / "old_runs"
RUNS = sorted(path.name for path in DATA.iterdir() if path.is_dir())
STEP = 3


def figures(log: Path) -> dict[tuple[str, int], float]:
    """Returns {(split, step): loss} of a log."""
    records = map(json.loads, log.read_text().splitlines())
    return {(record["split"], record["step"]): record["loss"] for record in records}


def trainer(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = ["-m", "tekso.tools.trainer", "--logdir=run", *flags]
    return processes.run(command, cwd=folder, optimized=False)


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A folder with a copy of a run, and with the text that it is trained on."""
    shutil.copytree(DATA / request.param, tmp_path / "run")
    shutil.copy(DATA / "corpus.txt", tmp_path)
    return tmp_path


@pytest.mark.parametrize("folder", sample(RUNS, quick=["pipeline_2026_11_24"]), indirect=True)
def test_an_old_run_continues_with_the_losses_it_had(folder: Path) -> None:
    was = figures(folder / "run" / "metrics.jsonl")
    assert max(was) == ("train", 6)
    done = trainer(folder)
    assert done.returncode == 0, done.stderr
    assert "resuming from run/checkpoints/step_00000003: 3 steps are left" in done.stdout
    assert (folder / "run" / "checkpoints" / "step_00000006").is_dir()
    assert figures(folder / "run" / "metrics.jsonl") == pytest.approx(was, rel=2e-5)


EVALUATED = "data_parallel_2026_11_21"
"""Runs of the other executions are read, and evaluated at their end, by the test above."""


@pytest.mark.parametrize(
    "folder",
    [
        pytest.param(run, marks=pytest.mark.slow if run == EVALUATED else pytest.mark.matrix)
        for run in RUNS
    ],
    indirect=True,
)
def test_an_old_run_is_evaluated(folder: Path) -> None:
    done = trainer(folder, "--mode=eval", "--format=json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["step"] == STEP
    was = figures(folder / "run" / "metrics.jsonl")
    assert found["dev"]["loss"] == pytest.approx(was["dev", STEP], rel=2e-5)
