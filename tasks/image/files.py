"""Sources of image files: folders of classes, and TFRecords in the layout of ImageNet."""

from __future__ import annotations

from typing import Any

import numpy as np

from tekso.framework import files
from tekso.framework.input.errors import InputError, NoSplitError
from tekso.framework.input.joined import JoinedIndex
from tekso.framework.input.skips import BadRecordError, Origin, reason_of
from tekso.framework.input.sources import digest
from tekso.framework.input.splits import Split
from tekso.framework.input.tfrecords import TfRecords, feature_of
from tekso.framework.params import param
from tekso.tasks.image.decoding import SUFFIXES
from tekso.tasks.image.packed_names import PackedNames
from tekso.tasks.image.sources import ImageSource, LabelledImage
from tekso.tasks.image.split_sources import SplitFolders


class ImageFolders(SplitFolders, ImageSource):
    """Image files in folders, one folder for each class.

        flowers/daisy/1.jpg
        flowers/daisy/2.jpg
        flowers/rose/1.png

    The classes are the folders that have image files, sorted by name; dev and test have the
    classes of the training folder. Other files are ignored, by their suffix.

    Raises:
      InputError: a folder is missing, or has no classes; a held-out class is not in training.
    """

    class Params(SplitFolders.Params, ImageSource.Params):
        """Params of ImageFolders."""

        folder: str = param("Training images: a folder with one folder per class.", default="")

    @classmethod
    def unset(cls, params: Any, split: Split) -> str:
        """See `Source`."""
        if params.folder:
            return ""
        return f"{params.path_of('folder')} is empty: set a folder with a folder per class"

    def __init__(self, params: Any, *, split: Split = "train") -> None:
        super().__init__(params, split=split)
        p = self.params
        if why := self.unset(p, split):
            raise InputError(why)
        own, known = self.own, self._classes(p.folder, "folder")
        self.class_names = tuple(known)
        there = self._classes(own, f"{split}_folder") if own else known
        unknown = sorted(set(there) - set(known))
        if unknown:
            raise InputError(
                f"{p.path_of(f'{split}_folder')}={own} has the class {unknown[0]!r}, which is not "
                f"in the training folder {p.folder}; its classes: {_listed(list(known))}"
            )
        numbers = {name: number for number, name in enumerate(known)}
        self._root, self._classes_here = own or p.folder, list(there)
        self._names = [
            PackedNames(file for file in names if self.takes(f"{name}/{file}"))
            for name, names in there.items()
        ]
        counts = [len(names) for names in self._names]
        if not sum(counts):
            raise NoSplitError(
                f"{own or p.folder}: the split {split} has no images{self.why_empty()}"
            )
        self._index = JoinedIndex(counts)
        self.labels = np.repeat(np.array([numbers[name] for name in there], np.int64), counts)

    def __len__(self) -> int:
        return len(self._index)

    def origin(self, index: int) -> Origin:
        """Returns the position of a record."""
        return Origin(self._path(index))

    def fingerprint(self) -> str:
        """Returns a digest of the names of the files and of their classes."""
        both = zip(self._classes_here, self._names, strict=True)
        names = (f"{name}/{file}" for name, files_here in both for file in files_here)
        return digest(name.encode("utf-8", "surrogateescape") for name in names)

    def describe(self) -> str:
        """Returns a short description of the collection."""
        return f"images in {self.params.folder}"

    def _path(self, index: int) -> str:
        number, within = self._index.place(index)
        return files.join(self._root, self._classes_here[number], self._names[number][within])

    def _classes(self, folder: str, name: str) -> dict[str, PackedNames]:
        """Returns {class: its image files}, sorted."""
        if not files.is_folder(folder):
            raise InputError(f"{self.params.path_of(name)}: there is no folder {folder!r}")
        found = {}
        for one in files.names(folder):
            inside = files.join(folder, one)
            if one.startswith(".") or not files.is_folder(inside):
                continue
            images = PackedNames(file for file in files.names(inside) if is_image_name(file))
            if len(images):
                found[one] = images
        if not found:
            raise InputError(
                f"{self.params.path_of(name)}: {folder!r} has no folder with image files "
                f"({', '.join(SUFFIXES)}): expected {files.join(folder, 'CLASS', 'NAME.jpg')}"
            )
        return found

    def _read(self, index: int) -> LabelledImage:
        labels: Any = self.labels
        path = self._path(index)
        try:
            return LabelledImage(files.read(path), int(labels[index]))
        except OSError as error:
            raise BadRecordError(Origin(path), reason_of(error)) from error


class ImageRecords(TfRecords, ImageSource):
    """Encoded images in TFRecords, in the layout that the TF model garden uses for ImageNet.

    Each record is a tf.train.Example with the image file in "image/encoded" and the class in
    "image/class/label". ImageNet's labels there are 1 to 1,000: a model with 1,000 classes needs
    label_offset -1, one with 1,001 classes (0 is the background) label_offset 0.
    """

    class Params(TfRecords.Params, ImageSource.Params):
        """Params of ImageRecords."""

        feature: str = param("The feature with the image file.", default="image/encoded")
        label_feature: str = param("The feature with the class.", default="image/class/label")
        label_offset: int = param("Added to the stored labels.", default=-1)

    def parse(self, record: bytes, origin: Origin) -> LabelledImage:
        """See `TfRecords`."""
        image = feature_of(record, self.params.feature, origin)
        label = feature_of(record, self.params.label_feature, origin)
        if not isinstance(image, bytes):
            raise BadRecordError(origin, f"{self.params.feature!r} is not one byte string")
        if not isinstance(label, np.ndarray) or label.dtype != np.int64 or label.size != 1:
            raise BadRecordError(origin, f"{self.params.label_feature!r} is not one integer")
        number = int(label[0]) + self.params.label_offset
        if number < 0:
            raise BadRecordError(
                origin,
                f"label {label[0]} is {number} after adding label_offset "
                f"{self.params.label_offset}: {self.params.path_of('label_offset')}=0 uses the "
                "stored labels",
            )
        return LabelledImage(image, number)


def is_image_name(name: str) -> bool:
    """Returns whether the suffix of a file is that of an image; hidden files are none."""
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:10]) + (", …" if len(names) > 10 else "")
