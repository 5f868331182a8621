"""Sources of boxes: COCO's JSON and Pascal VOC's XML, and what is wrong with a file."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_boxes import Rectangles, write_coco
from small_pictures import png

from tekso.framework.input.errors import InputError
from tekso.tasks.detection.pong import PongFrames, objects_in
from tekso.tasks.detection.sources import CocoBoxes
from tekso.tasks.detection.voc import DeepforestTrees, VocBoxes


def coco(path: Path, split: Any = "train", **params: Any) -> Any:
    given = CocoBoxes.Params(file=str(path), folder=str(path.parent), **params)
    return given.instantiate(split=split)


def test_coco_files_have_the_boxes_that_were_written(tmp_path: Path) -> None:
    wanted = Rectangles.Params(count=5).instantiate()
    found = coco(write_coco(tmp_path, wanted), dev_fraction=0.0)
    assert found.class_names == ("upright", "flat") and len(found) == 5
    for i in range(5):
        one, other = found[i], wanted.objects(i)
        np.testing.assert_array_equal(one.objects.boxes, other.boxes)
        np.testing.assert_array_equal(one.objects.labels, other.labels)
        assert one.objects.size == other.size and one.image == png(wanted.image(i))
        assert not one.objects.is_crowd.any()


def test_a_part_is_held_out_by_name_and_images_without_objects_can_be_left_out(
    tmp_path: Path,
) -> None:
    path = write_coco(tmp_path, Rectangles.Params(count=40).instantiate())
    parts = [coco(path, split, dev_fraction=0.3) for split in ("train", "dev")]
    names = [{source.origin(i).file for i in range(len(source))} for source in parts]
    assert len(names[0] | names[1]) == 40 and not names[0] & names[1] and len(names[1]) > 5

    data = json.loads(path.read_text())
    first, second = (one["image_id"] for one in data["annotations"][:2])
    data["annotations"][0]["iscrowd"] = 1
    data["annotations"][1]["bbox"][2] = 0  # no width
    path.write_text(json.dumps(data))
    everything = coco(path, dev_fraction=0.0)
    assert everything.objects(first - 100).is_crowd.tolist() == [True]
    assert len(everything.objects(second - 100).boxes) == 0
    assert len(coco(path, dev_fraction=0.0, train_on="with_objects")) == 38


@pytest.mark.parametrize(
    "box", [[40, 3, 5, 5], [-9, 3, 9, 5], [3, 32, 5, 5], [3, 3, 5, 0], [3, 3, -5, 5]]
)
def test_boxes_outside_of_the_image_are_left_out(tmp_path: Path, box: list[int]) -> None:
    path = write_coco(tmp_path, Rectangles.Params(count=2).instantiate())  # 40 × 32 pixels
    data = json.loads(path.read_text())
    data["annotations"][0]["bbox"] = box
    data["annotations"][1]["bbox"] = [35, -2, 10, 5]  # partly inside: whole, as COCO scores it
    path.write_text(json.dumps(data))
    source = coco(path, dev_fraction=0.0)
    assert source.objects(0).boxes.shape == (0, 4) and source.objects(0).labels.shape == (0,)
    assert source.objects(1).boxes.tolist() == [[-2, 35, 3, 45]]
    assert source.objects(1).areas.tolist() == [50]


def test_what_is_wrong_with_a_coco_file_is_said(tmp_path: Path) -> None:
    path = write_coco(tmp_path, Rectangles.Params(count=2).instantiate())
    data = json.loads(path.read_text())
    wrong = {
        "not JSON": "{",
        "expected an object with the lists": json.dumps([]),
        "there is no 'bbox'": json.dumps(
            {**data, "annotations": [{"image_id": 100, "category_id": 4}]}
        ),
        "annotation 0 has the image 7 and the category 4": json.dumps(
            {**data, "annotations": [{"image_id": 7, "category_id": 4, "bbox": [0, 0, 1, 1]}]}
        ),
        "image 100 has the height -6 and the width 40, which must be at least 1": json.dumps(
            {**data, "images": [{**data["images"][0], "height": -6}], "annotations": []}
        ),
        "not in COCO's format: cannot convert float infinity": json.dumps(
            {**data, "images": [{**data["images"][0], "height": math.inf}], "annotations": []}
        ),
        "images 0 and 2 have the same id 100": json.dumps(
            {**data, "images": [*data["images"], data["images"][0]]}
        ),
        "categories 0 and 1 have the same id 4": json.dumps(
            {**data, "categories": [{"id": 4, "name": "a"}, {"id": 4, "name": "b"}]}
        ),
        "not JSON: maximum recursion": "[" * 100_000,
    }
    for box in ([1, 2, 3], None, [1, 2, math.inf, 4], [1, 2, "wide", 4]):
        annotation = {**data["annotations"][0], "bbox": box}
        message = f"the bbox of annotation 0 is {box!r}, must be x, y, width and height"
        wrong[re.escape(message)] = json.dumps({**data, "annotations": [annotation]})
    for message, text in wrong.items():
        path.write_text(text)
        with pytest.raises(InputError, match=message):
            coco(path)
    path.write_text(json.dumps(data))
    with pytest.raises(InputError, match=r"set .*test_file, or a test_fraction above 0$"):
        coco(path, "test")
    with pytest.raises(InputError, match=r"train has no images: 0.999 of the data are for dev"):
        coco(path, dev_fraction=0.999)
    with pytest.raises(InputError, match="there is no file"):
        coco(tmp_path / "other.json")
    with pytest.raises(InputError, match="file is empty: set a JSON file"):
        CocoBoxes.Params().instantiate()


def write_voc(
    folder: Path, size: tuple[int, int], boxes: list[tuple[str, int, int, int, int]]
) -> None:
    height, width = size
    pixels = np.arange(height * width * 3, dtype=np.uint32).reshape(height, width, 3) % 251
    (folder / "a.png").write_bytes(png(pixels.astype(np.uint8)))
    objects = "".join(
        f"<object><name>{name}</name><difficult>{int(name == 'bush')}</difficult><bndbox>"
        f"<xmin>{left + 1}</xmin><ymin>{top + 1}</ymin><xmax>{right}</xmax><ymax>{bottom}</ymax>"
        "</bndbox></object>"
        for name, top, left, bottom, right in boxes
    )
    head = f"<size><width>{width}</width><height>{height}</height></size>"
    (folder / "a.xml").write_text(f"<annotation>{head}{objects}</annotation>")


def test_voc_images_are_cut_into_tiles_that_cover_them(tmp_path: Path) -> None:
    boxes = [("tree", 0, 0, 4, 4), ("tree", 2, 8, 6, 14), ("bush", 17, 20, 19, 24)]
    write_voc(tmp_path, (19, 24), boxes)
    params = VocBoxes.Params(folder=str(tmp_path), classes=["tree", "bush"])
    (whole,) = list(params.instantiate().records())
    np.testing.assert_array_equal(whole[1].objects.boxes, [box[1:] for box in boxes])
    assert whole[1].objects.is_crowd.tolist() == [False, False, True]
    assert isinstance(whole[1].image, bytes)
    assert (
        "<xmin>1</xmin><ymin>1</ymin><xmax>4</xmax><ymax>4</ymax>"
        in (tmp_path / "a.xml").read_text()
    )  # VOC's pixels are 1, 2, …, and a box has its last ones

    tiles = params.copy().set(tile=10).instantiate()
    assert len(tiles) == 2 * 3
    seen = np.zeros((19, 24), int)
    for i in range(6):
        one = tiles[i]
        top, left = map(int, tiles.origin(i).file.rsplit(", ", 1)[1].split(":"))
        seen[top : top + 10, left : left + 10] += 1
        assert one.image.shape == (10, 10, 3) and one.objects.size == (10, 10)
        first = (np.arange(3) + 3 * (24 * top + left)) % 251
        np.testing.assert_array_equal(one.image[0, 0], first)
        for box, label in zip(one.objects.boxes, one.objects.labels, strict=True):
            wanted = [
                np.clip(np.subtract(b[1:], [top, left] * 2), 0, 10)
                for b in boxes
                if b[0] == ["tree", "bush"][label - 1]
            ]
            assert any(np.array_equal(box, w) for w in wanted)
    assert seen.min() == 1
    # Columns 0-10, 7-17 and 14-24: of the second tree, 2 of 6 columns are in the first tile.
    assert [len(tiles.objects(i).boxes) for i in range(6)] == [1, 1, 0, 0, 0, 1]


def test_what_is_wrong_with_a_voc_file_is_said(tmp_path: Path) -> None:
    write_voc(tmp_path, (8, 8), [("house", 0, 0, 2, 2)])
    params = VocBoxes.Params(folder=str(tmp_path), classes=["tree"])
    with pytest.raises(InputError, match="the class 'house' is none of tree"):
        params.instantiate()
    (tmp_path / "a.xml").write_text("<annotation><size/></annotation>")
    with pytest.raises(InputError, match=r"an element has no size/height"):
        params.instantiate()
    write_voc(tmp_path, (8, 8), [])
    (tmp_path / "a.png").unlink()
    with pytest.raises(InputError, match="there is no image"):
        params.instantiate()
    with pytest.raises(InputError, match="dev_files is empty"):
        params.instantiate(split="dev")
    with pytest.raises(InputError, match=r"pip download --no-deps deepforest"):
        DeepforestTrees.Params(folder=str(tmp_path)).instantiate()


def test_boxes_of_pong_are_those_of_the_colours() -> None:
    frame = np.full((210, 160, 3), (144, 72, 17), np.uint8)
    frame[:34] = frame[194:] = (236, 236, 236)  # the border has the colour of the ball
    frame[60:76, 140:144] = (92, 186, 92)
    frame[100:104, 77:79] = (236, 236, 236)
    found = objects_in(frame)
    np.testing.assert_array_equal(found.boxes, [[60, 140, 76, 144], [100, 77, 104, 79]])
    assert found.labels.tolist() == [1, 3] and found.size == (210, 160)


def test_without_ale_py_pong_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ale_py", None)
    with pytest.raises(InputError, match="GPL-2: pip install ale-py"):
        PongFrames.Params().instantiate()


def test_episodes_of_pong_differ_by_split_and_repeat() -> None:
    pytest.importorskip("ale_py", reason="the frames of Pong are in the package ale-py")
    params = PongFrames.Params(num_train=6, num_held_out=6)
    train, again, dev = (params.instantiate(split=s) for s in ("train", "train", "dev"))
    assert train.fingerprint() == again.fingerprint() != dev.fingerprint()
    labels = np.concatenate([train.objects(i).labels for i in range(6)])
    assert set(labels.tolist()) <= {1, 2, 3} and len(labels) > 6
