"""The image classification task: one label for each image."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.exports import ExportedOutput
from tekso.framework.input.input import Input
from tekso.framework.params import REQUIRED, param
from tekso.framework.pieces import LOSS_SUM, METRICS, Flow
from tekso.framework.task import Batch, LossSums, Program, Scored
from tekso.framework.task_results import loss_sums, method_of
from tekso.framework.theta import Theta
from tekso.tasks.classification.task import ACCURACY, LABELS, WEIGHTS, Classification, X
from tekso.tasks.image.crops import CROPS, PROBABILITIES, TOP_5, Crops
from tekso.tasks.image.filters import FirstFilters
from tekso.tasks.image.image_task import AnswerExport, ImageTask
from tekso.tasks.image.input import OTHER_LABELS, SHARES, Images, images_of
from tekso.tasks.image.scoring import ImageScoring
from tekso.tasks.image.sources import class_name

_MOST_SHOWN = 5  # classes of an image that decoding prints


class ImageClassification(ImageTask, Classification):
    """Minimises the softmax cross-entropy between the labels of images and the scores of a model.

    The model is a layer that maps "x" to logits, such as an `ImageModel`. Its Params `image_size`,
    `channels` and `classes` (or `input_dim` and `output_dim`) are taken from the input if they are
    not set. In training, the target has the mixed labels of the input and `label_smoothing`.

    Reports "accuracy" (top-1), and "top_5_accuracy" if there are more than 5 classes: the share of
    images with fewer than 5 classes whose score is at least that of the label. With `crops`, the
    last evaluation also reports them for the mean of the probabilities of several crops.

    Shapes:
      batch: the arrays of `Images`
      loss returns: sums over the examples, scalars
      predict returns: "logits" [batch, num_classes], "labels" [batch] int32
    Raises:
      ValueError: label_smoothing is not in [0, 1).
    """

    class Params(ImageTask.Params, Classification.Params):
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
        crops: Crops.Params | None = param(
            "Several crops of every image, classified at the last evaluation; None: none.",
            default=None,
        )

    goals = {TOP_5: "max", f"{CROPS}/{ACCURACY}": "max", f"{CROPS}/{TOP_5}": "max"}  # noqa: RUF012
    export = AnswerExport(
        name="classify",
        doc="The probability of every class for images of the size of training.",
        outputs={
            "probabilities": ExportedOutput("float32, [examples, classes]"),
            LABELS: ExportedOutput("the likeliest class, int32, [examples]"),
        },
    )

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        if not 0.0 <= self.params.label_smoothing < 1.0:
            raise ValueError(
                f"task.label_smoothing is {self.params.label_smoothing}, but must be in [0, 1)"
            )
        if self.params.label_smoothing and not _takes_smoothing(self.sums):
            raise ValueError(
                f"{method_of(self, 'sums')} has no argument `smoothing`, but task.label_smoothing "
                f"is {self.params.label_smoothing}: write sums(self, logits, batch, "
                "smoothing=0.0), and in it super().sums(logits, batch, smoothing)"
            )
        scoring = self.params.scoring
        self._scoring: ImageScoring | None = None if scoring is None else scoring.instantiate()
        self._filters = FirstFilters(self)
        crops = self.params.crops
        self._crops: Crops | None = None if crops is None else crops.instantiate()

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
                hint = ". Classes are numbered from 0: if labels count from 1, subtract 1"
                warnings.append(
                    f"input: {len(absent):,} of the {self.params.num_classes:,} classes have no "
                    f"training image ({which}){hint if absent == [0] else ''}"
                )
        return warnings

    def _run_sums(self, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        del theta
        logits = ctx.constrain(self._scores(flow[X]), ("batch", None))
        smoothing = self.params.label_smoothing if ctx.is_training else 0.0
        found = self.sums(logits, flow, smoothing) if smoothing else self.sums(logits, flow)
        sums = loss_sums(self, "sums", found)
        return {**flow, LOSS_SUM: sums.loss_sum, METRICS: sums.metrics}

    def sums(self, logits: tf.Tensor, batch: Batch, smoothing: float = 0.0) -> LossSums:
        """Returns the sums of the loss and the metrics; see `Classification`.

        A method that overrides it needs `smoothing` only if `label_smoothing` is set; it then
        passes it on: `super().sums(logits, batch, smoothing)`.

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
        """Returns confusions, pictures and figures of crops, at the last evaluation."""
        if not is_last:
            return None
        found = Scored({}, "")
        if self._scoring is not None:
            scored = self._scoring.score(program, self.answer, input, stopped=stopped)
            if scored is None:
                return None
            filters = self._filters.draw(program)
            drawn = {**scored.images, **({"filters": filters} if filters else {})}
            found = dataclasses.replace(scored, images=drawn)
        if self._crops is not None:
            figures = self._crops.figures(program, self.answer, input, stopped=stopped)
            if figures is None:
                return None
            found = dataclasses.replace(found, figures=figures)
        return found if self._scoring or self._crops else None

    def answer(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> dict[str, tf.Tensor]:
        """Returns the probabilities of the classes and the likeliest one; see `ImageTask`.

        Shapes:
          returns: "probabilities" [batch, num_classes], "labels" [batch] int32
        """
        return self.class_probabilities(theta, x, ctx)

    def images_in(self, input: Input) -> Images:
        """See `ImageTask`."""
        return images_of(input)

    def named(self, images: Any, index: int, example: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Returns file, number and label of an image; see `ImageTask`."""
        return {
            "file": images.source.origin(index).file,
            "number": index,
            "label": class_name(images.class_names, int(example[LABELS])),
        }

    def found(
        self, arrays: Mapping[str, np.ndarray], size: tuple[int, int], names: tuple[str, ...]
    ) -> dict[str, Any]:
        """Returns the likeliest classes; see `ImageTask`."""
        del size
        probabilities = arrays[PROBABILITIES]
        order = np.argsort(-probabilities, kind="stable")[:_MOST_SHOWN].tolist()
        classes = [
            {"class": class_name(names, i), "number": i, "probability": float(probabilities[i])}
            for i in order
        ]
        return {"classes": classes}

    def summary(self, record: Mapping[str, Any]) -> str:
        """See `ImageTask`."""
        rows = record["classes"][:3]
        label = f" (label {record['label']})" if "label" in record else ""
        return ", ".join(f"{one['class']} {one['probability']:.3f}" for one in rows) + label

    def cells(self, record: Mapping[str, Any]) -> list[tuple[str, ...]]:
        """Returns the likeliest class and its probability; see `ImageTask`."""
        best = record["classes"][0]
        return [(best["class"], f"{best['probability']:.4f}")]


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


def _takes_smoothing(sums: Callable[..., Any]) -> bool:
    try:
        inspect.signature(sums).bind(None, None, 0.0)
    except TypeError:
        return False
    return True
