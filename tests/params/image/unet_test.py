"""U-Nets: the published number of weights, and a run on folders from start to end."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import processes
import pytest
from small_masks import Squares, write_masks

from tekso.framework import registry
from tekso.framework.run import inspection

SMALL = {
    "input.image_size": "16",
    "input.batch_size": "4",
    "task.model.width": "4",
    "task.model.num_scales": "2",
    "execution.towers": "1",
    "execution.xla": "none",
}


def test_the_published_network_has_31_million_weights() -> None:
    tree = registry.get("image.unet.Folders")().tree()
    tree.task.num_classes = 2
    task = inspection.task_of(tree)
    count = sum(spec.size for spec in task.specs().values() if spec.trainable)
    # Without BatchNorm, whose scales and biases replace biases of 18 convolutions: 31,031,810 +
    # 5,888 scales; the paper's network for 1 channel has 31,030,658.
    assert count == 31_030_658 + 2 * 64 * 9 + 5888


@pytest.mark.slow
def test_folders_are_trained_on_scored_and_segmented(tmp_path: Path) -> None:
    write_masks(tmp_path / "cells", Squares.Params(count=30).instantiate())
    settings = [f"--set={path}={value}" for path, value in SMALL.items()]
    command = [
        "-m", "tekso.tools.trainer", "--model=image.unet.Folders", "--logdir=run", "--steps=2",
        "--set=input.source.folder=cells", *settings,
        "--set=input.source.classes=['background', 'bright', 'dark']",
    ]  # fmt: skip
    done = processes.run(command, cwd=tmp_path, merge=True, op_by_op=True)
    assert done.returncode == 0, done.stdout[-3000:]
    run = tmp_path / "run"
    records = list(map(json.loads, (run / "metrics.jsonl").read_text().splitlines()))
    assert any({"iou", "dice"} <= set(one) for one in records if one["split"] == "dev")
    assert (run / "decoded" / "dev" / "masks.png").stat().st_size

    decode = ["--mode=decode", "--logdir=run", "--set=task.decode=cells/images/1*.png"]
    done = processes.run(
        ["-m", "tekso.tools.trainer", *decode], cwd=tmp_path, merge=True, op_by_op=True
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "cells/images/11.png: " in done.stdout


def test_the_published_network_of_volumes_is_registered() -> None:
    """Çiçek et al. 2016 print 19,069,955, without the 2,336 scales of BatchNorm."""
    task = inspection.task_of(registry.get("image.unet.Volumes")().tree())
    found = sum(spec.size for spec in task.specs().values() if spec.trainable)
    assert found == 19_069_955 + 2336


@pytest.mark.slow
def test_volumes_are_trained_on_scored_and_segmented(tmp_path: Path) -> None:
    (tmp_path / "volumes").mkdir()
    rng = np.random.default_rng(0)
    for i in range(30):
        labels = np.zeros((6, 8, 8), np.int64)
        labels[1:4, 2:5, i % 4 : i % 4 + 3] = 1
        volume = (labels + rng.normal(scale=0.3, size=labels.shape)).astype(np.float32)
        np.savez(tmp_path / "volumes" / f"{i}.npz", volume=volume, labels=labels)
    command = [
        "-m", "tekso.tools.trainer", "--model=image.unet.Volumes", "--logdir=run", "--steps=2",
        "--set=input.source.folder=volumes", "--set=input.source.classes=['background', 'cube']",
        "--set=input.channels=1", "--set=input.volume_shape=[4, 8, 8]", "--set=task.num_classes=2",
        "--set=task.model.width=2", "--set=task.model.num_scales=2", "--set=execution.xla=none",
        "--set=execution.towers=1",
    ]  # fmt: skip
    done = processes.run(command, cwd=tmp_path, merge=True, op_by_op=True)
    assert done.returncode == 0, done.stdout[-3000:]
    records = list(map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines()))
    assert any({"iou", "dice"} <= set(one) for one in records if one["split"] == "dev")
    assert (tmp_path / "run" / "decoded" / "dev" / "masks.png").stat().st_size
    decode = ["--mode=decode", "--logdir=run", "--set=task.decode=volumes/1*.npz"]
    done = processes.run(
        ["-m", "tekso.tools.trainer", *decode], cwd=tmp_path, merge=True, op_by_op=True
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "volumes/11.npz: " in done.stdout
