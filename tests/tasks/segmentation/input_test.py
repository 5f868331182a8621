"""Images with masks: masks follow the pixels, sources and what is wrong with them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kept_memory import kept
from small_masks import Squares, write_masks
from small_pictures import png

from tekso.framework.input.errors import InputError
from tekso.framework.input.sources import digest
from tekso.tasks.image.colour import ColourJitter, RandAugment
from tekso.tasks.image.packaged import Digits
from tekso.tasks.image.steps import CentreCrop, Flip, InceptionCrop, PadAndCrop
from tekso.tasks.segmentation.digit_scenes import DigitScenes
from tekso.tasks.segmentation.input import MaskImages
from tekso.tasks.segmentation.sources import MaskArrays, MaskFolders

NEAREST: Any = InceptionCrop.Params(least_area=0.3, interpolation="nearest")


def masks(**params: Any) -> Any:
    given = {"source": Squares.Params(), "image_size": 16, "batch_size": 12, **params}
    return MaskImages.Params(**given)


def test_a_batch_without_steps_has_the_masks() -> None:
    input = masks(order="once").instantiate()
    batch = input.batch(0)
    assert {n: (a.shape, a.dtype) for n, a in batch.items()} == MaskImages.signature(input.params)
    wanted = input.source.masks.astype(np.int32)
    np.testing.assert_array_equal(batch["labels"], np.where(wanted == 255, -1, wanted))


@pytest.mark.parametrize(
    ("steps", "size"),
    [
        ([Flip.Params(), Flip.Params(direction="vertical")], 16),
        ([PadAndCrop.Params(padding=3, value=110)], 16),
        ([PadAndCrop.Params(padding=3, value=110, interpolation="nearest")], 23),
        ([NEAREST, Flip.Params()], 23),
        ([CentreCrop.Params(fraction=0.7, interpolation="nearest")], 16),
    ],
)
def test_masks_follow_the_pixels(steps: Any, size: int) -> None:
    """Every pixel that counts has the brightness of its class, as nothing is interpolated."""
    batch = masks(augment=steps, image_size=size).instantiate(seed=1).batch(0)
    x, labels = batch["x"][..., 0] * 255, batch["labels"]
    for label, (low, high) in {0: (100, 120), 1: (240, 240), 2: (10, 10)}.items():
        values = x[labels == label].round()
        assert len(values) > 20 and values.min() >= low and values.max() <= high
    plain = masks(image_size=size).instantiate(seed=1).batch(0)
    assert (labels != plain["labels"]).any()


def test_an_example_depends_on_seed_epoch_and_index_only() -> None:
    steps = [NEAREST, ColourJitter.Params(), Flip.Params(), PadAndCrop.Params()]
    input = masks(augment=steps).instantiate(seed=3)
    index, epoch = np.array([7, 2, 7]), np.array([0, 1, 1])
    together = input.examples(index, epoch)
    for row in range(3):
        alone = input.examples(index[row : row + 1], epoch[row : row + 1])
        for name, array in alone.items():
            np.testing.assert_array_equal(together[name][row], array[0])
    assert (together["labels"][0] != together["labels"][2]).any()


def test_steps_without_a_form_for_masks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"RandAugment moves pixels, but has no for_masks"):
        masks(augment=[RandAugment.Params()]).instantiate()


@pytest.mark.parametrize("mode", ["L", "P"])
def test_folders_have_the_values_of_grey_and_palette_masks(tmp_path: Path, mode: str) -> None:
    wanted = Squares.Params().instantiate()
    write_masks(tmp_path, wanted, mode=mode)
    source = MaskFolders.Params(folder=str(tmp_path), dev_fraction=0.0, classes=["a", "b", "c"])
    batch = masks(source=source, order="once").instantiate().batch(0)
    names = sorted(range(12), key=lambda i: f"{i}.png")
    there = wanted.masks[names].astype(np.int32)
    np.testing.assert_array_equal(batch["labels"], np.where(there == 255, -1, there))
    with pytest.raises(InputError, match=r"set .*dev_folder, or a dev_fraction above 0$"):
        source.instantiate(split="dev")
    with pytest.raises(InputError, match=r"dev_folder: there is no folder '.*/masks/images'"):
        source.copy().set(dev_folder=str(tmp_path / "masks")).instantiate(split="dev")
    (tmp_path / "images" / "images").symlink_to(tmp_path / "images")
    with pytest.raises(InputError, match=r"folder: there is no folder '.*/images/masks'"):
        source.copy().set(folder=str(tmp_path / "images")).instantiate()
    (tmp_path / "images" / "images").unlink()
    (tmp_path / "masks" / "3.png").unlink()
    with pytest.raises(InputError, match=r"1 images in .* have no mask"):
        source.instantiate()


def test_a_folder_needs_few_bytes_for_an_image_and_its_mask(tmp_path: Path) -> None:
    write_masks(tmp_path, Squares.Params(count=1).instantiate())
    for number in range(1000):
        for name in ("images", "masks"):
            os.link(tmp_path / name / "0.png", tmp_path / name / f"{number:06d}.png")
    params = MaskFolders.Params(folder=str(tmp_path), classes=["a"], dev_fraction=0.0)
    params.instantiate()  # imports and caches
    source, size = kept(params.instantiate)
    assert len(source) == 1001
    assert size < 1001 * (len("000000.png") + 8) + 10_000
    names = ["0.png", *(f"{number:06d}.png" for number in range(1000))]
    assert source.fingerprint() == digest(name.encode() for name in sorted(names))
    assert source.origin(1000).file == str(tmp_path / "images" / "000999.png")


def test_malformed_masks_count_for_nothing(tmp_path: Path) -> None:
    write_masks(tmp_path, Squares.Params(count=5).instantiate())
    (tmp_path / "masks" / "4.png").write_bytes(png(np.full((16, 16), 3, np.uint8)))
    (tmp_path / "masks" / "0.png").write_bytes(b"no image")
    (tmp_path / "masks" / "1.png").write_bytes(png(np.zeros((16, 16, 3), np.uint8)))
    (tmp_path / "images" / "2.png").write_bytes(png(np.zeros((16, 17, 3), np.uint8)))
    source = MaskFolders.Params(folder=str(tmp_path), dev_fraction=0.0, classes=["a", "b", "c"])
    input = masks(source=source, order="once", batch_size=5).instantiate()
    batch = input.batch(0)
    assert batch["weights"].tolist() == [0, 0, 0, 1, 0]
    np.testing.assert_array_equal(batch["x"], batch["x"][[3] * 5])  # for BatchNorm
    report = str(input.skipped())
    for reason in (
        "cannot be decoded",
        "mode RGB",
        "17 × 16 pixels, its mask 16 × 16",
        "value 3, but the source has 3 classes: values must be 0 to 2, or 255 for pixels",
    ):
        assert reason in report


def test_arrays_are_checked() -> None:
    class Wrong(MaskArrays):
        def load(self, split: str) -> Any:
            return {"images": np.zeros((2, 4, 4), np.uint8), "masks": np.zeros((2, 4, 5), np.uint8)}

    with pytest.raises(InputError, match=r"'masks' is \[2, 4, 5\] uint8, but must be \[2, 4, 4\]"):
        Wrong.Params().instantiate()


def test_scenes_of_digits_repeat_and_hold_out_other_writers() -> None:
    pytest.importorskip("sklearn", reason="the digits are in scikit-learn")
    params = DigitScenes.Params(num_train=6, num_held_out=5)
    train, again, dev = (params.instantiate(split=s) for s in ("train", "train", "dev"))
    assert train.fingerprint() == again.fingerprint() and (len(train), len(dev)) == (6, 5)
    assert dev.images.shape == (5, 48, 48, 1) and set(np.unique(dev.masks)) <= set(range(11))
    np.testing.assert_array_less(dev.images[dev.masks == 0], 255)
    assert dev.images[dev.masks > 0].min() >= 64
    # A digit of its own size whose ink is all visible is one of the held-out digits.
    own, other = (digits_of(split, dev.images[..., 0]) for split in ("dev", "train"))
    assert own > 2 and own > other


def digits_of(split: Any, images: np.ndarray) -> int:
    """How many of the digits of a split are in the images, with all of their ink."""
    digits = Digits.Params().instantiate(split=split)
    windows = np.lib.stride_tricks.sliding_window_view(images, (8, 8), axis=(1, 2))
    windows = windows.reshape(-1, 8, 8)
    found = 0
    for one in digits.images[:450, :, :, 0]:
        ink = one >= 100  # above the noise
        found += bool((windows[:, ink] == one[ink]).all(1).any())
    return found
