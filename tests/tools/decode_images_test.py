"""tekso-decode on a folder of images: one line for each file, broken files included."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import processes
import pytest
from PIL import Image as Pillow
from small_boxes import Rectangles
from small_masks import Squares
from small_pictures import png, write_folders

from tekso.models.ssd import Ssd
from tekso.models.unet import UNet
from tekso.tasks.detection.input import BoxImages
from tekso.tasks.detection.task import Detection
from tekso.tasks.image.image_input import KnownImages
from tekso.tasks.image.steps import CentreCrop
from tekso.tasks.image.task import ImageClassification
from tekso.tasks.segmentation.input import MaskImages
from tekso.tasks.segmentation.scoring import coloured
from tekso.tasks.segmentation.sources import decode_mask
from tekso.tasks.segmentation.task import Segmentation
from tekso.tools import decode
from tekso.tools.command_errors import UsageError
from tekso.tools.decode_images import PictureFolder, answer, check_pictures, image_files

RNG = np.random.default_rng(0)


def run(*words: str, cwd: Path) -> str:
    done = processes.run(["-m", *words], cwd=cwd, optimized=False)
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
    damaged = {"input": "images/dog/5.png", "dev": "images/dog/4.png"}
    for path in damaged.values():
        (tmp_path / path).write_bytes(b"no image")
    log = run("tekso.tools.trainer", *model, *flags, cwd=tmp_path)
    for name, path in damaged.items():
        assert log.count(f"{name}: 1 skipped\n  {path}: not an image in a known format\n") == 1
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


def test_wrong_folders_and_flags_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty/.thumbnails").mkdir(parents=True)
    (tmp_path / "empty/.thumbnails/a.png").touch()
    with pytest.raises(UsageError, match=r"--input=empty has no image files \(\.bmp"):
        image_files("empty")
    assert decode.main(["tekso-decode", "--logdir=r", "--input=empty", "--beam_size=2"]) == 2
    assert "--beam_size is for translation" in capsys.readouterr().err
    assert decode.main(["tekso-decode", "--logdir=r", "--pictures=made"]) == 2
    assert "--pictures is for images, but --input=- is not a folder" in capsys.readouterr().err


class Fixed:
    """A program that returns the arrays that it is given."""

    def __init__(self, **arrays: Any) -> None:
        self.arrays = arrays

    def call(self, function: Any, x: Any) -> Any:
        del function
        return {name: np.resize(a, (len(x), *np.shape(a))) for name, a in self.arrays.items()}


def segmentation(**params: Any) -> Any:
    data = MaskImages.Params(source=Squares.Params(), image_size=16, batch_size=2, **params)
    known = KnownImages(data, Squares.class_names)
    model = UNet.Params(num_scales=1, width=2, convs_per_scale=1)
    return known, Segmentation.complete(Segmentation.Params(model=model), known).instantiate()


def answers(task: Any, known: Any, folder: Path, *, form: str = "text", **arrays: Any) -> Any:
    """The lines of the answers for a folder, and how many files are broken."""
    paths, file = image_files(str(folder)), io.BytesIO()
    parts: Any = SimpleNamespace(task=task, input=known, program=Fixed(**arrays))
    pictures = PictureFolder(str(folder.parent / "made"), str(folder), paths)
    broken = answer(parts, paths, file, form=form, pictures=pictures)
    return file.getvalue().decode().splitlines(), broken


def test_masks_are_palette_files_of_the_size_of_the_image_that_the_source_of_masks_reads(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "images"
    (folder / "deep").mkdir(parents=True)
    pixels = RNG.integers(256, size=(24, 40, 3), dtype=np.uint8)
    (folder / "a.png").write_bytes(png(pixels))
    Pillow.fromarray(pixels).save(folder / "a.jpg")
    Pillow.fromarray(pixels).convert("CMYK").save(folder / "deep" / "b.jpg")
    (folder / "c.png").write_bytes(png(pixels)[:60])
    labels = np.repeat([0, 1, 2, 2], 4)[:, None] * np.ones((1, 16), np.int32)
    known, task = segmentation()
    lines, broken = answers(task, known, folder, labels=labels.astype(np.int32))
    assert broken == 1
    assert [line.split("\t")[0] for line in lines if "\terror\t" in line] == [f"{folder}/c.png"]
    name = Squares.class_names[2]
    assert f"{folder}/a.jpg\t{name}\t0.5000" in lines and len(lines) == 3 * 3 + 1

    made = tmp_path / "made"
    found = sorted(str(path.relative_to(made)) for path in made.rglob("*.png"))
    assert found == ["a.jpg.png", "a.png.png", "deep/b.png"]
    data = (made / "deep" / "b.png").read_bytes()
    mask = decode_mask(data, None)  # type: ignore[arg-type]
    np.testing.assert_array_equal(mask, np.repeat(np.repeat([0, 1, 2, 2], 6)[:, None], 40, 1))
    shown = np.asarray(Pillow.open(io.BytesIO(data)).convert("RGB"))
    np.testing.assert_array_equal(shown, coloured(mask.astype(np.int64)))

    # A mask of a crop cannot be laid over the image.
    known, task = segmentation(evaluate=[CentreCrop.Params()])
    answers(task, known, folder, labels=labels.astype(np.int32))
    assert Pillow.open(made / "deep" / "b.png").size == (16, 16)


def test_boxes_are_written_in_pixels_of_the_image_and_sure_ones_are_drawn(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "a.png").write_bytes(png(np.zeros((200, 400, 3), np.uint8)))
    data = BoxImages.Params(source=Rectangles.Params(), image_size=48, batch_size=2)
    known = KnownImages(data, Rectangles.class_names)
    model = Ssd.Params(width=4, num_blocks=[1, 1, 1], steps=[8, 16, 48], scales=[10, 20, 30, 40])
    model.set(aspect_ratios=[[2], [2, 3], [2]])
    task: Any = Detection.complete(Detection.Params(model=model), known).instantiate()
    arrays = {
        "boxes": np.array([[0.25, 0.5, 0.5, 1], [0.75, 0.1, 1, 0.2], [0, 0, 0, 0]], np.float32),
        "labels": np.array([1, 2, 0]),
        "scores": np.array([0.75, 0.125, 0], np.float32),
    }
    lines, broken = answers(task, known, folder, **arrays)
    first, second = Rectangles.class_names
    file = f"{folder}/a.png"
    assert not broken and lines == [
        f"{file}\t{first}\t0.7500\t200\t50\t200\t50",
        f"{file}\t{second}\t0.1250\t40\t150\t40\t50",
    ]
    drawn = np.asarray(Pillow.open(tmp_path / "made" / "a.png"))
    assert drawn.shape == (200, 400, 3)
    assert np.flatnonzero(drawn[:, 390, 0]).tolist() == [49, 100]
    assert np.flatnonzero(drawn[60, :, 0]).tolist() == [199]  # the right side is outside

    (record,), _ = answers(task, known, folder, form="json", **arrays)
    assert json.loads(record)["objects"][0]["box"] == [200, 50, 200, 50]
    nothing = {**arrays, "labels": np.zeros(3, int)}
    assert answers(task, known, folder, **nothing)[0] == [f"{file}\tnothing"]


def test_pictures_need_a_task_that_makes_them_and_a_folder_of_their_own(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="ImageClassification makes no pictures"):
        check_pictures(ImageClassification.Params(), "made", "images")
    for wrong in ("images", "images/made"):
        with pytest.raises(UsageError, match="is in the folder of the images"):
            check_pictures(Segmentation.Params(), str(tmp_path / wrong), str(tmp_path / "images"))
    check_pictures(Segmentation.Params(), str(tmp_path / "images_made"), str(tmp_path / "images"))
