"""The classification task: predict one of several classes for each example."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.input.input import Input, form_of, form_text
from tekso.framework.input.skips import InputError
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.pieces import LOSS_SUM, METRICS, Flow, Piece
from tekso.framework.primitives.precision import widen
from tekso.framework.task import Batch, LossSums, Task
from tekso.framework.theta import Theta
from tekso.models.layers.stack import StackBase, pieces_of_stack
from tekso.models.mlp import Mlp

ACCURACY = "accuracy"
X, LABELS, WEIGHTS = "x", "labels", "weights"
MOST_CLASSES_PER_LABEL = 10
"""Labels that leave more classes without an example are taken for IDs."""


class Classification(Task):
    """Minimises the softmax cross-entropy between labels and the scores of a model.

    Batches, as the input `Arrays` makes them: "x" [batch, ...], what the model takes; "labels"
    [batch], integers from 0 to num_classes - 1; "weights" [batch] float32, 0 for padding.

    The model is any layer whose `fprop(theta, x, ctx)` returns scores (logits) [batch,
    num_classes]. Its sizes `input_dim` and `output_dim`, where it has such Params and they are
    open, are taken from the data. A pipeline can cut between the layers of an `Mlp`, of a `Stack`,
    and between the pieces of a model that has a method `pieces()`, whose last piece leaves the
    scores as "x"; any other model is one piece.

    A subclass that overrides `sums` has another loss or more metrics.

    Reports "accuracy", the weighted share of examples whose largest score is that of the label.
    """

    class Params(Task.Params):
        """Params of Classification."""

        model: Layer.Params = param("From features to scores.", default=Mlp.Params())
        num_classes: int = param(
            "Number of classes; left open, the largest label of the training data + 1, if at least "
            "a tenth of these have an example.",
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
        """Fills in what is open of num_classes, and of the model's input_dim and output_dim.

        Raises:
          InputError: the data does not fit the task.
          ValueError: the number of classes is open, and the input does not know all its labels.
        """
        params = params.copy()
        model = params.model
        takes_input_dim = "input_dim" in model and model.input_dim is REQUIRED
        if params.num_classes is REQUIRED or takes_input_dim:
            if not hasattr(input, "batch"):  # nothing is read yet, and the sizes are in the data
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

        All labels are checked of inputs that have `arrays`; of others, those of a batch.

        Returns:
          a warning if classes have no training example.

        Raises:
          InputError: they do not fit.
        """
        for path, input in inputs.items():
            _check_arrays(path, input)
            self._check_labels(path, _known_arrays(input)[LABELS])
            if path != "input":
                self._check_features(path, input, inputs["input"])
        return _absent_classes(inputs["input"])

    def check_batch(self, what: str, batch: Mapping[str, np.ndarray]) -> None:
        """Checks the range of the labels.

        Raises:
          InputError: one is no class.
        """
        self._check_labels(what, batch[LABELS])

    def _check_labels(self, what: str, labels: np.ndarray) -> None:
        num_classes = self.params.num_classes
        wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
        if len(wrong):
            raise InputError(
                f"{what}: {len(wrong):,} labels are not in 0 to {num_classes - 1}: example "
                f"{wrong[0]} has {labels[wrong[0]]}. Number the classes from 0; if classes are "
                "missing in the training data, set task.num_classes"
            )

    def _check_features(self, path: str, input: Input, train: Any) -> None:
        """Checks that the model can compute held-out examples of another shape than in training.

        It is traced on them, which computes nothing.

        Raises:
          InputError: it cannot.
        """
        batch, wanted = input.batch(0), form_of(train.batch(0))[X]
        form = form_of(batch)[X]
        if form == wanted:
            return

        def loss(weights: Any, batch: Any) -> Any:
            ctx = StepContext(mode="eval", num_examples=len(labels))
            return self.loss(self.theta(weights), batch, ctx).loss_sum

        labels = batch[LABELS]
        weights = {name: tf.TensorSpec(w.shape, w.dtype) for name, w in self.specs().items()}
        arrays = {name: tf.TensorSpec(array.shape, array.dtype) for name, array in batch.items()}
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
          batch: "x" [batch, ...]; other arrays are not read
          returns: "logits" [batch, num_classes], float32 or wider; "labels" [batch], int32

        Raises:
          ValueError: there is no "x".
        """
        if X not in batch:
            given = ", ".join(map(repr, batch)) or "none"
            raise ValueError(f"the batch has no array {X!r} (features); given are {given}")
        logits = self._scores(self.model.fprop(theta.model, batch[X], ctx))
        return {"logits": logits, LABELS: tf.argmax(logits, 1, output_type=tf.int32)}

    def pieces(self) -> list[Piece]:
        """See `Task`: the pieces of the model, and the sums over its scores."""
        return [*self._model_pieces(), Piece("loss", {}, self._run_sums)]

    def _model_pieces(self) -> list[Piece]:
        if hasattr(self.model, "pieces"):
            return [piece.below("model") for piece in self.model.pieces()]

        def run(compute: Any, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
            return {**flow, X: compute(theta.model, flow[X], ctx)}

        if isinstance(self.model, StackBase):
            return pieces_of_stack("model", self.model, run)

        def run_model(theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
            return run(self.model.fprop, theta, flow, ctx)

        return [Piece("model", {"model": self.model}, run_model)]

    def _run_sums(self, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        del theta
        logits = ctx.constrain(self._scores(flow[X]), ("batch", None))
        sums = self.sums(logits, flow)
        return {**flow, LOSS_SUM: sums.loss_sum, METRICS: sums.metrics}

    def sums(self, logits: tf.Tensor, batch: Batch) -> LossSums:
        """Returns the sums of the loss and the metrics, under every execution.

        Override it for another loss, or for more metrics.

        Shapes:
          logits: [batch, num_classes], at least float32
          batch: "labels" and "weights" [batch], and what else the input has, but "x"
          returns: sums over the examples
        """
        labels, weights = tf.cast(batch[LABELS], tf.int64), tf.cast(batch[WEIGHTS], logits.dtype)
        nats = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
        hits = tf.cast(tf.equal(tf.argmax(logits, 1), labels), logits.dtype)
        accuracy = tf.reduce_sum(weights * hits), tf.reduce_sum(weights)
        return LossSums(tf.reduce_sum(weights * nats), {ACCURACY: accuracy})

    def _scores(self, logits: tf.Tensor) -> tf.Tensor:
        """Returns what the model returned, in float32 or wider.

        Raises:
          ValueError: its shape is not [batch, num_classes].
        """
        num_classes = self.params.num_classes
        shape = list(logits.shape) if tf.is_tensor(logits) else type(logits).__name__
        if not isinstance(shape, list) or len(shape) != 2 or shape[1] != num_classes:
            raise ValueError(
                f"{type(self.model).__name__}.fprop returns scores of shape {shape}, and has to "
                f"return a tensor [batch, {num_classes}]: task.num_classes is {num_classes}"
            )
        return widen(logits)


def _known_arrays(input: Input) -> dict[str, np.ndarray]:
    """Returns the arrays of a batch, of an input in memory those of all examples."""
    return {**input.batch(0), **(input.arrays or {})}


def _labels(input: Input) -> np.ndarray:
    """Returns all labels of an input.

    Raises:
      ValueError: it does not know them.
    """
    if input.arrays is None:
        raise ValueError(
            f"task.num_classes is open, and {type(input).__name__} does not have all labels at "
            "once, as Arrays does: set it"
        )
    return _known_arrays(input)[LABELS]


def _num_classes(labels: np.ndarray) -> int:
    """Returns the number of classes that labels stand for: the largest + 1.

    Raises:
      InputError: so few of them have an example that the labels must be something else.
    """
    num_distinct, num_classes = len(np.unique(labels)), int(labels.max()) + 1
    if num_classes > MOST_CLASSES_PER_LABEL * num_distinct:
        raise InputError(
            f"input: the largest label is {num_classes - 1:,}, and there are {num_distinct:,} "
            f"different ones: task.num_classes is open, and would be {num_classes:,}, almost all "
            "without an example. If labels are IDs, number them before the data is split: labels "
            "= np.unique(labels, return_inverse=True)[1]. If there are so many classes, set "
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
    """Checks that an input has the arrays of the task, in its shapes and types.

    Raises:
      InputError: it has not.
    """
    if input.num_batches == 0:
        raise InputError(
            f"{path} ({input.describe()}) has no examples. Give it some, or leave it out of "
            "eval_inputs"
        )
    arrays = _known_arrays(input)
    missing = [name for name in (X, LABELS, WEIGHTS) if name not in arrays]
    if missing:
        raise InputError(
            f"{path} has no array {missing[0]!r}: Classification takes {X!r} (features), "
            f"{LABELS!r} and {WEIGHTS!r}; given are {', '.join(map(repr, arrays)) or 'none'}"
        )
    for name in (LABELS, WEIGHTS):
        if arrays[name].ndim != 1:
            shape = ["examples", *arrays[name].shape[1:]]
            raise InputError(
                f"{path}: {name!r} is {_dims(shape)}, and has to be [examples], one number per "
                "example. For one-hot labels take labels.argmax(1), for a column labels[:, 0]; a "
                "tf.data.Dataset has to be unbatched"
            )
    if arrays[LABELS].dtype.kind not in "bui":
        raise InputError(
            f"{path}: {LABELS!r} is of type {arrays[LABELS].dtype}, and has to be of integers, the "
            "numbers of the classes from 0: labels.astype('int32')"
        )


def _dims(names: list[Any]) -> str:
    return f"[{', '.join(map(str, names))}]"
