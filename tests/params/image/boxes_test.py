"""Detectors: sizes of SSD300's recipe, and a run on files in COCO's format from start to end."""

from __future__ import annotations

import json
from pathlib import Path

import processes
import pytest
from small_boxes import Rectangles, write_coco

from tekso.framework import registry, schedules
from tekso.framework.run import inspection
from tekso.models.detection.default_boxes import SSD300

SMALL = {
    "input.image_size": "32",
    "input.batch_size": "4",
    "task.model.image_size": "32",
    "task.model.width": "4",
    "task.model.num_blocks": "[1, 1, 1]",
    "task.model.steps": "[8, 16]",
    "task.model.scales": "[8.0, 16.0, 32.0]",
    "task.model.aspect_ratios": "[[2], [2]]",
    "execution.towers": "1",
    "execution.xla": "none",
}


def test_ssd300_has_the_published_sizes_and_schedule() -> None:
    tree = registry.get("image.coco.Ssd300")().tree()
    task = inspection.task_of(tree)
    assert sum(spec.size for spec in task.specs().values() if spec.trainable) == 19_972_534
    assert task.model.levels == SSD300 and len(task.model.default_boxes()) == 8732
    learner = schedules.end_with_run(tree.learner, tree.run.steps)
    schedule = learner.schedule.instantiate()
    epoch = 117_266 // 32
    for step, value in {150: 1.25e-3, 300: 2.5e-3, 40 * epoch: 2.5e-4, 50 * epoch: 2.5e-5}.items():
        assert float(schedule(step)) == pytest.approx(value, rel=1e-5)


@pytest.mark.slow
def test_files_in_the_format_of_coco_are_trained_on_scored_and_searched(tmp_path: Path) -> None:
    (tmp_path / "boxes").mkdir()
    write_coco(tmp_path / "boxes", Rectangles.Params(count=40).instantiate())
    settings = [f"--set={path}={value}" for path, value in SMALL.items()]
    command = [
        "-m", "tekso.tools.trainer", "--model=image.boxes.Ssd", "--logdir=run", "--steps=2",
        "--set=input.source.file=boxes/instances.json", "--set=input.source.folder=boxes",
        *settings,
    ]  # fmt: skip
    done = processes.run(command, cwd=tmp_path, merge=True, op_by_op=True)
    assert done.returncode == 0, done.stdout[-3000:]
    run = tmp_path / "run"
    records = list(map(json.loads, (run / "metrics.jsonl").read_text().splitlines()))
    assert any("ap_50" in one for one in records if one["split"] == "dev")
    assert (run / "decoded" / "dev" / "detections.png").stat().st_size
    assert (run / "assets" / "classes.txt").read_text().split() == ["upright", "flat"]

    decode = ["--mode=decode", "--logdir=run", "--set=task.decode=boxes/1*.png"]
    done = processes.run(
        ["-m", "tekso.tools.trainer", *decode], cwd=tmp_path, merge=True, op_by_op=True
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "boxes/11.png: " in done.stdout

    (tmp_path / "boxes" / "more").mkdir()
    (tmp_path / "boxes" / "more" / "broken.jpg").write_bytes(b"no image")
    decode = ["-m", "tekso.tools.decode", "--logdir=run", "--input=boxes", "--output=out.jsonl"]
    done = processes.run(
        [*decode, "--format=json", "--pictures=drawn", "--set=task.min_score=0.01"],
        cwd=tmp_path,
        merge=True,
        op_by_op=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "read 40 files in" in done.stdout and "1 file cannot be read" in done.stdout
    records = list(map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines()))
    assert sorted(path.name for path in (tmp_path / "drawn").iterdir()) == sorted(
        Path(one["file"]).name for one in records if "objects" in one
    )
    assert [one["file"] for one in records if "error" in one] == ["boxes/more/broken.jpg"]
