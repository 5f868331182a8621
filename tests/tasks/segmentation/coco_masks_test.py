"""Masks of COCO's JSON: polygons and run-length codes, crowds, overlaps and malformed ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pycocotools import mask as coco
from small_pictures import png

from tekso.framework.input.errors import InputError
from tekso.framework.input.skips import BadRecordError
from tekso.tasks.segmentation.coco_masks import CocoMasks
from tekso.tasks.segmentation.input import MaskImages
from tekso.tasks.segmentation.sources import IGNORED

HEIGHT, WIDTH = 9, 12
RNG = np.random.default_rng(0)


def write(folder: Path, images: list[list[dict[str, Any]]], **changes: Any) -> Path:
    """Writes a file with the annotations of each image; categories have the ids 9 and 4."""
    annotations = []
    for number, own in enumerate(images):
        pixels = RNG.integers(256, size=(HEIGHT, WIDTH, 3), dtype=np.uint8)
        (folder / f"{number}.png").write_bytes(png(pixels))
        annotations += [{"image_id": 100 + number, "category_id": 4, **one} for one in own]
    size = {"height": HEIGHT, "width": WIDTH}
    data = {
        "images": [{"id": 100 + i, "file_name": f"{i}.png", **size} for i in range(len(images))],
        "annotations": annotations,
        "categories": [{"id": 9, "name": "tree"}, {"id": 4, "name": "car"}],
        **changes,
    }
    path = folder / "masks.json"
    path.write_text(json.dumps(data))
    return path


def source(path: Path, split: Any = "train", **params: Any) -> CocoMasks:
    given = {"file": str(path), "folder": str(path.parent), "dev_fraction": 0.0, **params}
    found: CocoMasks = CocoMasks.Params(**given).instantiate(split=split)
    return found


def box(top: int, left: int, bottom: int, right: int) -> np.ndarray:
    found = np.zeros((HEIGHT, WIDTH), np.uint8)
    found[top:bottom, left:right] = 1
    return found


def runs(mask: np.ndarray) -> dict[str, Any]:
    """Returns a mask as numbers of pixels, down the columns, from those outside."""
    flat = mask.T.ravel()
    ends = [*np.flatnonzero(np.diff(flat)) + 1, flat.size]
    counts = np.diff([0, *ends]).tolist()
    return {"size": [HEIGHT, WIDTH], "counts": [0, *counts] if flat[0] else counts}


def compressed(mask: np.ndarray) -> dict[str, Any]:
    """Returns a mask as pycocotools encodes it."""
    found = coco.encode(np.asfortranarray(mask))
    return {"size": found["size"], "counts": found["counts"].decode()}


def test_polygons_and_run_length_codes_are_masks_of_classes(tmp_path: Path) -> None:
    noise = (RNG.random((5, HEIGHT, WIDTH)) < 0.5).astype(np.uint8)
    polygons = [[1, 1, 6, 1, 6.5, 5, 1, 4], [8, 2, 11, 2, 11, 7]]
    own = [[{"segmentation": polygons, "category_id": 9}]]
    own += [
        [
            {"segmentation": runs(one)},
        ]
        for one in noise
    ]
    own += [[{"segmentation": compressed(one)}] for one in noise]
    own += [[]]
    found = source(write(tmp_path, own))
    assert found.class_names == ("background", "car", "tree") and len(found) == 12
    drawn = coco.decode(coco.merge(coco.frPyObjects(polygons, HEIGHT, WIDTH)))
    assert 20 < drawn.sum() < 60
    np.testing.assert_array_equal(found.mask(0), 2 * drawn)
    for i, one in enumerate(noise):
        np.testing.assert_array_equal(found.mask(1 + i), one)
        np.testing.assert_array_equal(found.mask(6 + i), one)
    assert not found.mask(11).any()


def test_crowds_and_overlaps_of_classes_do_not_count(tmp_path: Path) -> None:
    crowd, car, other, tree = box(0, 0, 5, 8), box(1, 1, 4, 5), box(2, 2, 6, 6), box(3, 4, 8, 10)
    own = [
        {"segmentation": runs(crowd), "iscrowd": 1, "category_id": 9},
        {"segmentation": runs(car)},
        {"segmentation": compressed(other)},
        {"segmentation": runs(tree), "category_id": 9},
    ]
    wanted = np.maximum(car, other)
    wanted[tree == 1] = np.where(wanted[tree == 1] == 1, IGNORED, 2)
    wanted[(wanted == 0) & (crowd == 1)] = IGNORED
    np.testing.assert_array_equal(source(write(tmp_path, [own])).mask(0), wanted)
    assert set(np.unique(wanted)) == {0, 1, 2, IGNORED}


BROKEN = {
    "it has no segmentation": None,
    "it has no polygons": [],
    "polygon 1 must be a list of at least 3 pairs": [[0, 0, 5, 0, 5, 5], [0, 0, 5, 0]],
    "polygon 0 must be a list": [[0, 0, 5, 0, 5, "6"]],
    "polygon 0 lies far outside": [[0, 0, 5e8, 0, 5, 5]],
    "its size is [3, 4], but the image has [9, 12]": {"size": [3, 4], "counts": [12]},
    "its counts sum to 107, not to 9 × 12 pixels": {"size": [9, 12], "counts": [100, 7]},
    "its counts are neither numbers": {"size": [9, 12], "counts": [110, -2]},
    "its counts are neither numbers of pixels nor": {"size": [9, 12], "counts": "a\x10"},
    "its counts are neither numbers of pixels nor COCO": {
        "size": [9, 12],
        "counts": compressed(box(2, 3, 5, 9))["counts"][:-1],
    },
}


@pytest.mark.parametrize("message", BROKEN)
def test_a_malformed_segmentation_is_named(message: str, tmp_path: Path) -> None:
    good = {"segmentation": runs(box(0, 0, 2, 2))}
    found = source(write(tmp_path, [[good], [good, {"segmentation": BROKEN[message]}]]))
    assert found.mask(0).sum() == 4
    with pytest.raises(BadRecordError) as caught:
        found.mask(1)
    text = str(caught.value)
    assert "1.png" in text and f"annotation 2 of {tmp_path / 'masks.json'} is malformed" in text
    assert message in text


def test_an_image_with_a_malformed_segmentation_is_counted_and_replaced(tmp_path: Path) -> None:
    good, bad = {"segmentation": runs(box(0, 0, 9, 6))}, {"segmentation": [[0, 0]]}
    params = MaskImages.Params(
        source=CocoMasks.Params(
            file=str(write(tmp_path, [[good], [bad], []])), folder=str(tmp_path), dev_fraction=0.0
        ),
        image_size=12, batch_size=3, order="sequential",
    )  # fmt: skip
    input = params.instantiate()
    batch = input.batch(0)
    assert batch["weights"].tolist() == [1.0, 0.0, 1.0]
    assert batch["labels"][0, :, :6].all() and not batch["labels"][0, :, 6:].any()
    with pytest.raises(InputError, match="annotation 1 of"):
        params.copy().set({"source.max_skipped": 0}).instantiate().batch(0)


def test_what_is_wrong_with_a_file_of_masks_is_said(tmp_path: Path) -> None:
    many = [{"id": i, "name": f"{i}"} for i in range(255)]
    with pytest.raises(InputError, match="255 categories, but masks can have at most 254"):
        source(write(tmp_path, [[]], categories=many))
    with pytest.raises(InputError, match="annotation 0 has the image 100 and the category 5"):
        source(write(tmp_path, [[{"category_id": 5}]]))
    with pytest.raises(InputError, match="the split dev has no images"):
        source(write(tmp_path, [[]]), "dev")


def test_other_masks_have_another_fingerprint(tmp_path: Path) -> None:
    found = [
        source(write(tmp_path, [[{"segmentation": runs(box(0, 0, 2, n))}]])).fingerprint()
        for n in (2, 2, 3)
    ]
    assert found[0] == found[1] != found[2]
