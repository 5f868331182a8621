"""The experiment on Fashion-MNIST, on four small files with the names of the package's files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import processes
import pytest
from idx_files import idx

SMALL = (
    "--set", "input.source.num_dev=10", "--set", "input.batch_size=8",
    "--set", "eval_inputs.dev.batch_size=10", "--set", "eval_inputs.test.batch_size=10",
    "--set", "task.model.width=4", "--set", "execution.towers=1", "--set", "execution.xla=none",
)  # fmt: skip


def write(folder: Path) -> None:
    """Writes 40 pictures of training and 20 of test, of which class k has the brightness 25 k."""
    folder.mkdir(parents=True)
    for name, count in (("train", 40), ("t10k", 20)):
        labels = (np.arange(count) % 10).astype(np.uint8)
        images = np.broadcast_to(25 * labels[:, None, None], (count, 28, 28)).astype(np.uint8)
        (folder / f"{name}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (folder / f"{name}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))


@pytest.mark.slow
def test_the_files_of_the_package_are_trained_on_and_scored(tmp_path: Path) -> None:
    write(tmp_path / "fashion")
    command = [
        "-m", "tekso.tools.trainer", "--model=image.fashion_mnist.ResNet", "--logdir=runs/fashion",
        "--set", "input.source.folder=fashion", "--steps=2", *SMALL,
    ]  # fmt: skip
    done = processes.run(command, cwd=tmp_path, merge=True, op_by_op=True)
    assert done.returncode == 0, done.stdout[-3000:]
    run = tmp_path / "runs/fashion"
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    assert {one["split"] for one in records if "accuracy" in one} == {"train", "dev", "test"}
    for name, count in (("dev", 10), ("test", 20)):
        report = (run / f"decoded/{name}/step_000000002.txt").read_text()
        assert f"of {count} images are right" in report
    assert (run / "assets/classes.txt").read_text().split()[::9] == ["T-shirt", "boot"]
