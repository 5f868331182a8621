"""Tests that a package outside of the repository can define a layer and an experiment."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import processes

EXAMPLES = Path(__file__).resolve().parents[1] / "docs" / "examples"
MODEL = "my_research.experiments.Blended"
SMALL = [
    "task.model.dim=16",
    "task.model.stack.num_layers=1",
    "task.model.stack.layer.attention.num_heads=2",
    "task.model.stack.layer.feed_forward.hidden_dim=24",
    "task.decode.max_new_tokens=5",
    "input.length=16",
    "input.batch_size=4",
    "eval_inputs.dev.batch_size=4",
    "eval_inputs.dev.max_batches=2",
    "run.log_every_steps=1",
    "execution.xla=none",
]


def tekso_trainer(*args: str, cwd: Path) -> str:
    """Runs the trainer in a separate process, from a folder outside of the repository."""
    command = ["-m", "tekso.tools.trainer", "--import=my_research", *args]
    done = processes.run(command, cwd=cwd, optimized=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_outside_package_is_listed_inspected_and_trained(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "my_research", tmp_path / "my_research")
    source = tmp_path / "code"
    source.mkdir()
    (source / "a.py").write_text("def f(x):\n    return x + 1\n\n\n" * 40)

    (row,) = json.loads(tekso_trainer(f"--list={MODEL}", "--format=json", cwd=tmp_path))
    assert row["key"] == MODEL
    assert os.path.basename(row["file"]) == "experiments.py"
    # 2 tables of 256 x 128; a layer: attention, feed-forward, blend, 2 scales; the last scale.
    assert row["total_weights"] == 2 * 256 * 128 + 4 * (12 * 128**2 + 512 + 2 * 128) + 128

    settings = [f"--set={setting}" for setting in [*SMALL, f"input.files={source}/*.py"]]
    model = [f"--model={MODEL}", "--logdir=run", "--steps=12"]
    printed = tekso_trainer(*model, *settings, cwd=tmp_path)
    assert "after 'def '" in printed

    log = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    losses = [row["loss"] for row in log if row["split"] == "train"]
    assert len(losses) == 12
    assert np.mean(losses[-3:]) < np.mean(losses[:3])
    assert [row["step"] for row in log if row["split"] == "dev"][-1] == 12
    assert "my_research.layers:BlendedFeedForward" in (tmp_path / "run" / "params.txt").read_text()
