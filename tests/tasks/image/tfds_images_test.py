"""Images of TFDS: a data set that is prepared in a temporary folder; nothing is downloaded."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow_datasets as tfds
from input_parts import part_of

from tekso.framework.input.errors import InputError
from tekso.framework.input.record_frames import walk
from tekso.framework.input.skips import BadRecordError
from tekso.framework.input.tfds import Tfds
from tekso.tasks.image.input import Images
from tekso.tasks.image.steps import Flip
from tekso.tasks.image.tfds_images import TfdsImages

COUNT, SIDE, DAMAGED = 40, 128, 7
PIXELS = np.random.default_rng(0).integers(256, size=(COUNT, 1, 1, 3), dtype=np.uint8)


class TinyPictures(tfds.core.GeneratorBasedBuilder):
    """Images of one colour each, some with a damaged PNG file in the place of an image."""

    VERSION = tfds.core.Version("1.0.0")
    code_path = None  # there is no folder of checksums beside this file

    def _info(self) -> Any:
        features = {
            "image": tfds.features.Image(shape=(SIDE, SIDE, 3)),
            "pixels": tfds.features.Tensor(shape=(1, 1, 3), dtype=np.uint8),
            "depths": tfds.features.Image(shape=(1, 1, 1), dtype=np.float32),
            "label": tfds.features.ClassLabel(names=["ant", "bee"]),
        }
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict(features),
            disable_shuffling=True,
        )

    def _split_generators(self, manager: Any) -> dict[str, Any]:
        return {"train": self._generate(-1), "damaged": self._generate(DAMAGED)}

    def _generate_examples(self) -> None:
        raise NotImplementedError

    def _generate(self, damaged: int) -> Iterator[tuple[int, dict[str, Any]]]:
        for i, pixels in enumerate(PIXELS):
            image: Any = np.broadcast_to(pixels, (SIDE, SIDE, 3))
            if i == damaged:
                image = io.BytesIO(b"\x89PNG\r\n\x1a\n broken")
            depths = np.full((1, 1, 1), i, np.float32)
            yield i, {"image": image, "pixels": pixels, "depths": depths, "label": i % 2}


@pytest.fixture(scope="module", params=["tfrecord", "array_record"])
def data_dir(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("tfds")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_GCE_CHECK", "true")  # TensorFlow would look for a cloud to be in
        TinyPictures(data_dir=str(folder), file_format=request.param).download_and_prepare()
        yield folder


def images(data_dir: Path, split: str = "train", **source: Any) -> Any:
    params = TfdsImages.Params(
        name="tiny_pictures", data_dir=str(data_dir), splits={"train": split}, max_skipped=1
    )
    return Images.Params(
        source=params.set(source), image_size=2, batch_size=9, order="sequential", num_threads=3
    )


def test_images_are_read_with_the_names_of_their_classes(data_dir: Path) -> None:
    input = images(data_dir, "train[3:]").instantiate()
    assert input.class_names == ("ant", "bee") and input.num_classes == 2
    assert input.num_examples == COUNT - 3 and input.is_threaded
    batch = input.batch(1)
    wanted = np.broadcast_to(PIXELS[12:21] / np.float32(255), (9, 2, 2, 3))
    np.testing.assert_allclose(batch["x"], wanted, atol=1e-6)
    np.testing.assert_array_equal(batch["labels"], np.arange(12, 21) % 2)
    pixels = images(data_dir, image_feature="pixels").instantiate()
    assert not pixels.is_threaded
    np.testing.assert_allclose(pixels.batch(0)["x"][:, :1, :1] * 255, PIXELS[:9], atol=1e-4)


def test_what_are_no_images_with_classes_is_named(data_dir: Path) -> None:
    with pytest.raises(InputError, match="no feature 'class', only depths, image, label, pixels"):
        images(data_dir, label_feature="class").instantiate()
    with pytest.raises(InputError, match="'depths' has pixels of the type float32, but must have"):
        images(data_dir, image_feature="depths").instantiate()
    wrong = images(data_dir, label_feature="pixels", max_skipped=0).instantiate()
    with pytest.raises(InputError, match=r"'pixels' is .*, which is not a class"):
        wrong.batch(0)


def test_a_damaged_image_is_named_counted_and_replaced(data_dir: Path) -> None:
    input = images(data_dir, "damaged").instantiate()
    batch, whole = input.batch(0), images(data_dir).instantiate().batch(0)
    np.testing.assert_array_equal(batch["weights"], [1, 1, 1, 1, 1, 1, 1, 0, 1])
    for name in ("x", "labels"):
        np.testing.assert_array_equal(
            np.delete(batch[name], DAMAGED, 0), np.delete(whole[name], DAMAGED, 0)
        )
    np.testing.assert_array_equal(batch["x"][DAMAGED], whole["x"][DAMAGED + 1])
    (skip,) = input.skipped().named
    assert str(skip) == "tiny_pictures/1.0.0/damaged, record 7: not an image in a known format"
    with pytest.raises(InputError, match=r"more than source\.max_skipped=0 are malformed"):
        images(data_dir, "damaged", max_skipped=0).instantiate().batch(0)


def test_an_image_that_tfds_cannot_decode_is_a_malformed_record(data_dir: Path) -> None:
    params = Tfds.Params(name="tiny_pictures", data_dir=str(data_dir), feature="")
    source = params.set(splits={"train": "damaged"}).instantiate()
    with pytest.raises(BadRecordError, match=rf"damaged, record {DAMAGED}: it cannot be read: "):
        source[DAMAGED]
    np.testing.assert_array_equal(source[DAMAGED + 1]["pixels"], PIXELS[DAMAGED + 1])


def test_parts_are_rows_of_the_batch_of_one_process(data_dir: Path) -> None:
    params = images(data_dir, "damaged").set(augment=[Flip.Params()], order="shuffled")
    one, other = params.instantiate(seed=3), params.instantiate(seed=3)
    for step in (5, 0):
        parts = [part_of(other, step, part, 3) for part in range(3)]
        for name, array in one.batch(step).items():
            np.testing.assert_array_equal(np.concatenate([b[name] for b in parts]), array)


@pytest.mark.parametrize("data_dir", ["tfrecord"], indirect=True)
def test_memory_has_no_pixels_but_those_of_a_batch(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_index, in_order = (images(data_dir, "damaged").instantiate() for _ in range(2))
    monkeypatch.setattr(in_order.source, "_format", "riegeli")  # it has no access by index
    np.testing.assert_array_equal(by_index.batch(0)["x"], in_order.batch(0)["x"])
    assert "_whole" not in vars(by_index.source)
    kept = [record.image for record in in_order.source._whole]
    assert len(kept) == COUNT and all(isinstance(image, bytes) for image in kept)
    assert sum(map(len, kept)) < COUNT * SIDE * SIDE * 3 / 50


@pytest.mark.parametrize("data_dir", ["tfrecord"], indirect=True)
def test_a_damaged_record_is_named_with_its_file(data_dir: Path) -> None:
    (path,) = data_dir.glob("**/*-train.tfrecord-*")
    whole = path.read_bytes()
    offsets = np.concatenate(list(walk(io.BytesIO(whole), len(whole)).blocks()))[:, 0]
    damaged = bytearray(whole)
    damaged[offsets[2] + 20] ^= 1
    try:
        path.write_bytes(damaged)
        input = images(data_dir).instantiate()
        assert input.batch(0)["weights"].tolist() == [1, 1, 0, 1, 1, 1, 1, 1, 1]
        assert f"train, record 2: {path}, byte {offsets[2]}: the " in str(input.skipped())
        source = images(data_dir).source.instantiate()
        assert len(list(source.records())) == COUNT - 1
        path.write_bytes(whole[: offsets[-1] + 30])
        input = images(data_dir, f"train[{COUNT - 9}:]").instantiate()
        assert input.batch(0)["weights"].tolist() == [1] * 8 + [0]
        assert "is truncated by the end of the file" in str(input.skipped())
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize("data_dir", ["tfrecord"], indirect=True)
def test_a_file_that_lacks_its_last_records_does_not_shift_those_of_the_next(
    data_dir: Path,
) -> None:
    (path,) = data_dir.glob("**/*-train.tfrecord-*")
    whole = path.read_bytes()
    offsets = np.concatenate(list(walk(io.BytesIO(whole), len(whole)).blocks()))[:, 0]
    source = images(data_dir, "train+damaged", max_skipped=3).source
    wanted = [record.label for _, record in source.instantiate().records()]
    assert len(wanted) == 2 * COUNT
    try:
        path.write_bytes(whole[: offsets[-3]])
        short = source.instantiate()
        found = {origin.offset: record.label for origin, record in short.records()}
        assert found == {i: wanted[i] for i in range(2 * COUNT) if not COUNT - 3 <= i < COUNT}
        assert f"{path}, byte {offsets[-3]}: only {COUNT - 3} records" in str(short.skipped())
    finally:
        path.write_bytes(whole)
