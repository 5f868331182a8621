"""tekso-decode on a folder of images: one line for each file, broken files included."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import processes
import pytest
from small_pictures import png, write_folders

from tekso.tools import decode
from tekso.tools.command_errors import UsageError
from tekso.tools.decode_images import image_files

RNG = np.random.default_rng(0)


def run(*words: str, cwd: Path) -> str:
    done = processes.run(["-m", *words], cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_image_of_a_folder_gets_a_line(tmp_path: Path) -> None:
    write_folders(tmp_path / "images", {"cat": 6, "dog": 6}, size=8)
    settings = {
        "input.source.folder": "images",
        "input.source.dev_fraction": "0.3",
        "input.image_size": "8",
        "input.batch_size": "4",
        "task.model.num_blocks": "[1]",
        "task.model.width": "4",
        "execution.xla": "none",
        "run.decode_at_end": "false",
    }
    flags = [f"--set={path}={value}" for path, value in settings.items()]
    model = ["--model=image.folders.ResNet", "--logdir=run", "--steps=2"]
    run("tekso.tools.trainer", *model, *flags, cwd=tmp_path)
    assert (tmp_path / "run" / "decoded" / "dev" / "confusion_matrix.png").stat().st_size

    new = tmp_path / "new" / "deep"
    new.mkdir(parents=True)
    for name in ("1.png", "2.JPG"):
        (new / name).write_bytes(png(RNG.integers(256, size=(9, 9, 3), dtype=np.uint8)))
    (tmp_path / "new" / "0.webp").write_bytes(b"RIFF")
    (tmp_path / "new" / "notes.txt").write_text("no image")
    given = ["tekso.tools.decode", "--logdir=run", "--input=new", "--output=out"]
    run(*given, cwd=tmp_path)
    lines = [line.split("\t") for line in (tmp_path / "out").read_text().splitlines()]
    assert [line[0] for line in lines] == ["new/0.webp", "new/deep/1.png", "new/deep/2.JPG"]
    assert lines[0][1] == "error" and all(line[1] in ("cat", "dog") for line in lines[1:])

    run(*given, "--format=json", cwd=tmp_path)
    records = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    for record, line in zip(records[1:], lines[1:], strict=True):
        assert record["classes"][0]["class"] == line[1]
        assert record["classes"][0]["probability"] == pytest.approx(float(line[2]), abs=1e-4)


def test_wrong_folders_and_flags_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"--input=empty has no image files \(\.bmp"):
        image_files("empty")
    assert decode.main(["tekso-decode", "--logdir=r", "--input=empty", "--beam_size=2"]) == 2
    assert "--beam_size is for translation" in capsys.readouterr().err
