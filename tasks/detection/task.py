"""The detection task: boxes and classes of the objects in images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.exports import ExportedOutput
from tekso.framework.input.errors import InputError
from tekso.framework.input.input import Input
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, Migration, param
from tekso.framework.pieces import LOSS_SUM, METRICS, Flow, Piece
from tekso.framework.task import Batch, Program, Scored
from tekso.framework.theta import Theta
from tekso.models.detection.box_coding import decode_boxes
from tekso.models.detection.multibox_loss import match_boxes
from tekso.models.detection.suppression import detections
from tekso.models.ssd import Ssd
from tekso.tasks.classification.task import LABELS, WEIGHTS, X
from tekso.tasks.detection import average_precision
from tekso.tasks.detection.input import BOX_WEIGHTS, BOXES, BoxImages, boxes_of
from tekso.tasks.detection.losses import DetectionLoss, HardNegativeMining
from tekso.tasks.detection.scoring import DetectionScoring, found_in, with_found
from tekso.tasks.image.drawing import as_png
from tekso.tasks.image.image_task import AnswerExport, ImageTask
from tekso.tasks.image.sources import class_name
from tekso.tasks.image.steps import Image

_MATCHES = "matched_boxes"
_MOST_SHOWN = 5  # objects of an image in a line of text


def _with_loss(fields: dict[str, Any]) -> dict[str, Any]:
    """Moves the former Param of the task to its loss."""
    if "negatives_per_positive" in fields:
        count = fields.pop("negatives_per_positive")
        fields |= {"loss": HardNegativeMining.Params(), "loss.negatives_per_positive": count}
    return fields


class Detection(ImageTask):
    """Minimises the loss of classes of default boxes, and of differences to the matched objects.

    The model is a layer that maps "x" to {"logits": [batch, boxes, classes], "codes": [batch,
    boxes, 4]}, and has the methods `default_boxes()` and `pieces()`, such as an `Ssd`. Its Params
    `image_size`, `channels` and `classes` are taken from the input if they are not set.

    The loss of an image is divided by the number of its matched default boxes, and the loss of a
    batch is the mean over images. Boxes whose "box_weights" are 0 are not matched.

    Reports "matched_boxes", the default boxes of an image that are matched; and from the
    evaluations COCO's "ap", "ap_50", "ap_75" and others (see average_precision.py).

    Shapes:
      batch: the arrays of `BoxImages`
      loss returns: sums over the examples, scalars
      predict returns: "boxes" [batch, n, 4], [y_min, x_min, y_max, x_max] in shares of the image,
        "labels" [batch, n] int32, 0 for padding, and "scores" [batch, n]
    Source:
      Liu et al. 2016, "SSD: single shot multibox detector"; the losses: see losses.py.
    """

    class Params(ImageTask.Params):
        """Params of Detection."""

        version = 2
        migrations: ClassVar[dict[int, Migration]] = {1: _with_loss}

        model: Layer.Params = param("From images to boxes.", default=Ssd.Params())
        num_classes: int = param(
            "Number of classes without the background. If not set: that of the input's source.",
            default=REQUIRED,
        )
        match_overlap: float = param(
            "A default box that overlaps an object more than this is trained to find it.",
            default=0.5,
        )
        loss: DetectionLoss.Params = param(
            "Loss of the classes and boxes.", default=HardNegativeMining.Params()
        )
        min_score: float = param("Boxes with a smaller probability are not found.", default=0.05)
        candidates: int = param("Boxes of a class before suppression.", default=200)
        max_overlap: float = param(
            "Boxes of a class that overlap a better one more than this are dropped.", default=0.5
        )
        most: int = param("Most objects of an image that are found.", default=200)
        scoring: DetectionScoring.Params | None = param(
            "Average precision in evaluations; None: not computed.",
            default=DetectionScoring.Params(),
        )

    goals = {name: "max" for name in average_precision.NAMES}  # noqa: RUF012
    record_kind = "objects"
    background_classes = 1
    export = AnswerExport(
        name="detect",
        doc="The objects in images of the size of training, the likeliest first.",
        outputs={
            BOXES: ExportedOutput(
                "float32, [examples, objects, 4]: y_min, x_min, y_max, x_max in shares"
            ),
            LABELS: ExportedOutput("int32, [examples, objects]; 0: no object"),
            "scores": ExportedOutput("float32, [examples, objects]"),
        },
        compared="",  # LiteRT fails to run the file with int8 activations
    )
    model: Any

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        if p.num_classes < 1 or min(p.candidates, p.most) < 1:
            raise ValueError(
                f"task.num_classes is {p.num_classes}, candidates {p.candidates} and most "
                f"{p.most}, but must be at least 1"
            )
        self.child("model", p.model)
        self._loss: DetectionLoss = p.loss.instantiate()
        self._scoring: DetectionScoring | None = p.scoring and p.scoring.instantiate()

    def check_inputs(self, inputs: Mapping[str, Any]) -> None:
        """Checks the kind of the inputs, and the classes of all objects.

        Raises:
          InputError: an input has no boxes, other classes than in training, or an unknown label;
            or no training image has an object.
        """
        train = boxes_of(inputs["input"])
        classes = train.class_names
        if not any(len(train.source.objects(i).labels) for i in range(train.num_examples)):
            raise InputError(f"input: no image has a box: {train.describe()}")
        for path, input in inputs.items():
            images = boxes_of(input)
            if images.class_names != classes:
                raise InputError(
                    f"{path} has the classes {', '.join(images.class_names) or '(unknown)'}; in "
                    f"training, {', '.join(classes) or '(unknown)'}"
                )
            for index in range(images.num_examples):
                labels = images.source.objects(index).labels
                self._check_labels(f"{path}: {images.source.origin(index)}", labels, least=1)

    def check_batch(self, what: str, batch: Mapping[str, np.ndarray]) -> None:
        """Checks the range of the labels.

        Raises:
          InputError: a label is out of range.
        """
        self._check_labels(what, batch[LABELS], least=0)

    def _check_labels(self, what: str, labels: np.ndarray, *, least: int) -> None:
        most = self.params.num_classes
        if labels.size and (labels.min() < least or labels.max() > most):
            raise InputError(
                f"{what}: the labels are {labels.min()} to {labels.max()}, but must be {least} to "
                f"{most}: task.num_classes is {most}"
            )

    def loss_weight(self, batch: Batch) -> tf.Tensor:
        """Returns the sum of the weights of the images."""
        return tf.reduce_sum(batch[WEIGHTS])

    def pieces(self) -> list[Piece]:
        """Returns the pieces of the model, and one for the loss; see `Task`."""
        own = [piece.below("model") for piece in self.model.pieces()]
        return [*own, Piece("loss", {}, self._run_sums)]

    def _run_sums(self, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        del theta
        p, outputs = self.params, flow[X]
        defaults = tf.constant(self.model.default_boxes())
        counted = tf.cast(flow[BOX_WEIGHTS], tf.float32) > 0
        labels = tf.where(counted, tf.cast(flow[LABELS], tf.int32), 0)
        boxes = tf.cast(flow[BOXES], tf.float32)
        matches = match_boxes(boxes, labels, defaults, threshold=p.match_overlap)
        losses = self._loss.of_images(outputs["logits"], outputs["codes"], matches, defaults)
        weights = tf.cast(flow[WEIGHTS], losses.dtype)
        matched = tf.reduce_sum(tf.cast(matches.labels > 0, losses.dtype), 1)
        metrics = {_MATCHES: (tf.reduce_sum(weights * matched), tf.reduce_sum(weights))}
        return {**flow, LOSS_SUM: tf.reduce_sum(weights * losses), METRICS: metrics}

    def predict(self, theta: Theta, batch: Batch, ctx: StepContext) -> dict[str, tf.Tensor]:
        """Returns the objects that are found; see the class."""
        return self.answer(theta, batch[X], ctx)

    def answer(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> dict[str, tf.Tensor]:
        """Returns the objects that are found, as `predict`; see `ImageTask`."""
        p, outputs = self.params, self.model.fprop(theta.model, x, ctx)
        found = detections(
            self._loss.probabilities(outputs["logits"]),
            decode_boxes(
                tf.cast(outputs["codes"], tf.float32), tf.constant(self.model.default_boxes())
            ),
            min_score=p.min_score,
            candidates=p.candidates,
            max_overlap=p.max_overlap,
            most=p.most,
        )
        return {"boxes": found.boxes, "labels": found.labels, "scores": found.scores}

    def score(
        self,
        program: Program,
        input: Input,
        *,
        is_last: bool,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Scored | None:
        """Returns the average precision of an evaluation input, and pictures at the last one."""
        if self._scoring is None:
            return None
        return self._scoring.score(program, self.answer, input, is_last=is_last, stopped=stopped)

    def images_in(self, input: Input) -> BoxImages:
        """See `ImageTask`."""
        return boxes_of(input)

    def size_of(self, images: Any, index: int) -> tuple[int, int]:
        """See `ImageTask`."""
        size: tuple[int, int] = images.source.objects(index).size
        return size

    def found(
        self, arrays: Mapping[str, np.ndarray], size: tuple[int, int], names: tuple[str, ...]
    ) -> dict[str, Any]:
        """Returns the objects: class, score, and x, y, width, height in pixels of the image."""
        one = found_in(arrays, size)
        rows = zip(one.boxes.tolist(), one.labels.tolist(), one.scores.tolist(), strict=True)
        objects = [
            {
                "class": class_name(names, label - 1),
                "score": score,
                "box": [round(v, 1) for v in (x_min, y_min, x_max - x_min, y_max - y_min)],
            }
            for (y_min, x_min, y_max, x_max), label, score in rows
        ]
        return {"objects": objects}

    def summary(self, record: Mapping[str, Any]) -> str:
        """See `ImageTask`."""
        shown = [
            f"{one['class']} {one['score']:.2f} at {' '.join(f'{v:g}' for v in one['box'])}"
            for one in record["objects"][:_MOST_SHOWN]
        ]
        more = len(record["objects"]) - len(shown)
        shown += [f"{more} more"] if more else []
        return ", ".join(shown) or "nothing"

    def cells(self, record: Mapping[str, Any]) -> list[tuple[str, ...]]:
        """Returns class, score, x, y, width and height of every object; see `ImageTask`."""
        rows = [
            (one["class"], f"{one['score']:.4f}", *(f"{v:g}" for v in one["box"]))
            for one in record["objects"]
        ]
        return rows or [("nothing",)]

    def picture(self, pixels: Image, arrays: Mapping[str, np.ndarray], input: Input) -> bytes:
        """Returns the image with the boxes of the objects that are found; see `ImageTask`."""
        size = (pixels.shape[0], pixels.shape[1])
        least = (self.params.scoring or DetectionScoring.Params()).shown_score
        names = tuple(getattr(input, "class_names", ()))
        return as_png(with_found(pixels, found_in(arrays, size), size, names, least_score=least))
