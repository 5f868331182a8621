"""An input of labelled images: reads, decodes, augments and normalises them on the host."""

from __future__ import annotations

import dataclasses
import itertools
import os
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from tekso.framework import files
from tekso.framework.input import shuffle
from tekso.framework.input.data_digests import check_digest
from tekso.framework.input.input import Batch, ExampleInput, Input, Signature
from tekso.framework.input.skips import BadRecordError, InputError, SkipReport
from tekso.framework.params import REQUIRED, param
from tekso.tasks.classification.task import LABELS, WEIGHTS, X
from tekso.tasks.image.mixing import Mix
from tekso.tasks.image.preparation import Preparation
from tekso.tasks.image.sources import ImageSource
from tekso.tasks.image.steps import ImageStep

OTHER_LABELS, SHARES = "other_labels", "shares"
CLASSES_FILE = "classes.txt"
_MOST_THREADS = 16


@dataclasses.dataclass(frozen=True)
class KnownImages:
    """The parts of an image input that are known without its data.

    Attributes:
      params: Params of the input.
      class_names: names of the classes; (): unknown.
    """

    params: Any
    class_names: tuple[str, ...]

    @property
    def num_classes(self) -> int | None:
        """Number of classes; None: unknown."""
        return len(self.class_names) or None


@dataclasses.dataclass(frozen=True)
class _Example:
    """An example of a batch; see the arrays of `Images`."""

    x: np.ndarray
    label: int
    weight: float = 1.0
    other_label: int = 0
    share: float = 1.0


class Images(ExampleInput):
    """Labelled images of one size.

    In training, every image goes through the steps `augment`; in an evaluation (order "once")
    through the steps `evaluate`. An image that then is not image_size × image_size is resized,
    without keeping its aspect ratio. The random numbers of an example are a function of (seed,
    epoch, index). Image files are decoded in several threads.

    A malformed image is reported, up to `source.max_skipped` of them. Its place in the batch gets
    the next well-formed image of the source, with weight 0: a blank image would count in the
    statistics of BatchNorm.

    Shapes:
      batch:
        "x": [batch, image_size, image_size, channels] float32, (value / 255 - mean) / deviation
        "labels": [batch] int32
        "weights": [batch] float32; 0 for padding and malformed images
        only if `mix` is not empty: "other_labels" [batch] int32, and "shares" [batch] float32, the
          share of "labels" in the target; the rest is that of "other_labels"
    Raises:
      InputError: as the source; the training images have changed since the run began.
      ValueError: a number is out of range.
    """

    class Params(ExampleInput.Params):
        """Params of Images."""

        source: ImageSource.Params = param("Where the images come from.", default=REQUIRED)
        image_size: int = param("Height and width of the images of a batch.", default=REQUIRED)
        channels: int = param("1 for grey, 3 for RGB.", default=3)
        background: int = param("Grey value behind transparent pixels, 0 to 255.", default=255)
        augment: list[ImageStep.Params] = param("Steps of training, in their order.", default=[])
        evaluate: list[ImageStep.Params] = param("Steps of an evaluation.", default=[])
        mix: list[Mix.Params] = param(
            "Mixtures with another image in training; each example uses one of them, drawn "
            "uniformly. Empty: no mixtures.",
            default=[],
        )
        mean: list[float] = param(
            "Subtracted from values in [0, 1]; one number, or one per channel.", default=[0.0]
        )
        deviation: list[float] = param(
            "Divides the difference; one number, or one per channel.", default=[1.0]
        )
        num_threads: int | None = param(
            f"Threads that decode image files. None: the number of CPUs, at most {_MOST_THREADS}.",
            default=None,
        )

    def __init__(self, params: Any, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)
        p = self.params
        if p.num_threads is not None and p.num_threads < 1:
            raise ValueError(
                f"{p.path_of('num_threads')} is {p.num_threads}, but must be at least 1"
            )
        is_training = p.order != "once"
        self.preparation = Preparation(p, is_training=is_training)
        self._mix: list[Mix] = [mix.instantiate() for mix in p.mix] if is_training else []
        self.source: ImageSource = p.source.instantiate(split=p.split)
        self._random_key = shuffle.key_of(self.seed, "augmentation")
        self._pool: ThreadPoolExecutor | None = None
        if self.assets_dir is not None and self.source.class_names and is_training:
            _store_classes(self.assets_dir, self.source.class_names)

    @classmethod
    def signature(cls, params: Any) -> Signature | None:
        """See `Input`."""
        rows, size = params.batch_size, params.image_size
        integers, floats = np.dtype(np.int32), np.dtype(np.float32)
        found: Signature = {
            X: ((rows, size, size, params.channels), floats),
            LABELS: ((rows,), integers),
            WEIGHTS: ((rows,), floats),
        }
        if params.mix:
            found |= {OTHER_LABELS: ((rows,), integers), SHARES: ((rows,), floats)}
        return found

    @classmethod
    def known(cls, params: Any, *, assets_dir: str | None) -> KnownImages:
        """See `Input`."""
        return KnownImages(params, _stored_classes(assets_dir))

    def form(self) -> Signature:
        """See `Input`."""
        told = self.signature(self.params) or {}
        return {name: (shape[1:], dtype) for name, (shape, dtype) in told.items()}

    @property
    def num_examples(self) -> int:
        """Number of images of the split."""
        return len(self.source)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes; (): unknown."""
        return self.source.class_names

    @property
    def num_classes(self) -> int | None:
        """Number of classes; None: unknown."""
        return self.source.num_classes

    def examples(self, index: npt.NDArray[np.int64], epoch: npt.NDArray[np.int64]) -> Batch:
        """Returns the examples with the given indices; see the class.

        Shapes:
          index, epoch: [n]

        Raises:
          InputError: more than `source.max_skipped` images are malformed.
        """
        keys = shuffle.fold(shuffle.fold(self._random_key, epoch), index)
        examples: list[_Example] = []
        found = self._mapped(self._example, index.tolist(), keys.tolist())
        for place, (one, key) in enumerate(zip(found, keys.tolist(), strict=True)):
            if isinstance(one, BadRecordError):
                self.source.skips.add(one.origin, one.reason)
                one = self._replacement(int(index[place]), key)
            examples.append(one)
        batch = {
            X: np.stack([one.x for one in examples]),
            LABELS: np.array([one.label for one in examples], np.int32),
            WEIGHTS: np.array([one.weight for one in examples], np.float32),
        }
        if self.params.mix:
            batch[OTHER_LABELS] = np.array([one.other_label for one in examples], np.int32)
            batch[SHARES] = np.array([one.share for one in examples], np.float32)
        return batch

    def skipped(self) -> SkipReport:
        """Returns a report of the malformed images found so far."""
        return self.source.skipped()

    def describe(self) -> str:
        """Returns a one-line description of the data."""
        classes = f" in {self.num_classes:,} classes" if self.num_classes else ""
        split = f"{self.source.describe()}, {self.params.split}"
        return f"{split}: {self.num_examples:,} images{classes}"

    def check_unchanged(self) -> None:
        """See `Input`: compares a digest of the source with the one in `assets_dir`.

        Raises:
          InputError: the digests differ.
        """
        if self.assets_dir is None:
            return
        crc = zlib.crc32(self.params.source.to_text().encode())
        path = files.join(self.assets_dir, f"images_{self.params.split}_{crc:08x}.json")
        check_digest(
            path,
            self.source.fingerprint(),
            self.describe(),
            what="the images differ from those when the run began",
            remedy="Restore them, or use a new --logdir",
        )

    def _example(self, index: int, key: int) -> _Example | BadRecordError:
        try:
            x, label = self._prepared(index, key)
        except BadRecordError as error:
            return error
        if not self._mix:
            return _Example(x, label)
        random = np.random.Generator(np.random.Philox(key=np.array([key, 1], np.uint64)))
        mix = self._mix[random.integers(len(self._mix))]
        count = self.num_examples
        other = (index + 1 + int(random.integers(max(count - 1, 1)))) % count
        try:
            second, other_label = self._prepared(other, int(random.integers(1 << 63)))
        except BadRecordError:  # it is reported as an example of its own
            return _Example(x, label, other_label=label)
        x, share = mix.mixed(x, second, random)
        return _Example(x, label, other_label=other_label, share=share)

    def _replacement(self, index: int, key: int) -> _Example:
        """Returns the next well-formed image after a malformed one, with weight 0."""
        for offset in range(1, self.num_examples):
            try:
                x, _ = self._prepared((index + offset) % self.num_examples, key)
            except BadRecordError:  # it is reported as an example of its own
                continue
            return _Example(x, 0, weight=0.0)
        return _Example(np.zeros(self.form()[X][0], np.float32), 0, weight=0.0)

    def _prepared(self, index: int, key: int) -> tuple[np.ndarray, int]:
        """Returns an image as the model gets it, and its label.

        Raises:
          BadRecordError: the image is malformed.
        """
        record = self.source[index]
        image = self.preparation.image(record.image, key, self.source.origin(index))
        return self.preparation.normalized(image), record.label

    def _mapped(self, function: Callable[..., Any], *arguments: list[Any]) -> Iterable[Any]:
        """Returns `map(function, *arguments)`, in several threads if images must be decoded."""
        threads = self.params.num_threads or min(os.cpu_count() or 1, _MOST_THREADS)
        first = arguments[0]
        if threads == 1 or len(first) < 2 or not self.source.has_files:
            return map(function, *arguments)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(threads, thread_name_prefix="decode")
        share = -(-len(first) // (2 * threads))
        return self._pool.map(function, *arguments, chunksize=share)


def images_of(input: Input) -> Images:
    """Returns the image input of an input, which may be a `HeldOut`.

    Raises:
      InputError: it reads no images.
    """
    inner = input.inner
    if not isinstance(inner, Images):
        raise InputError(f"{type(inner).__name__} reads no images: use Images as the input")
    return inner


def _store_classes(assets_dir: str, names: tuple[str, ...]) -> None:
    """Writes the names of the classes, one per line, for decoding and export without the data.

    Raises:
      InputError: the run began with other classes.
    """
    path = files.join(assets_dir, CLASSES_FILE)
    text = "".join(f"{name}\n" for name in names)
    if not files.exists(path):
        files.write_atomically(path, text.encode("utf-8", "surrogateescape"))
        return
    then = _stored_classes(assets_dir)
    if then != names:
        where, pair = next(
            (i, pair)
            for i, pair in enumerate(itertools.zip_longest(then, names, fillvalue="(none)"))
            if pair[0] != pair[1]
        )
        raise InputError(
            f"class {where} was {pair[0]!r} when the run began, and is {pair[1]!r} now: restore "
            "the folders of the classes, or use a new --logdir"
        )


def _stored_classes(assets_dir: str | None) -> tuple[str, ...]:
    path = files.join(assets_dir or "", CLASSES_FILE)
    if assets_dir is None or not files.exists(path):
        return ()
    return tuple(files.read(path).decode("utf-8", "surrogateescape").split("\n")[:-1])
