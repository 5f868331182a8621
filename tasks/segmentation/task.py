"""The segmentation task: a class for every pixel of an image."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.exports import ExportedOutput
from tekso.framework.input.errors import InputError
from tekso.framework.input.input import Input
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.pieces import LOSS_SUM, METRICS, Flow, Piece
from tekso.framework.primitives.windows import image_dims
from tekso.framework.task import Batch, Program, Scored
from tekso.framework.theta import Theta
from tekso.models.unet import UNet
from tekso.tasks.classification.task import LABELS, WEIGHTS, X
from tekso.tasks.image.image_task import AnswerExport, ImageTask
from tekso.tasks.image.sources import class_name
from tekso.tasks.image.steps import Image
from tekso.tasks.segmentation.input import NOT_COUNTED, masks_of
from tekso.tasks.segmentation.scoring import SegmentationScoring, mask_png

IOU, DICE, PIXEL_ACCURACY = "iou", "dice", "pixel_accuracy"


class Segmentation(ImageTask):
    """Minimises the softmax cross-entropy of every pixel, as a mean over all pixels that count.

    The model is a layer that maps "x" to logits [batch, height, width, classes] and has the method
    `pieces()`, such as a `UNet`. Its Params `image_size`, `channels` and `classes` are taken from
    the input if they are not set.

    Reports "pixel_accuracy", "iou" and "dice". The last two are means over the classes that occur
    in the labels or the guesses: of a class with i pixels in both, a in the labels and b in the
    guesses of the whole pass, i / (a + b - i) and 2 i / (a + b). "iou/3" is that of class 3.

    Shapes:
      batch: the arrays of `MaskImages`
      loss returns: sums over the pixels, scalars
      predict returns: "logits" [batch, height, width, num_classes], "labels" [batch, height, width]
        int32
    Source:
      IoU and Dice: Everingham et al. 2010, "The PASCAL VOC challenge", section 4.1.3; Dice 1945.
    """

    class Params(ImageTask.Params):
        """Params of Segmentation."""

        model: Layer.Params = param("From images to scores.", default=UNet.Params())
        num_classes: int = param(
            "Number of classes, with the background. If not set: that of the input's source.",
            default=REQUIRED,
        )
        scoring: SegmentationScoring.Params | None = param(
            "Pictures at the last evaluation; None: none.", default=SegmentationScoring.Params()
        )

    goals = {IOU: "max", DICE: "max", PIXEL_ACCURACY: "max"}  # noqa: RUF012
    record_kind = "segments"
    export = AnswerExport(
        name="segment",
        doc="The likeliest class of every pixel of images of the size of training.",
        outputs={LABELS: ExportedOutput("int32, [examples, height, width]")},
        unit="pixels",
    )
    model: Any

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        if self.params.num_classes < 2:
            raise ValueError(
                f"task.num_classes is {self.params.num_classes}: segmentation needs at least 2"
            )
        self.child("model", self.params.model)
        scoring = self.params.scoring
        self._scoring: SegmentationScoring | None = scoring and scoring.instantiate()

    def check_inputs(self, inputs: Mapping[str, Any]) -> list[str]:
        """Checks the kind of the inputs, and that they have the classes of training.

        It warns of training masks of 0 and 255, of which only the background would count.

        Raises:
          InputError: an input has no masks, or other classes than in training.
        """
        train = self.images_in(inputs["input"])
        classes = train.class_names
        for path, input in inputs.items():
            own = self.images_in(input).class_names
            if own != classes or len(own) > self.params.num_classes:
                raise InputError(
                    f"{path} has the classes {', '.join(own) or '(unknown)'}; in training, "
                    f"{', '.join(classes) or '(unknown)'}; task.num_classes is "
                    f"{self.params.num_classes}"
                )
        if not train.has_background_only():
            return []
        return [
            "input: the first masks have the values 0 and 255 only, and pixels of value 255 do not "
            "count. If 255 stands for a class, write its number instead, as 1"
        ]

    def check_batch(self, what: str, batch: Mapping[str, np.ndarray]) -> None:
        """Checks the range of the labels.

        Raises:
          InputError: a label is out of range.
        """
        most, found = self.params.num_classes - 1, batch[LABELS].max(initial=0)
        if found > most:
            raise InputError(
                f"{what}: a pixel has the class {found}, but must be 0 to {most}, or 255 if it "
                f"does not count: task.num_classes is {most + 1}"
            )

    def loss_weight(self, batch: Batch) -> tf.Tensor:
        """Returns the weighted number of pixels that count."""
        return tf.reduce_sum(_weights(batch[LABELS], batch[WEIGHTS], tf.float32))

    def predict(self, theta: Theta, batch: Batch, ctx: StepContext) -> dict[str, tf.Tensor]:
        """Returns the scores and the likeliest class of every pixel; see the class."""
        logits = self.model.fprop(theta.model, batch[X], ctx)
        return {"logits": logits, LABELS: tf.argmax(logits, -1, output_type=tf.int32)}

    def pieces(self) -> list[Piece]:
        """Returns the pieces of the model, and one for loss and metrics; see `Task`."""
        own = [piece.below("model") for piece in self.model.pieces()]
        return [*own, Piece("loss", {}, self._run_sums)]

    def _run_sums(self, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        del theta
        dims = image_dims(flow[X].shape.rank)[:-1]
        logits = ctx.constrain(flow[X], (*dims, None))
        labels = ctx.constrain(tf.cast(flow[LABELS], tf.int32), dims)
        weights = _weights(labels, flow[WEIGHTS], logits.dtype)
        target = tf.one_hot(labels, self.params.num_classes, dtype=logits.dtype)
        # Elementwise, so that spatial dims can be sharded.
        centred = logits - tf.stop_gradient(tf.reduce_max(logits, -1, keepdims=True))
        log_sum = tf.math.log(tf.reduce_sum(tf.exp(centred), -1))
        nats = log_sum - tf.reduce_sum(target * centred, -1)
        guess = tf.argmax(logits, -1, output_type=tf.int32)
        metrics = self._metrics(labels, guess, weights)
        return {**flow, LOSS_SUM: tf.reduce_sum(weights * nats), METRICS: metrics}

    def _metrics(
        self, labels: tf.Tensor, guess: tf.Tensor, weights: tf.Tensor
    ) -> dict[str, tuple[tf.Tensor, tf.Tensor]]:
        """Returns the sums of the metrics; the ratio of the sums is the IoU of the whole pass."""
        hits = tf.cast(tf.equal(labels, guess), weights.dtype) * weights
        found = {PIXEL_ACCURACY: (tf.reduce_sum(hits), tf.reduce_sum(weights))}
        for c in range(self.params.num_classes):
            is_label = tf.cast(tf.equal(labels, c), weights.dtype)
            is_guess = tf.cast(tf.equal(guess, c), weights.dtype)
            both = tf.reduce_sum(is_label * is_guess * weights)
            either = tf.reduce_sum(tf.maximum(is_label, is_guess) * weights)
            found[f"{IOU}/{c}"] = (both, either)
        return found

    def summarize(self, sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        """Returns the mean of every sum, and IoU and Dice as means over the classes."""
        found = super().summarize(sums)
        own = [f"{IOU}/{c}" for c in range(self.params.num_classes)]
        of_classes = {name: found.pop(name) for name in own if name in found}
        if of_classes:
            found[IOU] = float(np.mean(list(of_classes.values())))
            found[DICE] = float(np.mean([2 * one / (1 + one) for one in of_classes.values()]))
        return {**found, **of_classes}

    def score(
        self,
        program: Program,
        input: Input,
        *,
        is_last: bool,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Scored | None:
        """Returns pictures of an evaluation input, at the last evaluation."""
        if self._scoring is None or not is_last:
            return None
        return self._scoring.score(
            program,
            self.answer,
            input,
            images=self.images_in(input),
            num_classes=self.params.num_classes,
            stopped=stopped,
        )

    def answer(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> dict[str, tf.Tensor]:
        """Returns the likeliest class of every pixel; see `ImageTask`.

        Shapes:
          returns: "labels" [batch, height, width] int32
        """
        return {LABELS: self.predict(theta, {X: x}, ctx)[LABELS]}

    def images_in(self, input: Input) -> Any:
        """See `ImageTask`."""
        return masks_of(input)

    def found(
        self, arrays: Mapping[str, np.ndarray], size: tuple[int, int], names: tuple[str, ...]
    ) -> dict[str, Any]:
        """Returns the share of every class in the pixels; see `ImageTask`."""
        del size
        labels = arrays[LABELS]
        found, counts = np.unique(labels, return_counts=True)
        shares = {
            class_name(names, c): count / labels.size
            for c, count in zip(found.tolist(), counts.tolist(), strict=True)
        }
        return {"shares": shares}

    def summary(self, record: Mapping[str, Any]) -> str:
        """See `ImageTask`."""
        shares = sorted(record["shares"].items(), key=lambda pair: -pair[1])
        return ", ".join(f"{name} {share:.3f}" for name, share in shares)

    def cells(self, record: Mapping[str, Any]) -> list[tuple[str, ...]]:
        """Returns every class and its share of the pixels; see `ImageTask`."""
        shares = sorted(record["shares"].items(), key=lambda pair: -pair[1])
        return [(name, f"{share:.4f}") for name, share in shares]

    def picture(self, pixels: Image, arrays: Mapping[str, np.ndarray], input: Input) -> bytes:
        """Returns the class of every pixel as a palette PNG, which `MaskFolders` reads.

        It has the size of the image if no step of an evaluation moves pixels, such as a crop;
        otherwise `image_size`.
        """
        labels, steps = arrays[LABELS], [step.instantiate() for step in input.params.evaluate]
        if any(step.moves_pixels for step in steps):
            return mask_png(labels)
        return mask_png(labels, size=(pixels.shape[0], pixels.shape[1]))


def _weights(labels: tf.Tensor, weights: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns the weight of every pixel: that of its example, or 0 if it does not count."""
    of_examples = tf.reshape(tf.cast(weights, dtype), [-1, *[1] * (labels.shape.rank - 1)])
    return of_examples * tf.cast(tf.not_equal(labels, NOT_COUNTED), dtype)
