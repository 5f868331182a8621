"""ImageTask: base of the tasks on images: sizes, decoding of images, and export."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import tensorflow as tf

from tekso.framework import files
from tekso.framework.context import StepContext
from tekso.framework.exports import (
    Examples,
    ExportedFunction,
    ExportedInput,
    ExportedOutput,
    Quantization,
)
from tekso.framework.input.held_out import spread
from tekso.framework.input.input import Input
from tekso.framework.input.skips import BadRecordError, Origin, reason_of
from tekso.framework.params import param
from tekso.framework.task import Decoded, Program, Task
from tekso.framework.theta import Theta
from tekso.tasks.classification.task import LABELS, WEIGHTS, X
from tekso.tasks.image.file_answers import AnswersFiles, FileAnswer
from tekso.tasks.image.image_input import held_out, in_order, with_image_sizes
from tekso.tasks.image.preparation import Preparation, pixels_of, scale_and_shift
from tekso.tasks.image.steps import Image


@dataclasses.dataclass(frozen=True)
class AnswerExport:
    """How the answer of an image task is exported.

    Attributes:
      name: name of the exported function.
      doc: what the function returns.
      outputs: the arrays of the answer.
      for_litert: whether LiteRT can run the function.
      compared: name of the output with the class, which int8 should not change; empty: the file
        of int8 has float32 activations.
      unit: what has a class: "images", or "pixels".
    """

    name: str
    doc: str
    outputs: Mapping[str, ExportedOutput]
    for_litert: bool = True
    compared: str = LABELS
    unit: str = "images"


class ImageTask(AnswersFiles, Task):
    """Base of the tasks that answer a question about images of one size, such as their class.

    A subclass implements `answer`, which returns arrays [batch, …] for normalised images, and
    `found`, `summary` and `cells`, which make a record, a line of text and rows of a table of one
    answer. Decoding, tekso-decode and export use them. Params of the model such as `image_size` are
    taken from the input if they are not set.

    Shapes:
      batch: "x" [batch, height, width, channels]; other arrays as the subclass says
    Attributes:
      record_kind: "kind" of the records of decoding.
      background_classes: classes of the model that the input does not have.
      export: how the answer is exported.
    """

    class Params(Task.Params):
        """Params of ImageTask."""

        decode: str = param(
            "Image files that --mode=decode reads: globs, separated by commas. Empty: images of "
            "the split dev.",
            default="",
        )
        num_decoded: int = param("Images that are decoded if no files are given.", default=10)

    record_kind: ClassVar[str] = "image"
    background_classes: ClassVar[int] = 0
    export: ClassVar[AnswerExport]

    @classmethod
    def complete(cls, params: Any, input: Input) -> Any:
        """Sets num_classes, and the sizes of the model, where they are not set.

        Raises:
          ValueError: num_classes is not set, and the input does not know it.
        """
        return with_image_sizes(params, input, further_classes=cls.background_classes)

    def count(self, batch: Mapping[str, np.ndarray]) -> tuple[int, str]:
        """Returns the number of images."""
        return len(batch[X]), "images"

    def answer(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> dict[str, tf.Tensor]:
        """Returns the answer of the model for images.

        Shapes:
          x: [batch, image_size, image_size, channels] float32, normalised
          returns: {name: [batch, …]}
        """
        raise NotImplementedError(f"{type(self).__name__} has no answer()")

    def found(
        self, arrays: Mapping[str, np.ndarray], size: tuple[int, int], names: tuple[str, ...]
    ) -> dict[str, Any]:
        """Returns the entries of the record of an answer.

        Args:
          arrays: the answer for one image, without the dim of the batch.
          size: height and width of the image, in pixels.
          names: names of the classes of the input; (): unknown.
        """
        raise NotImplementedError(f"{type(self).__name__} has no found()")

    def summary(self, record: Mapping[str, Any]) -> str:
        """Returns the entries that `found` returned as a line of text."""
        raise NotImplementedError(f"{type(self).__name__} has no summary()")

    def images_in(self, input: Input) -> Any:
        """Returns the image input of an input, which may be a `HeldOut`.

        Raises:
          InputError: it reads no such images.
        """
        raise NotImplementedError(f"{type(self).__name__} has no images_in()")

    def named(self, images: Any, index: int, example: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Returns the first entries of the record of an image of an input.

        Args:
          images: the input.
          index: number of the image.
          example: its arrays.
        """
        del example
        return {"file": str(images.source.origin(index))}

    def size_of(self, images: Any, index: int) -> tuple[int, int]:
        """Returns height and width of an image of an input, to which `found` refers."""
        return images.params.image_size, images.params.image_size

    @classmethod
    def decodes_data(cls, params: Any) -> bool:
        """Returns whether decoding reads images of the input; see Task."""
        return not params.decode

    def decode(self, program: Program, input: Input) -> Decoded | None:
        """Returns the answers for image files, or for held-out images."""
        if self.params.decode:
            return self.decoded_files(program, input, self.params.decode)
        shown = held_out(self.images_in(input))
        images = shown.input
        index = spread(images.num_examples, self.params.num_decoded)
        batch = images.examples(index, np.zeros_like(index))
        arrays = self._answers(program, batch[X])
        decoded = self.decoded(
            [
                {
                    "kind": self.record_kind,
                    **self.named(images, i, _row(batch, row)),
                    **self.found(_row(arrays, row), self.size_of(images, i), images.class_names),
                }
                for row, i in enumerate(index.tolist())
                if batch[WEIGHTS][row]
            ]
        )
        return Decoded(shown.titled(decoded.text, "images"), decoded.records)

    def file_answers(
        self, program: Program, input: Input, paths: Sequence[str]
    ) -> Iterator[FileAnswer]:
        """See `AnswersFiles`."""
        p, names = input.params, tuple(getattr(input, "class_names", ()))
        preparation = Preparation(p, p.get("evaluate") if "evaluate" in p else ())
        for begin in range(0, len(paths), p.batch_size):
            x = np.zeros([p.batch_size, *_form(p)], np.float32)
            read: list[tuple[dict[str, Any], Image | None]] = []
            for place, path in enumerate(paths[begin : begin + p.batch_size]):
                record: dict[str, Any] = {"kind": self.record_kind, "file": path}
                try:
                    pixels = preparation.pixels(files.read(path), Origin(path))
                    image = preparation.image(pixels, 0, Origin(path))
                    x[place] = preparation.normalized(image)
                    read.append((record, pixels))
                except (BadRecordError, OSError) as error:
                    read.append(({**record, "error": reason_of(error)}, None))
            arrays = self._answers(program, x)
            for row, (record, pixels_read) in enumerate(read):
                if pixels_read is None:
                    yield FileAnswer(record)
                    continue
                one, (height, width) = _row(arrays, row), pixels_read.shape[:2]
                record.update(self.found(one, (height, width), names))
                yield FileAnswer(record, pixels_read, one)

    def _answers(self, program: Program, x: np.ndarray) -> dict[str, np.ndarray]:
        return {name: np.asarray(value) for name, value in program.call(self.answer, x).items()}

    def line(self, record: Mapping[str, Any]) -> str:
        """See `AnswersFiles`."""
        place = record["file"] + (f" {record['number']}" if "number" in record else "")
        return f"{place}: {record['error'] if 'error' in record else self.summary(record)}"

    def exports(self, input: Input) -> dict[str, ExportedFunction]:
        """Returns the function `export` of images of the size of the input."""
        scale, shift = scale_and_shift(input.params)

        def function(theta: Theta, images: tf.Tensor, ctx: StepContext) -> dict[str, tf.Tensor]:
            return self.answer(theta, tf.cast(images, tf.float32) * scale + shift, ctx)

        pixels = ExportedInput(
            "pixels from 0 to 255, RGB or grey", tf.uint8, shape=_form(input.params)
        )
        return {
            self.export.name: ExportedFunction(
                doc=self.export.doc,
                function=function,
                inputs={"images": pixels},
                outputs=dict(self.export.outputs),
                for_litert=self.export.for_litert,
                quantization=self._quantization(),
            )
        }

    def _quantization(self) -> Quantization | None:
        export = self.export
        if not export.compared:
            return None
        return Quantization(self._export_examples, export.compared, export.unit)

    def _export_examples(
        self, input: Input, split: Literal["train", "held_out"], most: int
    ) -> Examples:
        """Yields pixels of well-formed images as inputs of the exported function."""
        train = self.images_in(input)
        if split == "train":
            images = in_order(train, "train")
        else:
            shown = held_out(train)
            if shown.split == "train":
                return
            images = shown.input
        for index in spread(images.num_examples, most).tolist():
            example = images.examples(np.array([index]), np.array([0]))
            if example[WEIGHTS][0]:
                yield {"images": pixels_of(example[X], images.params)}


def _row(arrays: Mapping[str, np.ndarray], row: int) -> dict[str, np.ndarray]:
    return {name: array[row] for name, array in arrays.items()}


def _form(params: Any) -> tuple[int, int, int]:
    return params.image_size, params.image_size, params.channels
