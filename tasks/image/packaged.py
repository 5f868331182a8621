"""Sets of images that come inside packages: scikit-learn's digits, Debian's Fashion-MNIST."""

from __future__ import annotations

import gzip
import importlib.util
import os
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from tekso.framework import files
from tekso.framework.input.errors import InputError, NoSplitError
from tekso.framework.input.splits import Split
from tekso.framework.params import param
from tekso.tasks.image.sources import IMAGES, LABELS, ImageArrays

_NUM_TRAIN_DIGITS = 1347
_CLOTHES = (
    "T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot",
)  # fmt: skip


class Digits(ImageArrays):
    """1,797 handwritten digits of 8 × 8 pixels in grey, in the package scikit-learn.

    The first 1,347 are for training. The split dev is the last 450, which other people wrote: the
    rows of a writer are neighbours, so a random split would mix writers.

    Raises:
      InputError: scikit-learn is not installed; or there is no such split.
    """

    class Params(ImageArrays.Params):
        """Params of Digits."""

    class_names = tuple("0123456789")

    def load(self, split: Split) -> Mapping[str, Any]:
        """See `ImageArrays`."""
        rows = {"train": slice(_NUM_TRAIN_DIGITS), "dev": slice(_NUM_TRAIN_DIGITS, None)}
        if split not in rows:
            raise NoSplitError(
                f"{self.describe()}: there is no split {split!r}, only train and dev"
            )
        found = importlib.util.find_spec("sklearn")
        if found is None or found.origin is None:
            raise InputError(
                "the digits are in the package scikit-learn, which is not installed: "
                "pip install scikit-learn"
            )
        path = os.path.join(os.path.dirname(found.origin), "datasets", "data", "digits.csv.gz")
        with gzip.open(path, "rt") as file:  # importing sklearn would take a second
            table = np.loadtxt(file, delimiter=",")[rows[split]]
        images = table[:, :-1].reshape(-1, 8, 8) / 16.0
        return {IMAGES: images, LABELS: table[:, -1].astype(np.int64)}

    def describe(self) -> str:
        """Returns a short description of the collection."""
        return "digits of scikit-learn"


class IdxImages(ImageArrays):
    """Images and labels in IDX files, the format of MNIST; the files may be gzip-compressed.

    Raises:
      InputError: a file is missing or malformed.
    """

    class Params(ImageArrays.Params):
        """Params of IdxImages."""

        folder: str = param("Folder of the files.", default="")
        train_files: list[str] = param(
            "Names of the files with images and labels for training and dev.",
            default=["train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"],
        )
        test_files: list[str] = param(
            "Names of the files with images and labels for test.",
            default=["t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"],
        )
        num_dev: int = param(
            "Number of images at the end of the training files for dev.", default=0
        )

    package = ""
    """Sentence that says where to get the files; for errors."""

    def load(self, split: Split) -> Mapping[str, Any]:
        """See `ImageArrays`."""
        p = self.params
        names = p.test_files if split == "test" else p.train_files
        if len(names) != 2:
            raise InputError(
                f"{p.path_of('train_files')} and test_files must be two names, images and labels; "
                f"given: {list(names)}"
            )
        images, labels = (self._read_file(files.join(p.folder, name)) for name in names)
        if split == "test":
            return {IMAGES: images, LABELS: labels}
        if not 0 <= p.num_dev < len(images) or (split == "dev" and not p.num_dev):
            raise InputError(
                f"{p.path_of('num_dev')} is {p.num_dev}, but must be from 1 to {len(images) - 1} "
                "if the split dev is used, otherwise it may be 0"
            )
        end = len(images) - p.num_dev
        rows = slice(end) if split == "train" else slice(end, None)
        return {IMAGES: images[rows], LABELS: labels[rows]}

    def describe(self) -> str:
        """Returns a short description of the collection."""
        return f"IDX files in {self.params.folder or '.'}"

    def _read_file(self, path: str) -> np.ndarray:
        try:
            data = files.read(path)
        except FileNotFoundError as error:
            raise InputError(
                f"there is no file {path}. {self.package or 'Set the folder of the IDX files'}: "
                f"{self.params.path_of('folder')}=FOLDER"
            ) from error
        try:
            return read_idx(gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data)
        except (ValueError, EOFError, OSError, zlib.error) as error:
            raise InputError(f"{path}: not an IDX file of bytes: {error}") from error


class FashionMnist(IdxImages):
    """70,000 pictures of clothes of Zalando, 28 × 28 pixels in grey, in a Debian package.

    The last 5,000 of the 60,000 training images are dev; test is the 10,000 official test images.
    """

    class Params(IdxImages.Params):
        """Params of FashionMnist."""

        folder: str = param(
            "Folder of the four IDX files.", default="/usr/share/datasets/fashion-mnist"
        )
        num_dev: int = param(
            "Number of images at the end of the training files for dev.", default=5000
        )

    class_names = _CLOTHES
    package = (
        "The files are in the Debian package dataset-fashion-mnist: apt-get install "
        "dataset-fashion-mnist; or, without root: apt-get download dataset-fashion-mnist && "
        "dpkg-deb -x dataset-fashion-mnist_*.deb FOLDER, and set the folder that has them"
    )


def read_idx(data: bytes) -> np.ndarray:
    """Returns the array in an IDX file of unsigned bytes.

        0 0 8 n   size of dim 1 (4 bytes, big-endian)  …  size of dim n   bytes

    Raises:
      ValueError: the header is wrong, or the number of bytes differs from the header.
    """
    if len(data) < 4 or data[:3] != b"\0\0\x08" or not 1 <= data[3] <= 4:
        raise ValueError(f"the header is {data[:4].hex(' ')}, but must be 00 00 08 and 1 to 4 dims")
    begin = 4 + 4 * data[3]
    sizes = [int.from_bytes(data[at : at + 4], "big") for at in range(4, begin, 4)]
    count = int(np.prod(sizes, dtype=np.int64))
    if len(data) != begin + count:
        raise ValueError(
            f"the header says {' × '.join(map(str, sizes))} = {count:,} bytes, but there are "
            f"{max(len(data) - begin, 0):,}"
        )
    return np.frombuffer(data, np.uint8, offset=begin).reshape(sizes)
