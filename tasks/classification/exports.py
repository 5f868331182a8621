"""Exports classifiers: arrays or texts in, the probabilities of the classes out.

    text ─ bytes, padded with 0 ─ "classify" ─ name and probability of the likeliest class

Legend: B examples, L length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeGuard

import tensorflow as tf

from tekso.framework.exports import (
    ExportedFunction,
    ExportedInput,
    ExportedOutput,
    ExportedTexts,
    lengths_up_to,
)
from tekso.framework.input.bucketing import BucketedInput
from tekso.framework.input.errors import InputError
from tekso.framework.input.forms import form_of
from tekso.framework.input.input import Input
from tekso.tasks.classification.labelled_texts import LabelledTexts, checked_length, class_name

CLASSIFY = "classify"
_OUTPUTS = {
    "probabilities": ExportedOutput("float32, [examples, classes]"),
    "labels": ExportedOutput("the likeliest class, int32, [examples]"),
}

Run = Callable[..., Mapping[str, tf.Tensor]]
"""Called with (theta, x, ctx); returns "probabilities" and "labels"."""


def classifier_exports(run: Run, input: Input) -> dict[str, ExportedFunction]:
    """Returns {"classify": function}, of bytes for `LabelledTexts`, otherwise of arrays "x".

    Args:
      run: the model.
      input: the input, or what is known of it.

    Raises:
      InputError: the shape of the examples is in data that cannot be read, or the rows of a
        `BucketedInput` are not of numbers.
    """
    if has_texts(input):
        length = checked_length(input.params)
        ids = ExportedInput("bytes of UTF-8, padded with 0", has_length=True)
        return {CLASSIFY: _exported(run, {"ids": ids}, lengths_up_to(length), "texts")}
    if not hasattr(input, "form"):
        raise InputError(
            f"{type(input.params).owner.__name__}: the shape of 'x' is in the data, which cannot "
            "be read here; exporting a classifier needs it"
        )
    if isinstance(input, BucketedInput):
        return {CLASSIFY: _exported(run, {"x": _rows(input)}, input.padded_lengths, "rows")}
    shape, dtype = (input.form() or form_of(input.batch(0)))["x"]
    x = ExportedInput("features, as in training", tf.as_dtype(dtype), shape=tuple(map(int, shape)))
    return {CLASSIFY: _exported(run, {"x": x}, [1], "examples of the shape of training")}


def _rows(input: BucketedInput) -> ExportedInput:
    """Returns rows of unequal length as the input of an exported function.

    Raises:
      InputError: the arrays "x" of the input are no rows.
    """
    x = input.batch(0)["x"]
    if x.ndim < 2:
        raise InputError(
            f"{type(input).__name__}: 'x' is [examples], but a function of rows needs [examples, "
            "length, …]: define exports() of the task"
        )
    shape = tuple(map(int, x.shape[2:]))
    return ExportedInput("rows, padded with 0", tf.as_dtype(x.dtype), has_length=True, shape=shape)


def has_texts(input: Input) -> TypeGuard[LabelledTexts]:
    """Returns whether an input, or what is known of it, is that of texts."""
    return issubclass(type(input.params).owner, LabelledTexts)


def _exported(
    run: Run, inputs: Mapping[str, ExportedInput], lengths: list[int], of: str
) -> ExportedFunction:
    return ExportedFunction(
        doc=f"The probability of every class for {of}.",
        function=run,
        inputs=inputs,
        outputs=_OUTPUTS,
        lengths=lengths,
        for_litert=True,
    )


def classifier_text_exports(input: Input, num_classes: int) -> dict[str, ExportedTexts]:
    """Returns the conversion of texts for "classify", which needs only TensorFlow; {}: no texts.

    Args:
      input: the input, or what is known of it.
      num_classes: number of classes; those without a name have their number.
    """
    if not has_texts(input):
        return {}
    length = checked_length(input.params)
    names = [class_name(input.class_names, number) for number in range(num_classes)]

    def read(given: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        texts_B = given["texts"]
        padded_BL = tf.io.decode_raw(texts_B, tf.uint8, fixed_length=length)
        longest = tf.minimum(tf.reduce_max(tf.strings.length(texts_B)), length)
        return {"ids": tf.cast(padded_BL[:, : tf.maximum(longest, 1)], tf.int32)}

    def write(
        found: Mapping[str, tf.Tensor], given: Mapping[str, tf.Tensor]
    ) -> dict[str, tf.Tensor]:
        del given
        return {
            "classes": tf.gather(tf.constant(names), found["labels"]),
            "probabilities": found["probabilities"],
        }

    texts = ExportedTexts(
        read=read,
        write=write,
        inputs={"texts": f"texts to classify; of longer ones, the first {length} bytes"},
        outputs={
            "classes": "the likeliest class of each text",
            "probabilities": "of all classes, [examples, classes]",
        },
    )
    return {CLASSIFY: texts}
