"""The classification task: predict one of several classes for each example."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.exports import ExportedFunction, ExportedTexts
from tekso.framework.input.errors import InputError
from tekso.framework.input.forms import form_of, form_text
from tekso.framework.input.input import Input
from tekso.framework.input.unread_arrays import unread_warnings
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.pieces import LOSS_SUM, METRICS, Flow, Piece
from tekso.framework.primitives.precision import widen
from tekso.framework.symbolic import specs_of
from tekso.framework.task import Batch, Decoded, LossSums, Program, Task
from tekso.framework.task_results import loss_sums
from tekso.framework.task_values import is_matrix, shown
from tekso.framework.theta import Theta
from tekso.models.layers.stack import pieces_of_model
from tekso.models.mlp import Mlp
from tekso.tasks.classification.decoding import decoded_examples, missing_predict
from tekso.tasks.classification.exports import classifier_exports, classifier_text_exports

ACCURACY = "accuracy"
X, LABELS, WEIGHTS = "x", "labels", "weights"
PROBABILITIES = "probabilities"
MOST_CLASSES_PER_LABEL = 10
"""Labels are taken for IDs if the classes are more than this factor times the distinct labels."""


class Classification(Task):
    """Minimises the softmax cross-entropy between labels and the scores of a model.

    The input `Arrays` makes suitable batches. The model is any layer whose `fprop(theta, x, ctx)`
    returns scores (logits). If it has the Params `input_dim` and `output_dim` and they are not
    set, they are taken from the data. A pipeline can cut between the layers of an `Mlp` or a
    `Stack`, and between the pieces of a model that has a method `pieces()`, whose last piece
    returns the scores as "x". Any other model is one piece.

    For another loss or more metrics, override `sums` in a subclass.

    Reports "accuracy", the weighted share of examples whose label has the largest score.

    Shapes:
      batch:
        "x": [batch, ...], the input of the model, which returns [batch, num_classes]
        "labels": [batch], integers from 0 to num_classes - 1
        "weights": [batch] float32, 0 for padding
      loss returns: sums over the examples, scalars
      predict returns: "logits" [batch, num_classes], "labels" [batch] int32
    """

    class Params(Task.Params):
        """Params of Classification."""

        model: Layer.Params = param("From features to scores.", default=Mlp.Params())
        num_classes: int = param(
            "Number of classes. If not set: the largest label of the training data + 1, provided "
            "that at least a tenth of these classes have an example.",
            default=REQUIRED,
        )

    goals = {ACCURACY: "max"}  # noqa: RUF012
    model: Any

    def __init__(self, params: Any) -> None:
        """Builds the model.

        Raises:
          ValueError: there are fewer than 2 classes.
        """
        super().__init__(params)
        if self.params.num_classes < 2:
            raise ValueError(
                f"task.num_classes is {self.params.num_classes}: classification needs at least 2 "
                "classes, labels 0 and 1"
            )
        self.child("model", self.params.model)

    @classmethod
    def complete(cls, params: Any, input: Input) -> Any:
        """Sets num_classes, and the model's input_dim and output_dim, where they are not set.

        Raises:
          InputError: the data does not fit the task.
          ValueError: num_classes is not set, and the input does not have all labels at once.
        """
        params = params.copy()
        model = params.model
        takes_input_dim = "input_dim" in model and model.input_dim is REQUIRED
        if params.num_classes is REQUIRED or takes_input_dim:
            if not hasattr(input, "batch"):  # the sizes are in the data, which is not read yet
                input = input.params.instantiate()
            _check_arrays("input", input)
            if params.num_classes is REQUIRED:
                params.num_classes = _num_classes(_labels(input))
            if takes_input_dim:
                model.input_dim = int(np.prod(input.batch(0)[X].shape[1:]))
        if "output_dim" in model and model.output_dim is REQUIRED:
            model.output_dim = params.num_classes
        return params

    def check_inputs(self, inputs: Mapping[str, Any]) -> list[str]:
        """Checks names, shapes and types of the arrays, and the range of the labels.

        If an input has `arrays`, all its labels are checked; otherwise only those of one batch.

        Returns:
          Warnings about arrays that have no effect, and classes without training examples.

        Raises:
          InputError: an array is missing, or has a wrong shape, type or label.
        """
        for path, input in inputs.items():
            _check_arrays(path, input)
            self._check_labels(path, _known_arrays(input)[LABELS])
            if path != "input":
                self._check_features(path, input, inputs["input"])
        train = inputs["input"]
        if type(self) is not Classification:  # it may read more
            return _absent_classes(train)
        unread = unread_warnings("Classification", train, (X, LABELS, WEIGHTS))
        return [*unread, *_absent_classes(train)]

    def check_batch(self, what: str, batch: Mapping[str, np.ndarray]) -> None:
        """Checks the range of the labels.

        Raises:
          InputError: a label is out of range.
        """
        self._check_labels(what, batch[LABELS])

    def _check_labels(self, what: str, labels: np.ndarray) -> None:
        num_classes = self.params.num_classes
        wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
        if len(wrong):
            cure = "Number the classes from 0"
            if labels.min() < 0:
                cure += (
                    "; give examples without a label any class and the weight 0 (array 'weights')"
                )
            raise InputError(
                f"{what}: {len(wrong):,} labels are not in 0 to {num_classes - 1}: example "
                f"{wrong[0]} of the array {LABELS!r} has {labels[wrong[0]]}, but task.num_classes "
                f"is {num_classes}. {cure}; if there are more classes, set task.num_classes"
            )

    def _check_features(self, path: str, input: Input, train: Any) -> None:
        """Checks that the model accepts held-out examples if their shape differs from training.

        Traces the model on them, without computing anything.

        Raises:
          InputError: the model cannot compute examples of this shape.
        """
        batch, wanted = input.batch(0), form_of(train.batch(0))[X]
        form = form_of(batch)[X]
        if form == wanted:
            return

        def loss(weights: Mapping[str, tf.Tensor], batch: Mapping[str, tf.Tensor]) -> tf.Tensor:
            ctx = StepContext(mode="eval", num_examples=batch[LABELS].shape[0])
            return self.loss(self.theta(weights), batch, ctx).loss_sum

        weights, arrays = specs_of(self.specs()), specs_of(batch)
        try:
            tf.function(loss, autograph=False).get_concrete_function(weights, arrays)
        except (ValueError, TypeError, tf.errors.OpError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise InputError(
                f"{path}: {form_text({X: form})} for an example; in training "
                f"{form_text({X: wanted})}. The model cannot compute it: {reason}"
            ) from error

    def loss_weight(self, batch: Batch) -> tf.Tensor:
        """Returns the sum of the weights of the examples."""
        return tf.reduce_sum(batch[WEIGHTS])

    def predict(self, theta: Theta, batch: Batch, ctx: StepContext) -> dict[str, tf.Tensor]:
        """Returns the scores of examples, and the classes with the largest scores.

        Shapes:
          batch: "x" [batch, ...]; other arrays are ignored
          returns: "logits" [batch, num_classes], float32 or wider; "labels" [batch], int32

        Raises:
          ValueError: there is no "x".
        """
        if X not in batch:
            given = ", ".join(map(repr, batch)) or "none"
            raise ValueError(f"the batch has no array {X!r} (features), but has {given}")
        logits = self._scores(self.model.fprop(theta.model, batch[X], ctx))
        return {"logits": logits, LABELS: tf.argmax(logits, 1, output_type=tf.int32)}

    def class_probabilities(
        self, theta: Theta, x: tf.Tensor, ctx: StepContext
    ) -> dict[str, tf.Tensor]:
        """Returns the probabilities of the classes, and the likeliest one.

        Shapes:
          x: [batch, ...]
          returns: "probabilities" [batch, num_classes], "labels" [batch] int32
        """
        logits = self.predict(theta, {X: x}, ctx)["logits"]
        # Of the scores, as for the accuracy: different scores may have equal probabilities.
        labels = tf.argmax(logits, 1, output_type=tf.int32)
        return {PROBABILITIES: tf.nn.softmax(logits), LABELS: labels}

    def decode(self, program: Program, input: Input) -> Decoded | None:
        """Returns label, predicted class and its probability for some held-out examples.

        None for a subclass with its own `pieces` or `loss` that does not define `predict`, because
        its scores may be computed in another way, or from other arrays. Override it for another
        output of `--mode=decode`.
        """
        if missing_predict(type(self), Classification):
            return None
        return decoded_examples(self, program, input)

    def why_nothing_decoded(self) -> str:
        """See Task."""
        is_own = type(self).decode is not Classification.decode
        reason = "" if is_own else missing_predict(type(self), Classification)
        return reason or super().why_nothing_decoded()

    def exports(self, input: Input) -> dict[str, ExportedFunction]:
        """Returns "classify", of bytes of texts or of arrays; see `classifier_exports`."""
        return classifier_exports(self.class_probabilities, input)

    def text_exports(self, input: Input) -> dict[str, ExportedTexts]:
        """Returns the conversion from texts to classes, if the input has texts."""
        return classifier_text_exports(input, self.params.num_classes)

    def pieces(self) -> list[Piece]:
        """Returns the pieces of the model, and one for loss and metrics; see `Task`."""
        return [*pieces_of_model("model", self.model), Piece("loss", {}, self._run_sums)]

    def _run_sums(self, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        del theta
        logits = ctx.constrain(self._scores(flow[X]), ("batch", None))
        sums = loss_sums(self, "sums", self.sums(logits, flow))
        return {**flow, LOSS_SUM: sums.loss_sum, METRICS: sums.metrics}

    def sums(self, logits: tf.Tensor, batch: Batch) -> LossSums:
        """Returns the sums of the loss and the metrics, under every execution.

        Override it for another loss, or for more metrics.

        Shapes:
          logits: [batch, num_classes], at least float32
          batch: "labels" and "weights" [batch], and all other arrays of the input except "x"
          returns: sums over the examples
        """
        labels, weights = tf.cast(batch[LABELS], tf.int64), tf.cast(batch[WEIGHTS], logits.dtype)
        nats = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
        hits = tf.cast(tf.equal(tf.argmax(logits, 1), labels), logits.dtype)
        accuracy = tf.reduce_sum(weights * hits), tf.reduce_sum(weights)
        return LossSums(tf.reduce_sum(weights * nats), {ACCURACY: accuracy})

    def logits(self, theta: Theta, batch: Batch, ctx: StepContext) -> tf.Tensor:
        """Returns the scores of the classes, [batch, num_classes], for distillation."""
        return self._scores(self.model.fprop(theta.model, batch[X], ctx))

    def logit_weights(self, batch: Batch) -> tf.Tensor:
        """Returns the weights of the examples, [batch]."""
        return batch[WEIGHTS]

    def sums_of_logits(self, logits: tf.Tensor, batch: Batch, ctx: StepContext) -> LossSums:
        """Returns the loss and the metrics, given the scores."""
        flow = self._run_sums(Theta(), {**batch, X: logits}, ctx)
        return LossSums(flow[LOSS_SUM], flow[METRICS])

    def _scores(self, logits: tf.Tensor) -> tf.Tensor:
        """Returns the scores in float32 or wider.

        Raises:
          ValueError: its shape is not [batch, num_classes].
        """
        num_classes = self.params.num_classes
        if not is_matrix(logits, num_classes):
            raise ValueError(
                f"{type(self.model).__name__}.fprop returns {shown(logits)}, but must return a "
                f"tensor [batch, {num_classes}]: task.num_classes is {num_classes}"
            )
        return widen(logits)


def _known_arrays(input: Input) -> dict[str, np.ndarray]:
    """Returns the arrays of all examples for an input in memory, else those of one batch."""
    return {**input.batch(0), **(input.arrays or {})}


def _labels(input: Input) -> np.ndarray:
    """Returns all labels of an input.

    Raises:
      ValueError: the input is not in memory.
    """
    if input.arrays is None:
        raise ValueError(
            f"task.num_classes is not set, and {type(input).__name__} does not have all labels in "
            "memory, as Arrays does: set task.num_classes"
        )
    return _known_arrays(input)[LABELS]


def _num_classes(labels: np.ndarray) -> int:
    """Returns the number of classes: the largest label + 1.

    Raises:
      InputError: no label is above 0, or so few classes have an example that the labels are
        probably IDs.
    """
    num_distinct, num_classes = len(np.unique(labels)), int(labels.max()) + 1
    if num_classes < 2:
        wrong = f"{int((labels < 0).sum()):,} labels are below 0, and none is above 0"
        raise InputError(
            f"input: {wrong if labels.min() < 0 else 'all labels are 0, so there is one class'}. "
            "Number the classes from 0: labels = np.unique(labels, return_inverse=True)[1], before "
            "you split the data; if the training data has one class only, set task.num_classes"
        )
    if num_classes > MOST_CLASSES_PER_LABEL * num_distinct:
        raise InputError(
            f"input: the largest label is {num_classes - 1:,}, but there are only "
            f"{num_distinct:,} different labels. task.num_classes is not set, and would be "
            f"{num_classes:,}, with almost all classes without an example. If the labels are IDs, "
            "number them before you split the data: labels = np.unique(labels, "
            f"return_inverse=True)[1]. If there really are {num_classes:,} classes, set "
            "task.num_classes"
        )
    return num_classes


def _absent_classes(train: Any) -> list[str]:
    """Returns a warning if classes up to the largest label have no training example."""
    if train.arrays is None:
        return []
    present = np.unique(_labels(train).astype(np.int64))
    absent = np.setdiff1d(np.arange(present[-1]), present, assume_unique=True)
    if not len(absent):
        return []
    which = ", ".join(map(str, absent[:5])) + (", …" if len(absent) > 5 else "")
    return [
        f"input: {len(absent):,} of the classes 0 to {present[-1]:,} have no training example "
        f"({which}). Classes are numbered from 0: if labels count from 1, subtract 1"
    ]


def _check_arrays(path: str, input: Input) -> None:
    """Checks that an input has the arrays of the task, with the right shapes and types.

    Raises:
      InputError: an array is missing, or has a wrong shape or type.
    """
    if input.num_batches == 0:
        raise InputError(
            f"{path} ({input.describe()}) has no examples. Add examples, or remove it from "
            "eval_inputs"
        )
    arrays = _known_arrays(input)
    missing = [name for name in (X, LABELS, WEIGHTS) if name not in arrays]
    if missing:
        raise InputError(
            f"{path} has no array {missing[0]!r}: Classification requires {X!r} (features), "
            f"{LABELS!r} and {WEIGHTS!r}; given: {', '.join(map(repr, arrays)) or 'none'}"
        )
    for name in (LABELS, WEIGHTS):
        if arrays[name].ndim != 1:
            shape = ["examples", *arrays[name].shape[1:]]
            raise InputError(
                f"{path}: {name!r} is {_dims(shape)}, but must be [examples], one number per "
                "example. For one-hot labels use labels.argmax(1), for a column labels[:, 0]; a "
                "tf.data.Dataset must be unbatched"
            )
    if arrays[LABELS].dtype.kind not in "bui":
        raise InputError(
            f"{path}: {LABELS!r} has type {arrays[LABELS].dtype}, but must be integers, the "
            "numbers of the classes from 0: labels.astype('int32')"
        )


def _dims(names: list[Any]) -> str:
    return f"[{', '.join(map(str, names))}]"
