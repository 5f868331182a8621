"""The image classification task: one label for each image."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework import files
from tekso.framework.context import StepContext
from tekso.framework.exports import ExportedFunction, ExportedInput, ExportedOutput
from tekso.framework.input.held_out import spread
from tekso.framework.input.input import Input
from tekso.framework.input.skips import BadRecordError, InputError, Origin, reason_of
from tekso.framework.params import REQUIRED, param
from tekso.framework.pieces import LOSS_SUM, METRICS, Flow
from tekso.framework.task import Batch, Decoded, LossSums, Program, Scored
from tekso.framework.theta import Theta
from tekso.tasks.classification.task import ACCURACY, LABELS, WEIGHTS, Classification, X
from tekso.tasks.image.image_input import with_image_sizes
from tekso.tasks.image.input import OTHER_LABELS, SHARES, Images, images_of
from tekso.tasks.image.preparation import Preparation, scale_and_shift
from tekso.tasks.image.scoring import ImageScoring
from tekso.tasks.image.sources import class_name

TOP_5 = "top_5_accuracy"
_MOST_SHOWN = 5  # classes of an image that decoding prints


class ImageClassification(Classification):
    """Minimises the softmax cross-entropy between the labels of images and the scores of a model.

    The model is a layer that maps "x" to logits, such as an `ImageModel`. Its Params `image_size`,
    `channels` and `classes` (or `input_dim` and `output_dim`) are taken from the input if they are
    not set. In training, the target has the mixed labels of the input and `label_smoothing`.

    Reports "accuracy" (top-1), and "top_5_accuracy" if there are more than 5 classes: the share of
    images with fewer than 5 classes whose score is at least that of the label.

    Shapes:
      batch: the arrays of `Images`
      loss returns: sums over the examples, scalars
      predict returns: "logits" [batch, num_classes], "labels" [batch] int32
    Raises:
      ValueError: label_smoothing is not in [0, 1).
    """

    class Params(Classification.Params):
        """Params of ImageClassification."""

        num_classes: int = param(
            "Number of classes. If not set: that of the input's source.", default=REQUIRED
        )
        label_smoothing: float = param(
            "Share of the target probability that is spread evenly.", default=0.0
        )
        scoring: ImageScoring.Params | None = param(
            "Confusions and pictures at the last evaluation; None: neither.",
            default=ImageScoring.Params(),
        )
        decode: str = param(
            "Image files that --mode=decode classifies: globs, separated by commas. Empty: images "
            "of the split dev.",
            default="",
        )
        num_decoded: int = param("Images that are decoded if no files are given.", default=10)

    goals = {TOP_5: "max"}  # noqa: RUF012

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        if not 0.0 <= self.params.label_smoothing < 1.0:
            raise ValueError(
                f"task.label_smoothing is {self.params.label_smoothing}, but must be in [0, 1)"
            )
        scoring = self.params.scoring
        self._scoring: ImageScoring | None = None if scoring is None else scoring.instantiate()

    @classmethod
    def complete(cls, params: Any, input: Input) -> Any:
        """Sets num_classes, and the sizes of the model, where they are not set.

        Raises:
          ValueError: num_classes is not set, and the input does not know it.
        """
        return with_image_sizes(params, input)

    def check_inputs(self, inputs: Mapping[str, Any]) -> list[str]:
        """Checks the arrays of the inputs, and the labels of all images if they are known.

        Returns:
          A warning if classes have no training image.

        Raises:
          InputError: an array is missing, or has a wrong shape, type or label.
        """
        warnings = super().check_inputs(inputs)
        for path, input in inputs.items():
            labels = images_of(input).source.labels
            if labels is not None:
                self._check_labels(path, labels)
        source = images_of(inputs["input"]).source
        if source.labels is not None:
            present = set(np.unique(source.labels).tolist())
            absent = [i for i in range(self.params.num_classes) if i not in present]
            if absent:
                which = ", ".join(map(str, absent[:5])) + (", …" if len(absent) > 5 else "")
                warnings.append(
                    f"input: {len(absent):,} of the {self.params.num_classes:,} classes have no "
                    f"training image ({which})"
                )
        return warnings

    def count(self, batch: Mapping[str, np.ndarray]) -> tuple[int, str]:
        """Returns the number of images."""
        return len(batch[LABELS]), "images"

    def _run_sums(self, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        del theta
        logits = ctx.constrain(self._scores(flow[X]), ("batch", None))
        smoothing = self.params.label_smoothing if ctx.is_training else 0.0
        sums = self.sums(logits, flow, smoothing) if smoothing else self.sums(logits, flow)
        return {**flow, LOSS_SUM: sums.loss_sum, METRICS: sums.metrics}

    def sums(self, logits: tf.Tensor, batch: Batch, smoothing: float = 0.0) -> LossSums:
        """Returns the sums of the loss and the metrics; see `Classification`.

        A method that overrides it needs `smoothing` only if `label_smoothing` is set.

        Shapes:
          logits: [batch, num_classes], at least float32
          batch: "labels", "weights" and, of mixed images, "other_labels" and "shares" [batch]
        """
        labels, weights = tf.cast(batch[LABELS], tf.int64), tf.cast(batch[WEIGHTS], logits.dtype)
        nats = _cross_entropy(labels, logits)
        if SHARES in batch:
            share = tf.cast(batch[SHARES], logits.dtype)
            other = _cross_entropy(tf.cast(batch[OTHER_LABELS], tf.int64), logits)
            nats = share * nats + (1.0 - share) * other
        if smoothing:
            even = -tf.reduce_mean(tf.nn.log_softmax(logits), axis=1)
            nats = (1.0 - smoothing) * nats + smoothing * even
        total = tf.reduce_sum(weights)
        hits = tf.cast(tf.equal(tf.argmax(logits, 1), labels), logits.dtype)
        metrics = {ACCURACY: (tf.reduce_sum(weights * hits), total)}
        if self.params.num_classes > 5:
            hits = tf.cast(_rank(logits, labels) < 5, logits.dtype)
            metrics[TOP_5] = (tf.reduce_sum(weights * hits), total)
        return LossSums(tf.reduce_sum(weights * nats), metrics)

    def score(
        self,
        program: Program,
        input: Input,
        *,
        is_last: bool,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Scored | None:
        """Returns the confusions and pictures of an evaluation input, at the last evaluation."""
        if self._scoring is None or not is_last:
            return None
        return self._scoring.score(program, self._probabilities, input, stopped=stopped)

    @classmethod
    def decodes_data(cls, params: Any) -> bool:
        """Returns whether decoding reads images of the input; see Task."""
        return not params.decode

    def decode(self, program: Program, input: Input) -> Decoded | None:
        """Returns the likeliest classes of image files, or of images of the split dev."""
        if self.params.decode:
            return self.classify_files(
                program, input, files.glob(self.params.decode, what="task.decode")
            )
        dev = _dev_images(images_of(input))
        index = spread(dev.num_examples, self.params.num_decoded)
        batch = dev.examples(index, np.zeros_like(index))
        probabilities = np.asarray(program.call(self._probabilities, batch[X]))
        records = [
            {
                "kind": "image",
                "file": dev.source.origin(int(i)).file,
                "number": int(i),
                "label": class_name(dev.class_names, int(label)),
                "classes": _likeliest(row, dev.class_names),
            }
            for i, label, row, weight in zip(
                index, batch[LABELS], probabilities, batch[WEIGHTS], strict=True
            )
            if weight
        ]
        return Decoded("\n".join(_line(record) for record in records), records)

    def classify_files(self, program: Program, input: Input, paths: list[str]) -> Decoded:
        """Returns the likeliest classes of image files; a malformed file has an error instead.

        Args:
          program: calls functions with the weights.
          input: the input of the run, or what `Images.known` returns.
          paths: the files.
        """
        names = tuple(getattr(input, "class_names", ()))
        preparation = Preparation(input.params, input.params.evaluate)
        size, records = input.params.batch_size, []
        for begin in range(0, len(paths), size):
            own: list[dict[str, Any]] = []
            x = np.zeros([size, *_form(input.params)], np.float32)
            for place, path in enumerate(paths[begin : begin + size]):
                record: dict[str, Any] = {"kind": "image", "file": path}
                try:
                    image = preparation.image(files.read(path), 0, Origin(path))
                    x[place] = preparation.normalized(image)
                except (BadRecordError, OSError) as error:
                    record["error"] = reason_of(error)
                own.append(record)
            probabilities = np.asarray(program.call(self._probabilities, x))
            for record, row in zip(own, probabilities, strict=False):
                if "error" not in record:
                    record["classes"] = _likeliest(row, names)
            records += own
        return Decoded("\n".join(_line(record) for record in records), records)

    def exports(self, input: Input) -> dict[str, ExportedFunction]:
        """Returns the function "classify" of images of the size of the input."""
        scale, shift = scale_and_shift(input.params)

        def classify(theta: Theta, images: tf.Tensor, ctx: StepContext) -> dict[str, tf.Tensor]:
            x = tf.cast(images, tf.float32) * scale + shift
            probabilities = self._probabilities(theta, x, ctx)
            labels = tf.argmax(probabilities, 1, output_type=tf.int32)
            return {"probabilities": probabilities, "labels": labels}

        return {
            "classify": ExportedFunction(
                doc="The probability of every class for images of the size of training.",
                function=classify,
                inputs={
                    "images": ExportedInput(
                        "pixels from 0 to 255, RGB or grey", tf.uint8, shape=_form(input.params)
                    )
                },
                outputs={
                    "probabilities": ExportedOutput("float32, [examples, classes]"),
                    "labels": ExportedOutput("the likeliest class, int32, [examples]"),
                },
                lengths=[1],
                for_litert=True,
            )
        }

    def _probabilities(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        return tf.nn.softmax(self.predict(theta, {X: x}, ctx)["logits"])


def _cross_entropy(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)


def _rank(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Returns how many other classes have a score that is not below that of the label.

    Equal scores, and scores that are not numbers, count against the label.

    Shapes:
      logits: [batch, num_classes]
      labels, returns: [batch]
    """
    is_label = tf.equal(tf.expand_dims(labels, 1), tf.range(logits.shape[1], dtype=tf.int64))
    of_label = tf.where(is_label, logits, tf.zeros_like(logits))  # also if another one is -inf
    own = tf.reduce_sum(of_label, axis=1, keepdims=True)
    below = tf.cast(logits < own, tf.int32)
    return logits.shape[1] - 1 - tf.reduce_sum(below, axis=1)


def _likeliest(probabilities: np.ndarray, names: tuple[str, ...]) -> list[dict[str, Any]]:
    order = np.argsort(-probabilities, kind="stable")[:_MOST_SHOWN].tolist()
    return [
        {"class": class_name(names, i), "number": i, "probability": float(probabilities[i])}
        for i in order
    ]


def _line(record: Mapping[str, Any]) -> str:
    place = record["file"] + (f" {record['number']}" if "number" in record else "")
    if "error" in record:
        return f"{place}: {record['error']}"
    found = ", ".join(f"{one['class']} {one['probability']:.3f}" for one in record["classes"][:3])
    label = f" (label {record['label']})" if "label" in record else ""
    return f"{place}: {found}{label}"


def _form(params: Any) -> tuple[int, int, int]:
    return params.image_size, params.image_size, params.channels


def _dev_images(train: Images) -> Images:
    """Returns the held-out images of a training input; training images if there are none."""
    for split in ("dev", "test"):
        with contextlib.suppress(InputError, OSError):
            return _once(train, split)
    return _once(train, "train")


def _once(train: Images, split: str) -> Images:
    found: Images = train.params.copy().set(split=split, order="once").instantiate(seed=train.seed)
    return found
