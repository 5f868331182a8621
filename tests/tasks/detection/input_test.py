"""Images with boxes: boxes follow the pixels, padding, and randomness by seed, epoch and index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from input_parts import part_of
from small_boxes import Rectangles, write_coco

from tekso.framework.input.errors import InputError
from tekso.framework.input.held_out import HeldOut
from tekso.tasks.detection.input import BoxImages, objects_of
from tekso.tasks.detection.sources import CocoBoxes
from tekso.tasks.detection.steps import Boxed, BoxFlip, Recolour, SsdCrop, cropped
from tekso.tasks.image.steps import PadAndCrop

STEPS: list[Any] = [SsdCrop.Params(), BoxFlip.Params()]


def boxes(**params: Any) -> Any:
    given = {"source": Rectangles.Params(), "image_size": 60, "batch_size": 5, "max_boxes": 2}
    return BoxImages.Params(**{**given, **params})


def bright(x: np.ndarray) -> list[int]:
    """The box of the bright pixels of an image."""
    rows, columns = np.nonzero(x[..., 0] > 0.5)
    return [rows.min(), columns.min(), rows.max() + 1, columns.max() + 1]


@pytest.mark.parametrize("order", ["shuffled", "once"])
def test_boxes_follow_the_pixels(order: Any) -> None:
    input = boxes(augment=STEPS, order=order, batch_size=12).instantiate(seed=3)
    batch = input.batch(0)
    assert {name: (a.shape, a.dtype) for name, a in batch.items()} == BoxImages.signature(
        input.params
    )
    real = batch["labels"] > 0
    np.testing.assert_array_equal(batch["box_weights"], real)
    np.testing.assert_array_equal(real.sum(1), np.ones(12))
    for x, box in zip(batch["x"], batch["boxes"][:, 0], strict=True):
        # 60 pixels for at least 0.3 of 32: an original pixel has at most 60 / 10 pixels.
        np.testing.assert_allclose(box * 60, bright(x), atol=3)
    sides = batch["boxes"][:, 0, 2:] - batch["boxes"][:, 0, :2]
    assert (len(np.unique(sides.round(3), axis=0)) > 4) == (order == "shuffled")


def test_an_example_depends_on_seed_epoch_and_index_only() -> None:
    input = boxes(augment=[*STEPS, Recolour.Params()]).instantiate(seed=3)
    index, epoch = np.array([7, 2, 7]), np.array([0, 1, 1])
    together = input.examples(index, epoch)
    for row in range(3):
        alone = input.examples(index[row : row + 1], epoch[row : row + 1])
        for name, array in alone.items():
            np.testing.assert_array_equal(together[name][row], array[0])
    assert (together["x"][0] != together["x"][2]).any()
    again = boxes(augment=[*STEPS, Recolour.Params()]).instantiate(seed=3)  # after a restart
    for parts in (2, 3):
        found = [part_of(again, 4, part, parts) for part in range(parts)]
        for name, array in input.batch(4).items():
            np.testing.assert_array_equal(np.concatenate([b[name] for b in found]), array)
    other = boxes(augment=[*STEPS, Recolour.Params()]).instantiate(seed=4)
    assert (other.examples(index, epoch)["x"] != together["x"]).any()


def test_a_crop_keeps_boxes_with_their_centre_inside_and_overlaps_enough() -> None:
    rng = np.random.default_rng(0)
    image = np.zeros((50, 80, 3), np.uint8)
    low = rng.uniform(0, 0.8, (6, 2))
    given = np.concatenate([low, low + 0.2], 1)
    example = Boxed(image, given, np.arange(6, dtype=np.int32), np.ones(6, np.float32))
    part = (10, 20, 40, 70)
    found = cropped(example, part)
    kept = []
    for box, label in zip(given * [50, 80, 50, 80], range(6), strict=True):
        y, x = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
        if 10 < y < 40 and 20 < x < 70:
            kept.append(label)
            own = found.boxes[len(kept) - 1] * [30, 50, 30, 50]
            limits = [(10, 40), (20, 70)] * 2
            wanted = [min(max(v, a), b) - a for v, (a, b) in zip(box, limits, strict=True)]
            np.testing.assert_allclose(own, wanted, atol=1e-9)
    assert found.labels.tolist() == kept and 0 < len(kept) < 6
    assert found.image.shape == (30, 50, 3)

    large = Boxed(image, np.array([[0.1, 0.1, 0.9, 0.9]]), np.ones(1, np.int32), np.ones(1))
    step = SsdCrop.Params(least_overlaps=[0.7]).instantiate()
    step._modes = [0.7]
    for seed in range(5):
        crop = step.apply(large, 0, np.random.default_rng(seed))
        h, w = crop.image.shape[0] / 50, crop.image.shape[1] / 80
        shared = np.prod(crop.boxes[0, 2:] - crop.boxes[0, :2]) * h * w
        assert shared / (0.64 + h * w - shared) > 0.7
    empty = Boxed(image, np.zeros((0, 4)), np.zeros(0, np.int32), np.zeros(0))
    assert step.apply(empty, 0, np.random.default_rng(0)) is empty


def test_a_crop_keeps_an_object_and_not_only_a_crowd() -> None:
    boxes = np.array([[0.0, 0.0, 0.1, 0.1], [0.0, 0.0, 1.0, 1.0]])
    weights, step = np.array([1, 0], np.float32), SsdCrop.Params().instantiate()
    step._modes = [-1.0]  # any overlap
    both = Boxed(np.zeros((50, 80, 3), np.uint8), boxes, np.array([1, 2], np.int32), weights)
    random = np.random.default_rng(0)
    assert all(1 in step.apply(both, 0, random).labels for _ in range(20))
    step._modes = [0.9]  # no part overlaps a crowd that is almost nothing so much
    object_ = np.array([[0.1, 0.1, 0.9, 0.9], [0.0, 0.0, 0.01, 0.01]])
    one = Boxed(both.image, object_, both.labels, weights)
    assert step.apply(one, 0, random).labels.tolist() == [1]
    crowd = Boxed(both.image, boxes, both.labels, np.zeros(2, np.float32))
    assert step.apply(crowd, 0, random) is crowd


def test_steps_that_move_pixels_are_refused() -> None:
    with pytest.raises(ValueError, match="PadAndCrop, which may move pixels"):
        Recolour.Params(step=PadAndCrop.Params()).instantiate()


def test_the_smallest_boxes_are_left_out_and_numbers_are_checked() -> None:
    class Many(Rectangles):
        def objects(self, index: int) -> Any:
            one = super().objects(index)
            sides = np.array([[0, 0, 9, 9], [0, 0, 2, 2], [0, 0, 8, 8]])
            return type(one).of(sides, [1, 2, 2], one.size, is_crowd=[False, False, True])

    for most, labels, weights in (  # a crowd is not trained on, and left out first
        (1, [1], [1]), (2, [1, 2], [1, 1]), (3, [1, 2, 2], [1, 1, 0])
    ):  # fmt: skip
        batch = boxes(source=Many.Params(), max_boxes=most).instantiate().batch(0)
        assert batch["labels"][0].tolist() == labels
        assert batch["box_weights"][0].tolist() == weights
    with pytest.raises(ValueError, match="max_boxes is 0"):
        boxes(max_boxes=0).instantiate()


def test_malformed_images_count_for_nothing(tmp_path: Path) -> None:
    path = write_coco(tmp_path, Rectangles.Params(count=3).instantiate())
    (tmp_path / "1.png").write_bytes(b"no image")
    (tmp_path / "2.png").write_bytes((tmp_path / "0.png").read_bytes())
    path.write_text(path.read_text().replace('"height": 32', '"height": 33', 1))
    source = CocoBoxes.Params(file=str(path), folder=str(tmp_path), dev_fraction=0.0)
    input = boxes(source=source, order="once", batch_size=3).instantiate()
    batch = input.batch(0)
    assert batch["weights"].tolist() == [0, 0, 1] and not batch["labels"][:2].any()
    np.testing.assert_array_equal(batch["x"][:2], batch["x"][[2, 2]])  # for BatchNorm
    assert "40 × 32 pixels, its annotation says 40 × 33" in str(input.skipped())
    with pytest.raises(InputError, match="max_skipped=1 are malformed"):
        boxes(source=source.set(max_skipped=1), order="once").instantiate().batch(0)


def test_objects_of_a_batch_leave_out_padding() -> None:
    params = boxes()
    dev = HeldOut.Params(batch_size=3).instantiate(train=params)  # 4 images
    assert [len(objects_of(dev.inner, step)) for step in (0, 1)] == [3, 1]
    assert dev.batch(1)["weights"].tolist() == [1, 0, 0]
