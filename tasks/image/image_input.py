"""Base of the inputs of images: decodes and normalises them, and knows the names of classes."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, TypeVar

from tekso.framework import files
from tekso.framework.input.errors import InputError
from tekso.framework.input.input import Batch, Input
from tekso.framework.input.prepared import MOST_THREADS, PreparedInput
from tekso.framework.input.shown_examples import ShownExamples, held_out_or_training
from tekso.framework.input.skips import BadRecordError
from tekso.framework.params import REQUIRED, param
from tekso.tasks.classification.task import X
from tekso.tasks.image.sources import AnySource
from tekso.tasks.unset_sizes import set_sizes

CLASSES_FILE = "classes.txt"

AnyImages = TypeVar("AnyImages", bound="LabelledInput")


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


class LabelledInput(PreparedInput):
    """Base of the inputs of images or volumes whose source names the classes of its labels.

    A malformed record is reported, up to `source.max_skipped` of them. Its place in the batch gets
    the next well-formed one, with weight 0: a blank one would count in the statistics of BatchNorm.

    The names of the classes are written to `classes.txt` in the assets of the run.
    """

    class Params(PreparedInput.Params):
        """Params of LabelledInput."""

    def __init__(self, params: Any, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)
        if self.assets_dir is not None and self.source.class_names and self.is_training:
            _store_classes(self.assets_dir, self.source.class_names)

    @classmethod
    def known(cls, params: Any, *, assets_dir: str | None) -> KnownImages:
        """See `Input`."""
        return KnownImages(params, _stored_classes(assets_dir))

    @property
    def is_threaded(self) -> bool:
        """Whether there are image files to decode."""
        found: bool = self.source.has_files
        return found

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes; (): unknown."""
        found: tuple[str, ...] = self.source.class_names
        return found

    @property
    def num_classes(self) -> int | None:
        """Number of classes; None: unknown."""
        found: int | None = self.source.num_classes
        return found

    def in_place_of(self, index: int, key: int) -> Batch:
        """See `PreparedInput`: the values of the next well-formed record, with weight 0."""
        for offset in range(1, self.num_examples):
            try:
                example = self.prepared((index + offset) % self.num_examples, key)
            except BadRecordError:  # it is reported as an example of its own
                continue
            return {**self.blank(), X: example[X]}
        return self.blank()

    def describe(self) -> str:
        """Returns a one-line description of the data."""
        classes = f" in {self.num_classes:,} classes" if self.num_classes else ""
        return f"{super().describe()}{classes}"


class ImageInput(LabelledInput):
    """Base of the inputs of images of one size; see `LabelledInput`."""

    class Params(LabelledInput.Params):
        """Params of ImageInput."""

        source: AnySource.Params = param("Where the images come from.", default=REQUIRED)
        image_size: int = param("Height and width of the images of a batch.", default=REQUIRED)
        channels: int = param("1 for grey, 3 for RGB.", default=3)
        background: int = param("Grey value behind transparent pixels, 0 to 255.", default=255)
        mean: list[float] = param(
            "Subtracted from values in [0, 1]; one number, or one per channel.", default=[0.0]
        )
        deviation: list[float] = param(
            "Divides the difference; one number, or one per channel.", default=[1.0]
        )
        num_threads: int | None = param(
            f"Threads that decode image files. None: the number of CPUs, at most {MOST_THREADS}.",
            default=None,
        )

    unit = "images"


def in_order(train: AnyImages, split: str) -> AnyImages:
    """Returns one pass over a split, prepared as in an evaluation."""
    found: AnyImages = (
        train.params.copy()
        .set(split=split, order="once")
        .instantiate(seed=train.seed, assets_dir=train.assets_dir, train=train.params)
    )
    return found


def held_out(train: AnyImages) -> ShownExamples[AnyImages]:
    """Returns the held-out images of a training input; training images if there are none."""
    return held_out_or_training(
        lambda split: in_order(train, split), lambda: in_order(train, "train")
    )


def with_image_sizes(params: Any, input: Input, *, further_classes: int = 0) -> Any:
    """Returns Params of a task with num_classes and the sizes of its model, where they are not set.

    Args:
      params: Params of a task with `num_classes` and `model`.
      input: the training input, or what its `known` returns.
      further_classes: classes of the model that the input does not have, such as a background.

    Raises:
      ValueError: num_classes is not set, and the input does not know it.
    """
    params = params.copy()
    model, data = params.model, input.params
    if params.num_classes is REQUIRED:
        found = getattr(input, "num_classes", None)
        if found is None:
            raise ValueError(
                "task.num_classes is not set: it is not known before the data is read. This mode "
                "does not read it, or the source has no list of its classes: set the number, as in "
                "--set task.num_classes=10"
            )
        params.num_classes = found
    if "image_size" not in data:  # not of an `ImageInput`: the sizes must be set
        return params
    pixels, classes = data.image_size**2 * data.channels, params.num_classes + further_classes
    sizes = {"image_size": data.image_size, "channels": data.channels, "classes": classes}
    set_sizes(model, {**sizes, "input_dim": pixels, "output_dim": classes})
    return params


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
