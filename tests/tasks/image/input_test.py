"""Batches of images: pure functions of seed and step, with broken images counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from input_parts import part_of
from small_pictures import Blobs, write_folders

from tekso.framework.input.errors import InputError
from tekso.framework.input.held_out import HeldOut
from tekso.tasks.image.colour import ColourJitter, RandAugment
from tekso.tasks.image.files import ImageFolders
from tekso.tasks.image.image_input import CLASSES_FILE
from tekso.tasks.image.input import Images
from tekso.tasks.image.mixing import CutMix, Mixup
from tekso.tasks.image.steps import (
    CentreCrop,
    Flip,
    InceptionCrop,
    PadAndCrop,
    RandomErasing,
)

EVERYTHING = Images.Params(
    source=Blobs.Params(),
    image_size=8,
    batch_size=6,
    augment=[
        InceptionCrop.Params(),
        Flip.Params(),
        PadAndCrop.Params(padding=1),
        ColourJitter.Params(hue=0.1),
        RandAugment.Params(),
        RandomErasing.Params(probability=0.5),
    ],
    evaluate=[CentreCrop.Params(fraction=1.0)],
    mix=[Mixup.Params(), CutMix.Params()],
)


def folders(root: Path, **params: Any) -> Any:
    write_folders(root / "images", {"cat": 4, "dog": 5})
    source = ImageFolders.Params(folder=str(root / "images"), dev_fraction=0.0, max_skipped=1)
    return Images.Params(
        source=source, image_size=4, batch_size=9, order="sequential", num_threads=3, **params
    )


CLASS_WEIGHTS = [2.0, 0.5, 0.0, 1.0]


class Weighted(Blobs):
    """Images with the weights of their classes."""

    def load(self, split: str) -> Any:
        """Returns them."""
        found = super().load(split)
        return {**found, "weights": np.take(CLASS_WEIGHTS, found["labels"])}


def test_weights_of_a_source_are_those_of_the_examples() -> None:
    given: Any = {"source": Weighted.Params(), "image_size": 8, "batch_size": 7}
    train = Images.Params(**given, augment=[Flip.Params()]).instantiate(seed=1)
    batch = train.batch(0)
    np.testing.assert_array_equal(batch["weights"], np.take(CLASS_WEIGHTS, batch["labels"]))
    plain = Images.Params(**{**given, "source": Blobs.Params()}, augment=[Flip.Params()])
    same = plain.instantiate(seed=1)
    np.testing.assert_array_equal(batch["x"], same.batch(0)["x"])
    assert train.source.fingerprint() != same.source.fingerprint()
    dev = Images.Params(**given, order="once").instantiate()  # its last batch is padded
    count = dev.num_examples % 7
    last = dev.batch(dev.num_batches - 1)
    np.testing.assert_array_equal(
        last["weights"], [*np.take(CLASS_WEIGHTS, last["labels"][:count]), *[0] * (7 - count)]
    )


def test_images_with_weights_are_not_mixed() -> None:
    params = EVERYTHING.copy().set({"source": Weighted.Params()})
    with pytest.raises(InputError, match=r"mix is set, but Weighted gives the images weights"):
        params.instantiate()
    params.set({"mix": []}).instantiate()


def test_values_are_normalised_by_channel() -> None:
    params = Images.Params(
        source=Blobs.Params(),
        image_size=8,
        batch_size=2,
        order="sequential",
        mean=[0.5, 0.1, 0.2],
        deviation=[0.2, 0.3, 0.4],
    )
    input = params.instantiate()
    batch = input.batch(1)
    pixels = input.source.images[2:4].astype(np.float64)
    wanted = (pixels / 255 - [0.5, 0.1, 0.2]) / [0.2, 0.3, 0.4]
    np.testing.assert_allclose(batch["x"], wanted, atol=1e-5)
    np.testing.assert_array_equal(batch["labels"], input.source.labels[2:4])
    assert input.form() == {
        "x": ((8, 8, 3), np.float32), "labels": ((), np.int32), "weights": ((), np.float32)
    }  # fmt: skip


def test_a_batch_depends_on_seed_and_step_and_not_on_the_number_of_processes() -> None:
    one, again, other = (EVERYTHING.instantiate(seed=seed) for seed in (5, 5, 6))
    again.batch(0)
    for parts in (1, 2, 3, 4):
        found = [part_of(again, 3, part, parts) for part in range(parts)]
        for name, array in one.batch(3).items():
            np.testing.assert_array_equal(np.concatenate([b[name] for b in found]), array)
    assert {name: (a.shape[1:], a.dtype) for name, a in one.batch(0).items()} == one.form()
    assert np.abs(one.batch(3)["x"] - other.batch(3)["x"]).max() > 0.1


def test_an_epoch_augments_an_image_anew_and_an_evaluation_does_not() -> None:
    params = EVERYTHING.copy().set(order="sequential", batch_size=12)
    input = params.instantiate()
    first, second = input.batch(0), input.batch(1)
    np.testing.assert_array_equal(first["labels"], second["labels"])
    assert np.abs(first["x"] - second["x"]).max() > 0.1
    dev = HeldOut.Params().instantiate(train=params)
    np.testing.assert_allclose(
        dev.batch(0)["x"][:4], dev.inner.source.images.astype(np.float32) / 255, atol=0.02
    )
    np.testing.assert_array_equal(dev.batch(0)["weights"], [1, 1, 1, 1] + [0] * 8)
    np.testing.assert_array_equal(dev.batch(0)["shares"], np.ones(12))
    assert dev.form() == input.form()


def test_mixtures_have_labels_by_share() -> None:
    plain = EVERYTHING.copy().set(augment=[], order="sequential", mix=[Mixup.Params(alpha=1.0)])
    input = plain.instantiate()
    batch, x = input.batch(0), input.source.images / np.float32(255)
    for row, mixed in enumerate(batch["x"]):
        share = batch["shares"][row]
        candidates = (
            share * x[row] + (1 - share) * x[input.source.labels == batch["other_labels"][row]]
        )
        assert np.abs(candidates - mixed).reshape(len(candidates), -1).max(1).min() < 1e-5
    assert np.ptp(batch["shares"]) > 0.2

    batch = plain.set(mix=[CutMix.Params()]).instantiate().batch(0)
    for row, mixed in enumerate(batch["x"]):
        kept = np.isclose(mixed, x[row], atol=1e-5).all(axis=2).mean()
        assert batch["shares"][row] == pytest.approx(kept, abs=0.02)


def test_a_broken_image_counts_for_nothing_and_is_reported(tmp_path: Path) -> None:
    params = folders(tmp_path)
    whole = params.instantiate().batch(0)
    np.testing.assert_array_equal(whole["labels"], [0] * 4 + [1] * 5)
    (tmp_path / "images" / "cat" / "2.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    input = params.instantiate()
    for _ in range(2):  # it is counted once
        batch = input.batch(0)
        np.testing.assert_array_equal(batch["weights"], [1, 1, 0, 1, 1, 1, 1, 1, 1])
        np.testing.assert_array_equal(np.delete(batch["x"], 2, 0), np.delete(whole["x"], 2, 0))
        np.testing.assert_array_equal(batch["x"][2], whole["x"][3])  # BatchNorm counts it
        assert input.skipped().count == 1
    alone = input.examples(np.array([2]), np.zeros(1, np.int64))
    np.testing.assert_array_equal(alone["x"][0], whole["x"][3])
    assert "cat/2.png" in str(input.skipped())
    (tmp_path / "images" / "dog" / "0.png").unlink()
    with pytest.raises(InputError, match=r"source\.max_skipped=1 are malformed.*"):
        input.batch(0)


def test_threads_give_the_batch_of_one_thread(tmp_path: Path) -> None:
    params = folders(tmp_path, augment=[InceptionCrop.Params(), Flip.Params()])
    one = params.copy().set(num_threads=1).instantiate().batch(1)
    np.testing.assert_array_equal(params.instantiate().batch(1)["x"], one["x"])


def test_classes_and_images_of_a_run_may_not_change(tmp_path: Path) -> None:
    params, assets = folders(tmp_path), str(tmp_path / "assets")
    input = params.instantiate(assets_dir=assets)
    input.check_unchanged()
    assert (tmp_path / "assets" / CLASSES_FILE).read_text() == "cat\ndog\n"
    known = Images.known(params, assets_dir=assets)
    assert known.class_names == ("cat", "dog") and known.num_classes == 2
    first = tmp_path / "images" / "cat" / "0.png"
    first.rename(first.with_name("9.png"))
    message = "the images differ from those when the run began: images in .*, with different values"
    with pytest.raises(InputError, match=message):
        params.instantiate(assets_dir=assets).check_unchanged()
    first.with_name("9.png").unlink()
    with pytest.raises(InputError, match=r"began: then images in .* images.*; now images in"):
        params.instantiate(assets_dir=assets).check_unchanged()
    (tmp_path / "images" / "cat").rename(tmp_path / "images" / "fox")
    with pytest.raises(InputError, match="class 0 was 'cat' when the run began, and is 'dog' now"):
        params.instantiate(assets_dir=assets)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"channels": 2}, "channels is 2"),
        ({"image_size": 0}, "image_size is 0"),
        ({"mean": [0.1, 0.2]}, "mean has 2 numbers"),
        ({"deviation": [0.0]}, "must be positive"),
        ({"num_threads": 0}, "num_threads is 0"),
        ({"mix": [Mixup.Params(alpha=0.0)]}, "alpha is 0.0"),
        ({"augment": [RandAugment.Params(magnitude=11.0)]}, "magnitude is 11.0"),
        ({"augment": [InceptionCrop.Params(least_area=0.0)]}, "must be positive"),
        ({"evaluate": [CentreCrop.Params(fraction=1.5)], "order": "once"}, "fraction is 1.5"),
    ],
)
def test_wrong_numbers_are_named(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        EVERYTHING.copy().set(changes).instantiate()


def test_grey_images_become_rgb_and_colours_grey() -> None:
    for colours, channels in ((1, 3), (3, 1)):
        params = Images.Params(
            source=Blobs.Params(colours=colours), image_size=8, channels=channels, batch_size=3,
            order="sequential",
        )  # fmt: skip
        input = params.instantiate()
        x, images = input.batch(0)["x"] * 255, input.source.images[:3].astype(np.float64)
        luma = images @ [0.299, 0.587, 0.114] if colours == 3 else images[..., 0]
        np.testing.assert_allclose(x, np.repeat(luma[..., None], channels, 3), atol=0.51)
