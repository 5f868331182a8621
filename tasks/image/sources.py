"""Sources of labelled images: their base class, and sources in memory."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tekso.framework import files
from tekso.framework.input.errors import InputError
from tekso.framework.input.skips import Origin
from tekso.framework.input.sources import Source, digest
from tekso.framework.input.splits import (
    Split,
    check_fractions,
    held_out_fractions,
    load_split,
    part,
)
from tekso.framework.params import param

IMAGES, LABELS, WEIGHTS = "images", "labels", "weights"


@dataclasses.dataclass(frozen=True)
class LabelledImage:
    """A record of an image source.

    Attributes:
      image: the bytes of an image file; or pixels, [height, width, channels] uint8.
      label: number of the class, from 0.
      weight: weight of the image in the loss and the metrics; 0: it does not count.
    """

    image: bytes | np.ndarray
    label: int
    weight: float = 1.0


class AnySource(Source):
    """Base class of all sources of images, with labels, boxes or masks.

    Attributes:
      class_names: names of the classes in the order of their numbers; (): unknown.
      has_files: whether records have image files, which several threads should read and decode.
    """

    class Params(Source.Params):
        """Params of AnySource."""

    class_names: tuple[str, ...] = ()
    has_files = True

    @property
    def num_classes(self) -> int | None:
        """Number of classes; None: unknown."""
        return len(self.class_names) or None


class ImageSource(AnySource):
    """Base class of sources whose records are `LabelledImage`s.

    Attributes:
      labels: [records] the labels of all records; None: they are known only record by record.
      has_weights: whether records have other weights than 1.
    """

    class Params(AnySource.Params):
        """Params of ImageSource."""

    labels: npt.NDArray[np.int64] | None = None
    has_weights = False

    @property
    def num_classes(self) -> int | None:
        """Number of classes; None: unknown."""
        if self.class_names:
            return len(self.class_names)
        return None if self.labels is None else int(self.labels.max()) + 1


def class_name(names: tuple[str, ...], label: int) -> str:
    """Returns the name of a class; its number if it has none."""
    return names[label] if label < len(names) else str(label)


class ImageArrays(ImageSource):
    """Images in memory, from a method `load` or an .npz file with arrays "images" and "labels".

        class Cells(ImageArrays):
            def load(self, split):
                x, labels = read_cells(split)
                return {"images": x, "labels": labels}

    Shapes:
      images: [n, height, width] or [n, height, width, channels], channels 1 or 3; uint8, bool, or
        floats from 0 to 1, which are rounded to 256 values
      labels: [n] or [n, 1] integers
      weights, optional, only from `load`: [n] or [n, 1] numbers from 0, such as the weight of the
        class of an image
    Raises:
      InputError: an array is missing or has a wrong shape, type or range; a file cannot be read.
    """

    class Params(ImageSource.Params):
        """Params of ImageArrays."""

        file: str = param("Training images: an .npz file.", default="")
        dev_file: str = param("File for dev; empty: the end of `file` is held out.", default="")
        test_file: str = param("File for test; empty: the end of `file` is held out.", default="")
        dev_fraction: float = param("Fraction of `file` for dev, without dev_file.", default=0.1)
        test_fraction: float = param("Fraction of `file` for test, without test_file.", default=0.0)
        classes: list[str] = param("Names of the classes; empty: unknown.", default=[])

    has_files = False

    def __init__(self, params: Any, *, split: Split = "train") -> None:
        super().__init__(params, split=split)
        found = load_split(self, split)
        what = f"{self.describe()}, split {split}"
        if not isinstance(found, Mapping) or not {IMAGES, LABELS} <= set(found):
            given = sorted(found) if isinstance(found, Mapping) else type(found).__name__
            raise InputError(f"{what}: expected the arrays {IMAGES!r} and {LABELS!r}, got {given}")
        self.images = as_images(what, found[IMAGES])
        self.labels = as_labels(what, found[LABELS], len(self.images))
        self.has_weights = WEIGHTS in found
        self._weights = as_weights(what, found[WEIGHTS], self.labels) if self.has_weights else None
        self.class_names = tuple(self.params.classes) or self.class_names

    @classmethod
    def unset(cls, params: Any, split: Split) -> str:
        """See `Source`."""
        own = {"train": "", "dev": params.dev_file, "test": params.test_file}[split]
        if params.file or own or cls.load is not ImageArrays.load:
            return ""
        path = params.path_of("file")
        return f"{path} is empty: set the .npz file to read, or override load()"

    def load(self, split: Split) -> Mapping[str, Any]:
        """Returns {"images": array, "labels": array} of a split, the same in every call.

        A subclass may also return "weights".
        """
        if why := ImageArrays.unset(self.params, split):
            raise InputError(why)
        p = self.params
        own = {"train": "", "dev": p.dev_file, "test": p.test_file}[split]
        if own:
            return _read_npz(own)
        check_fractions(p)
        arrays = _read_npz(p.file)
        _check_counts(p.file, arrays)
        fractions = held_out_fractions(p, "file")
        rows = slice(*part(len(arrays.get(LABELS, ())), split, *fractions))
        return {name: array[rows] for name, array in arrays.items()}

    def __len__(self) -> int:
        return len(self.images)

    def origin(self, index: int) -> Origin:
        """Returns the position of a record."""
        return Origin(f"{self.describe()}, {self.split}", index, "record")

    def fingerprint(self) -> str:
        """Returns a digest of the records."""
        return self._fingerprint

    @functools.cached_property
    def _fingerprint(self) -> str:
        parts = [str(self.images.shape).encode(), self.images.tobytes()]
        parts.append(np.asarray(self.labels).tobytes())
        return digest(parts if self._weights is None else [*parts, self._weights.tobytes()])

    def describe(self) -> str:
        """Returns a short description of the collection."""
        return self.params.file or type(self).__name__

    def _read(self, index: int) -> LabelledImage:
        labels: Any = self.labels
        weight = 1.0 if self._weights is None else float(self._weights[index])
        return LabelledImage(self.images[index], int(labels[index]), weight)


def as_images(what: str, value: Any) -> npt.NDArray[np.uint8]:
    """Returns images as uint8, [n, height, width, channels].

    Raises:
      InputError: the shape, type or range is wrong; or there are no images.
    """
    images = np.asarray(value)
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4 or images.shape[3] not in (1, 3):
        raise InputError(
            f"{what}: {IMAGES!r} is {list(images.shape)}, but must be [n, height, width] or "
            "[n, height, width, channels] with 1 or 3 channels, channels last"
        )
    if not images.size:
        raise InputError(f"{what}: there are no images: {IMAGES!r} is {list(images.shape)}")
    if images.dtype == np.uint8:
        return images
    if images.dtype == np.bool_:
        return images.astype(np.uint8) * np.uint8(255)
    if images.dtype.kind == "f" and np.min(images) >= 0.0 and np.max(images) <= 1.0:
        return np.round(images * 255.0).astype(np.uint8)
    if images.dtype.kind == "f" and not np.isfinite(images).all():
        wrong = np.flatnonzero(~np.isfinite(images).all(axis=(1, 2, 3)))
        which = ", ".join(map(str, wrong[:5])) + (", …" if len(wrong) > 5 else "")
        raise InputError(
            f"{what}: {IMAGES!r} has NaN or infinite values in {len(wrong):,} images ({which})"
        )
    raise InputError(
        f"{what}: {IMAGES!r} has the type {images.dtype} and values from {np.min(images):g} to "
        f"{np.max(images):g}, but must be uint8, bool, or floats from 0 to 1"
    )


def as_labels(what: str, value: Any, count: int) -> npt.NDArray[np.int64]:
    """Returns labels as int64, [count].

    Raises:
      InputError: the number, the shape or the type is wrong; or a label is negative.
    """
    labels = np.asarray(value)
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.shape != (count,) or labels.dtype.kind not in "bui":
        raise InputError(
            f"{what}: {LABELS!r} is {list(labels.shape)} {labels.dtype}, but must be [{count}] "
            "integers, one number per image"
        )
    if labels.min() < 0:
        raise InputError(f"{what}: label {labels.min()} is negative: number the classes from 0")
    return labels.astype(np.int64)


def as_weights(what: str, value: Any, labels: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Returns the weights of images as float32, [count].

    Raises:
      InputError: the number, the shape or the type is wrong; a weight is negative or not finite; or
        all are 0.
    """
    weights = np.asarray(value)
    if weights.ndim == 2 and weights.shape[1] == 1:
        weights = weights[:, 0]
    if weights.shape != labels.shape or weights.dtype.kind not in "buif":
        raise InputError(
            f"{what}: {WEIGHTS!r} is {list(weights.shape)} {weights.dtype}, but must be "
            f"[{len(labels)}] numbers, one per image. From weights of the classes: "
            "np.take(class_weights, labels)"
        )
    wrong = np.flatnonzero(~((weights >= 0) & (weights <= np.finfo(np.float32).max)))
    if len(wrong) or not weights.any():
        given = f"that of image {wrong[0]} is {weights[wrong[0]]}" if len(wrong) else "all are 0"
        raise InputError(f"{what}: {WEIGHTS!r} must be finite numbers from 0, not all 0; {given}")
    return weights.astype(np.float32)


def _check_counts(path: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Checks that there are as many labels as images, before both are split.

    Raises:
      InputError: there are not.
    """
    counts = {array.shape[:1] for array in arrays.values()}
    if len(arrays) == 2 and (len(counts) > 1 or () in counts):
        images, labels = (list(arrays[name].shape) for name in (IMAGES, LABELS))
        raise InputError(
            f"{path}: {IMAGES!r} is {images} and {LABELS!r} is {labels}, but there must be one "
            "label per image"
        )


def _read_npz(path: str) -> dict[str, np.ndarray]:
    """Returns the arrays of an .npz file.

    Raises:
      InputError: the file is damaged, or has Python objects.
      OSError: it cannot be opened.
    """
    with files.open(path) as file:
        try:
            with np.load(file) as archive:
                return {name: archive[name] for name in archive.files if name in (IMAGES, LABELS)}
        except Exception as error:  # NumPy raises errors of several classes for damaged files
            raise InputError(f"{path}: not a readable .npz file: {error}") from error
