"""The segmentation task: a class for every pixel of an image."""

from __future__ import annotations

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
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.pieces import LOSS_SUM, METRICS, Flow, Piece
from tekso.framework.task import Batch, Decoded, Program, Scored, Task
from tekso.framework.theta import Theta
from tekso.models.unet import UNet
from tekso.tasks.classification.task import LABELS, WEIGHTS, X
from tekso.tasks.image.image_input import with_image_sizes
from tekso.tasks.image.preparation import Preparation, scale_and_shift
from tekso.tasks.image.sources import class_name
from tekso.tasks.segmentation.input import NOT_COUNTED, masks_of
from tekso.tasks.segmentation.scoring import SegmentationScoring

IOU, DICE, PIXEL_ACCURACY = "iou", "dice", "pixel_accuracy"


class Segmentation(Task):
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

    class Params(Task.Params):
        """Params of Segmentation."""

        model: Layer.Params = param("From images to scores.", default=UNet.Params())
        num_classes: int = param(
            "Number of classes, with the background. If not set: that of the input's source.",
            default=REQUIRED,
        )
        scoring: SegmentationScoring.Params | None = param(
            "Pictures at the last evaluation; None: none.", default=SegmentationScoring.Params()
        )
        decode: str = param(
            "Image files that --mode=decode segments: globs, separated by commas. Empty: images of "
            "the split dev.",
            default="",
        )
        num_decoded: int = param("Images that are decoded if no files are given.", default=10)

    goals = {IOU: "max", DICE: "max", PIXEL_ACCURACY: "max"}  # noqa: RUF012
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

    @classmethod
    def complete(cls, params: Any, input: Input) -> Any:
        """Sets num_classes, and the sizes of the model, where they are not set.

        Raises:
          ValueError: num_classes is not set, and the input does not know it.
        """
        return with_image_sizes(params, input)

    def check_inputs(self, inputs: Mapping[str, Any]) -> list[str]:
        """Checks the kind of the inputs, and that they have the classes of training.

        It warns of training masks of 0 and 255, of which only the background would count.

        Raises:
          InputError: an input has no masks, or other classes than in training.
        """
        classes = masks_of(inputs["input"]).class_names
        for path, input in inputs.items():
            own = masks_of(input).class_names
            if own != classes or len(own) > self.params.num_classes:
                raise InputError(
                    f"{path} has the classes {', '.join(own) or '(unknown)'}; in training, "
                    f"{', '.join(classes) or '(unknown)'}; task.num_classes is "
                    f"{self.params.num_classes}"
                )
        if not masks_of(inputs["input"]).has_background_only():
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

    def count(self, batch: Mapping[str, np.ndarray]) -> tuple[int, str]:
        """Returns the number of images."""
        return len(batch[X]), "images"

    def loss_weight(self, batch: Batch) -> tf.Tensor:
        """Returns the weighted number of pixels that count."""
        counted = tf.cast(tf.not_equal(batch[LABELS], NOT_COUNTED), tf.float32)
        weights = tf.reshape(tf.cast(batch[WEIGHTS], tf.float32), [-1, 1, 1])
        return tf.reduce_sum(weights * counted)

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
        dims = ("batch", "height", "width")
        logits = ctx.constrain(flow[X], (*dims, None))
        labels = ctx.constrain(tf.cast(flow[LABELS], tf.int32), dims)
        weights = tf.reshape(tf.cast(flow[WEIGHTS], logits.dtype), [-1, 1, 1])
        weights *= tf.cast(tf.not_equal(labels, NOT_COUNTED), logits.dtype)
        target = tf.one_hot(labels, self.params.num_classes, dtype=logits.dtype)
        # Elementwise, so that height and width can be sharded.
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
        classes = self.params.num_classes
        return self._scoring.score(
            program, self._labels, input, num_classes=classes, stopped=stopped
        )

    @classmethod
    def decodes_data(cls, params: Any) -> bool:
        """Returns whether decoding reads images of the input; see Task."""
        return not params.decode

    def decode(self, program: Program, input: Input) -> Decoded | None:
        """Returns the share of every class in image files, or in images of the split dev."""
        names = tuple(getattr(input, "class_names", ()))
        if self.params.decode:
            paths = files.glob(self.params.decode, what="task.decode")
            records = [self._of_file(program, input.params, path, names) for path in paths]
        else:
            train = masks_of(input)
            dev: Any = train.params.copy().set(split="dev", order="once")
            dev = dev.instantiate(seed=train.seed)
            index = spread(dev.num_examples, self.params.num_decoded)
            batch = dev.examples(index, np.zeros_like(index))
            labels = np.asarray(program.call(self._labels, batch[X]))
            records = [
                _record(str(dev.source.origin(int(i))), labels[row], names)
                for row, i in enumerate(index)
                if batch[WEIGHTS][row]
            ]
        return Decoded("\n".join(map(_line, records)), records)

    def _of_file(
        self, program: Program, params: Any, path: str, names: tuple[str, ...]
    ) -> dict[str, Any]:
        preparation = Preparation(params, params.evaluate)
        try:
            image = preparation.image(files.read(path), 0, Origin(path))
        except (BadRecordError, OSError) as error:
            return {"kind": "segments", "file": path, "error": reason_of(error)}
        x = preparation.normalized(image)[None]
        return _record(path, np.asarray(program.call(self._labels, x))[0], names)

    def exports(self, input: Input) -> dict[str, ExportedFunction]:
        """Returns the function "segment" of images of the size of the input."""
        p = input.params
        scale, shift = scale_and_shift(p)

        def segment(theta: Theta, images: tf.Tensor, ctx: StepContext) -> dict[str, tf.Tensor]:
            return {"labels": self._labels(theta, tf.cast(images, tf.float32) * scale + shift, ctx)}

        return {
            "segment": ExportedFunction(
                doc="The likeliest class of every pixel of images of the size of training.",
                function=segment,
                inputs={
                    "images": ExportedInput(
                        "pixels from 0 to 255, RGB or grey",
                        tf.uint8,
                        shape=(p.image_size, p.image_size, p.channels),
                    )
                },
                outputs={"labels": ExportedOutput("int32, [examples, height, width]")},
                lengths=[1],
                for_litert=True,
            )
        }

    def _labels(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        return self.predict(theta, {X: x}, ctx)[LABELS]


def _record(file: str, labels: np.ndarray, names: tuple[str, ...]) -> dict[str, Any]:
    found, counts = np.unique(labels, return_counts=True)
    shares = {
        class_name(names, c): count / labels.size
        for c, count in zip(found.tolist(), counts.tolist(), strict=True)
    }
    return {"kind": "segments", "file": file, "shares": shares}


def _line(record: Mapping[str, Any]) -> str:
    if "error" in record:
        return f"{record['file']}: {record['error']}"
    shares = sorted(record["shares"].items(), key=lambda pair: -pair[1])
    return f"{record['file']}: {', '.join(f'{name} {share:.3f}' for name, share in shares)}"
