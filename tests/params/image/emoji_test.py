"""The experiments on emoji, on a small folder in the form of the package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import processes
import pytest
from small_emoji import write_emoji


def trained(
    tmp_path: Path, name: str, encoder: str, *settings: str
) -> tuple[Path, list[dict[str, Any]]]:
    """Returns the run of 2 steps of an experiment, and its figures of dev."""
    small = [
        "--set=input.image_size=16", "--set=input.batch_size=8",
        f"--set={encoder}.num_blocks=[1, 1]", f"--set={encoder}.width=4",
        "--set=execution.towers=1", "--set=execution.xla=none",
    ]  # fmt: skip
    write_emoji(tmp_path / "package", 60, pictures=True)
    command = [
        "-m", "tekso.tools.trainer", f"--model=image.emoji.{name}", "--logdir=run", "--steps=2",
        "--set", "input.source.folder=package", *small, *settings,
    ]  # fmt: skip
    done = processes.run(command, cwd=tmp_path, merge=True, op_by_op=True)
    assert done.returncode == 0, done.stdout[-3000:]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    return tmp_path / "run", [one for one in map(json.loads, lines) if one["split"] == "dev"]


@pytest.mark.slow
def test_emoji_are_captioned_and_scored(tmp_path: Path) -> None:
    short = ["--set=task.searcher.search.beam_size=2", "--set=task.searcher.search.max_length=4"]
    run, records = trained(tmp_path, "Caption", "task.model.encoder", *short)
    assert any({"bleu", "chrf", "cider", "exact_match", "perplexity"} <= set(r) for r in records)
    assert (run / "decoded" / "dev" / "captions.png").stat().st_size
    report = next((run / "decoded" / "test").glob("*.txt")).read_text()
    assert "CIDEr-D" in report
    assert "  reference: thing" in report
    decode = ["--mode=decode", "--logdir=run", "--set=task.decode=package/img/google/64/1F00?.png"]
    done = processes.run(
        ["-m", "tekso.tools.trainer", *decode], cwd=tmp_path, merge=True, op_by_op=True
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "package/img/google/64/1F009.png" in done.stdout

    folder = tmp_path / "pictures"
    folder.mkdir()
    (folder / "a.png").write_bytes((tmp_path / "package/img/google/64/1F009.png").read_bytes())
    (folder / "b.png").write_bytes(b"broken")
    words = ["--logdir=run", "--input=pictures", "--output=captions.txt"]
    done = processes.run(
        ["-m", "tekso.tools.decode", *words], cwd=tmp_path, merge=True, op_by_op=True
    )
    assert done.returncode == 0, done.stdout[-3000:]
    first, second = (tmp_path / "captions.txt").read_text().splitlines()
    path, _, score = first.split("\t")
    assert path == "pictures/a.png"
    assert float(score) < 0.0
    assert second.startswith("pictures/b.png\terror\t")
    done = processes.run(
        ["-m", "tekso.tools.decode", *words, "--pictures=p"], cwd=tmp_path, merge=True
    )
    assert done.returncode == 2
    assert "Captioning makes no pictures" in done.stdout


@pytest.mark.slow
def test_emoji_are_found_by_their_names(tmp_path: Path) -> None:
    _, records = trained(
        tmp_path, "DualEncoder", "task.model.image", '--set=task.decode=["thing 3"]'
    )
    names = {f"{way}_recall_{k}" for way in ("image_to_text", "text_to_image") for k in (1, 5, 10)}
    assert any(names | {"batch_accuracy"} <= set(record) for record in records)
    assert "text: thing 3" in (tmp_path / "run" / "samples.txt").read_text()
