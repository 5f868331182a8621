"""Images from arrays, IDX files, folders of classes and TFRecords; errors say what to change."""

from __future__ import annotations

import gzip
import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from idx_files import idx
from kept_memory import kept
from small_pictures import png, write_folders

from tekso.framework.input.errors import InputError
from tekso.framework.input.skips import BadRecordError
from tekso.framework.input.sources import digest
from tekso.tasks.image.files import ImageFolders, ImageRecords
from tekso.tasks.image.packaged import Digits, FashionMnist, IdxImages, read_idx
from tekso.tasks.image.sources import ImageArrays

PIXELS = np.arange(2 * 5 * 3, dtype=np.uint8).reshape(2, 5, 3)


class Given(ImageArrays):
    """Returns what the test says."""

    made: Any

    def load(self, split: str) -> Any:
        """Returns it."""
        return type(self).made


def of_arrays(images: Any, labels: Any) -> Any:
    Given.made = {"images": images, "labels": labels}
    return Given.Params().instantiate()


def test_npz_files_are_held_out_at_their_end(tmp_path: Path) -> None:
    images, labels = np.arange(10 * 4, dtype=np.uint8).reshape(10, 2, 2), np.arange(10) % 3
    np.savez(tmp_path / "a.npz", images=images, labels=labels)
    params = ImageArrays.Params(file=str(tmp_path / "a.npz"), dev_fraction=0.3)
    train, dev = (params.instantiate(split=split) for split in ("train", "dev"))
    assert (len(train), len(dev), train.num_classes) == (7, 3, 3)
    record = dev[1]
    np.testing.assert_array_equal(record.image[:, :, 0], images[8])
    assert record.label == 8 % 3
    assert train.fingerprint() != dev.fingerprint()
    assert train.fingerprint() == params.instantiate().fingerprint()


def test_floats_and_bools_become_bytes() -> None:
    found = of_arrays([[[0.0, 0.5], [1.0, 0.2]]], [0])
    np.testing.assert_array_equal(found[0].image[:, :, 0], [[0, 128], [255, 51]])
    found = of_arrays(np.array([[[True, False]]]), [0])
    np.testing.assert_array_equal(found[0].image[:, :, 0], [[255, 0]])


@pytest.mark.parametrize(
    ("images", "labels", "reason"),
    [
        (np.zeros((2, 3, 3, 4), np.uint8), [0, 1], "1 or 3 channels, channels last"),
        (np.zeros((2, 3), np.uint8), [0, 1], r"'images' is \[2, 3\]"),
        (np.zeros((0, 3, 3), np.uint8), [], "there are no images"),
        (np.full((1, 3, 3), 200.0), [0], "values from 200 to 200"),
        (np.zeros((1, 3, 3), np.int32), [0], "has the type int32"),
        (np.array([[[0.5]], [[np.nan]]]), [0, 0], r"NaN or infinite values in 1 images \(1\)"),
        (np.zeros((2, 3, 3), np.uint8), [0], r"must be \[2\] integers"),
        (np.zeros((2, 3, 3), np.uint8), [0.0, 1.0], "float64"),
        (np.zeros((2, 3, 3), np.uint8), [0, -1], "label -1 is negative"),
    ],
)
def test_wrong_arrays_are_named(images: Any, labels: Any, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        of_arrays(images, labels)


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ([1.0], r"'weights' is \[1\] float64, but must be \[2\] numbers.*np.take"),
        (["a", "b"], "but must be"),
        ([1.0, -0.5], "that of image 1 is -0.5"),
        ([np.nan, 1.0], "that of image 0 is nan"),
        ([1.0, 1e39], "that of image 1 is 1e\\+39"),
        ([0, 0], "all are 0"),
    ],
)
def test_wrong_weights_are_named(weights: Any, reason: str) -> None:
    Given.made = {"images": np.zeros((2, 3, 3), np.uint8), "labels": [0, 1], "weights": weights}
    with pytest.raises(InputError, match=reason):
        Given.Params().instantiate()


def test_weights_may_be_a_column_of_any_numbers() -> None:
    Given.made = {"images": np.zeros((2, 3, 3), np.uint8), "labels": [0, 1], "weights": [[3], [0]]}
    source = Given.Params().instantiate()
    assert [source[i].weight for i in range(2)] == [3.0, 0.0]
    assert of_arrays(np.zeros((1, 3, 3), np.uint8), [0])[0].weight == 1.0


@pytest.mark.parametrize(("images", "labels"), [(10, 9), (9, 10), (10, None)])
def test_an_npz_file_has_a_label_for_every_image(
    tmp_path: Path, images: int, labels: int | None
) -> None:
    shape = [] if labels is None else [labels]
    arrays = {"images": np.zeros((images, 2, 2), np.uint8), "labels": np.zeros(shape, np.int64)}
    np.savez(tmp_path / "a.npz", **arrays)  # type: ignore[arg-type]
    for split in ("train", "dev"):
        with pytest.raises(InputError, match=rf"'images' is \[{images}, 2, 2\] and 'labels'"):
            ImageArrays.Params(file=str(tmp_path / "a.npz")).instantiate(split=split)


def test_a_damaged_npz_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    path.write_bytes(b"PK\x03\x04 no archive")
    with pytest.raises(InputError, match=r"a\.npz: not a readable \.npz file"):
        ImageArrays.Params(file=str(path)).instantiate()


def test_digits_are_split_between_writers() -> None:
    train, dev = (Digits.Params().instantiate(split=split) for split in ("train", "dev"))
    assert (len(train), len(dev), train.num_classes) == (1347, 450, 10)
    sklearn_datasets = pytest.importorskip("sklearn.datasets", reason="has the digits")
    pixels, labels = sklearn_datasets.load_digits(return_X_y=True)
    np.testing.assert_array_equal(dev.labels, labels[1347:])
    np.testing.assert_allclose(dev[7].image.reshape(64) / 255 * 16, pixels[1354], atol=0.04)
    with pytest.raises(InputError, match="no split 'test', only train and dev"):
        Digits.Params().instantiate(split="test")


def test_a_missing_scikit_learn_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="pip install scikit-learn"):
        Digits.Params().instantiate()


def test_idx_files_are_read_packed_and_unpacked(tmp_path: Path) -> None:
    images, labels = np.arange(5 * 6, dtype=np.uint8).reshape(5, 2, 3), np.arange(5, dtype=np.uint8)
    (tmp_path / "images").write_bytes(gzip.compress(idx(images)))
    (tmp_path / "labels").write_bytes(idx(labels))
    params = IdxImages.Params(folder=str(tmp_path), train_files=["images", "labels"], num_dev=2)
    dev = params.instantiate(split="dev")
    np.testing.assert_array_equal(dev.images[..., 0], images[3:])
    np.testing.assert_array_equal(dev.labels, [3, 4])
    with pytest.raises(InputError, match="num_dev is 5"):
        params.copy().set(num_dev=5).instantiate()
    (tmp_path / "labels").write_bytes(idx(labels)[:-1])
    with pytest.raises(InputError, match=r"labels: not an IDX file.*5 = 5 bytes, but there are 4"):
        params.instantiate()


def test_wrong_idx_headers_are_shown() -> None:
    for data in (b"", b"\0\0\x0d\x01" + bytes(4), b"\x89PNG", b"\0\0\x08\x01\xff\xff\xff\xff"):
        with pytest.raises(ValueError, match="header"):
            read_idx(data)


def test_missing_fashion_mnist_names_its_package(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"dataset-fashion-mnist.*apt-get.*folder=FOLDER"):
        FashionMnist.Params(folder=str(tmp_path)).instantiate()


def test_folders_are_classes_and_other_files_are_ignored(tmp_path: Path) -> None:
    write_folders(tmp_path / "train", {"rose": 2, "daisy": 3})
    write_folders(tmp_path / "val", {"rose": 1})
    (tmp_path / "train" / "rose" / "Thumbs.db").write_bytes(b"x")
    (tmp_path / "train" / "rose" / ".hidden.png").write_bytes(b"x")
    (tmp_path / "train" / "README").write_bytes(b"x")
    params = ImageFolders.Params(
        folder=str(tmp_path / "train"), dev_folder=str(tmp_path / "val"), test_fraction=0.0
    )
    train, dev = (params.instantiate(split=split) for split in ("train", "dev"))
    assert train.class_names == dev.class_names == ("daisy", "rose")
    np.testing.assert_array_equal(train.labels, [0, 0, 0, 1, 1])
    np.testing.assert_array_equal(dev.labels, [1])
    assert dev[0].image == (tmp_path / "val" / "rose" / "0.png").read_bytes()


def test_a_part_of_a_folder_is_held_out_by_name(tmp_path: Path) -> None:
    write_folders(tmp_path, {"a": 40, "b": 40})
    params = ImageFolders.Params(folder=str(tmp_path), dev_fraction=0.25, test_fraction=0.25)
    found = [params.instantiate(split=split) for split in ("train", "dev", "test")]
    names = [[source.origin(i).file for i in range(len(source))] for source in found]
    assert sum(map(len, names)) == 80 == len({*names[0], *names[1], *names[2]})
    assert all(len(own) >= 10 for own in names)
    (tmp_path / "a" / "new.png").write_bytes(b"")
    again = [params.instantiate(split=split) for split in ("train", "dev", "test")]
    assert all(
        set(own) <= {source.origin(i).file for i in range(len(source))}
        for own, source in zip(names, again, strict=True)
    )


def test_a_folder_needs_few_bytes_for_an_image(tmp_path: Path) -> None:
    write_folders(tmp_path, {"a": 1, "b": 1})
    for number in range(2000):
        os.link(tmp_path / "a" / "0.png", tmp_path / "a" / f"{number:06d}.png")
    params = ImageFolders.Params(folder=str(tmp_path), dev_fraction=0.0)
    params.instantiate()  # imports and caches
    source, size = kept(params.instantiate)
    assert len(source) == 2002
    assert size < 2002 * (len("000000.png") + 2 * 8) + 10_000
    names = [f"a/{number:06d}.png" for number in range(2000)]
    wanted = digest(name.encode() for name in ["a/0.png", *names, "b/0.png"])
    assert source.fingerprint() == wanted
    assert source.origin(2001).file == str(tmp_path / "b" / "0.png")


def test_wrong_folders_are_named(tmp_path: Path) -> None:
    write_folders(tmp_path / "train", {"a": 1})
    write_folders(tmp_path / "dev", {"b": 1})
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat" / "1.png").write_bytes(b"")
    for params, reason in (
        (ImageFolders.Params(), "folder is empty"),
        (ImageFolders.Params(folder=str(tmp_path / "none")), "there is no folder"),
        (ImageFolders.Params(folder=str(tmp_path / "flat")), r"CLASS/NAME\.jpg"),
        (
            ImageFolders.Params(folder=str(tmp_path / "train"), dev_folder=str(tmp_path / "dev")),
            "class 'b', which is not in the training folder",
        ),
    ):
        with pytest.raises(InputError, match=reason):
            params.instantiate(split="dev")


def example(**features: Any) -> bytes:
    kinds = {
        bytes: lambda v: tf.train.Feature(bytes_list=tf.train.BytesList(value=[v])),
        int: lambda v: tf.train.Feature(int64_list=tf.train.Int64List(value=[v])),
    }
    found = {name.replace("__", "/"): kinds[type(value)](value) for name, value in features.items()}
    return tf.train.Example(features=tf.train.Features(feature=found)).SerializeToString()


def test_records_of_imagenet_have_labels_from_one(tmp_path: Path) -> None:
    path = str(tmp_path / "train-00000-of-00001")
    image = png(PIXELS)
    with tf.io.TFRecordWriter(path) as writer:
        writer.write(example(image__encoded=image, image__class__label=1000))
        writer.write(example(image__encoded=image, image__class__label=0))
        writer.write(example(image__encoded=image))
        writer.write(example(image__encoded=3, image__class__label=1))
    params = ImageRecords.Params(files=path, dev_fraction=0.0)
    source = params.instantiate()
    assert (source[0].image, source[0].label) == (image, 999)
    for index, reason in ((1, "label_offset"), (2, "no feature"), (3, "not one byte string")):
        with pytest.raises(BadRecordError, match=reason):
            source[index]
    assert params.copy().set(label_offset=0).instantiate()[1].label == 0
    with pytest.raises(InputError, match=r"files is empty: .* --set files='FOLDER/\*'"):
        ImageRecords.Params().instantiate()
