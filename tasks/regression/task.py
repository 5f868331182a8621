"""The regression task: predict one or more numbers for each example."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.exports import ExportedFunction, ExportedInput, ExportedOutput
from tekso.framework.input.input import Input
from tekso.framework.input.unread_arrays import unread_warnings
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.pieces import LOSS_SUM, METRICS, Flow, Piece
from tekso.framework.primitives.precision import widen
from tekso.framework.task import Batch, Decoded, LossSums, Program, Task
from tekso.framework.task_results import loss_sums
from tekso.framework.task_values import is_matrix, shown
from tekso.framework.theta import Theta
from tekso.models.layers.stack import pieces_of_model
from tekso.models.layers.standardization import Standardization
from tekso.models.mlp import Mlp
from tekso.tasks.regression.arrays import WEIGHTS, X, Y, check_input, column_warnings, statistics
from tekso.tasks.regression.decoding import decoded_examples

ABSOLUTE_ERROR, R2 = "absolute_error", "r2"
PREDICT = "predict"  # name of the exported function
MOST_NAMED = 10
"""Number of targets up to which each has its own absolute error in reports."""


class Regression(Task):
    """Minimises the squared error between targets and the outputs of a model.

    The input `Arrays` makes suitable batches. Features and targets are standardized with the means
    and standard deviations of the training examples (those of weight 0 do not count), so the model
    gets and returns numbers around 0. Checkpoints contain the means and deviations.

    The model is any layer whose `fprop(theta, x, ctx)` returns a number for each target. If it has
    the Params `input_dim` and `output_dim` and they are not set, they are taken from the data. A
    pipeline can cut it like the model of `Classification`.

    For another loss or more metrics, override `sums` in a subclass.

    Reports

      loss            mean squared error of standardized targets: 1 if the means are predicted
      absolute_error  mean absolute error, in the unit of the targets; with several targets,
                      also of each, as "absolute_error/NAME"
      r2              1 - squared error / squared error of the means of the training targets

    Shapes:
      batch:
        "x": [batch, features], numbers of any type
        "y": [batch, targets], or [batch] for one target
        "weights": [batch] float32, 0 for padding
      loss returns: sums over the examples, scalars
      predict returns: "y" [batch, targets] float32, in the units of the targets
    """

    class Params(Task.Params):
        """Params of Regression."""

        model: Layer.Params = param(
            "From standardized features to standardized targets.", default=Mlp.Params()
        )
        features: Standardization.Params = param(
            "Standardization of x; by default, computed from the training examples.",
            default=Standardization.Params(),
        )
        targets: Standardization.Params = param(
            "Standardization of y; by default, computed from the training examples.",
            default=Standardization.Params(),
        )
        target_names: list[str] = param(
            "Names of the targets in reports. Empty: `target_names` of the input if it has any, "
            "otherwise y0, y1, …",
            default=[],
        )

    goals = {ABSOLUTE_ERROR: "min", R2: "max"}  # noqa: RUF012
    model: Any
    features: Standardization
    targets: Standardization

    def __init__(self, params: Any) -> None:
        """Builds the model.

        Raises:
          ValueError: the number of names is not that of the targets.
        """
        super().__init__(params)
        p = self.params
        for name in ("features", "model", "targets"):
            self.child(name, p.get(name))
        self.num_features, self.num_targets = len(p.features.mean), len(p.targets.mean)
        unnamed = [f"y{i}" for i in range(self.num_targets)] if self.num_targets > 1 else [Y]
        self.target_names = tuple(p.target_names or unnamed)
        if len(self.target_names) != self.num_targets:
            raise ValueError(
                f"task.target_names are {', '.join(self.target_names)}, but there are "
                f"{self.num_targets} targets: give each a name"
            )

    @classmethod
    def complete(cls, params: Any, input: Input) -> Any:
        """Sets means, deviations, names and sizes of the model, where they are not set.

        Raises:
          InputError: the data does not fit the task.
          ValueError: the input does not have all examples at once.
        """
        params = params.copy()
        model = params.model
        parts = {X: params.features, Y: params.targets}
        if any(part.get(n) is REQUIRED for part in parts.values() for n in ("mean", "scale")):
            if not hasattr(input, "batch"):  # the numbers are in the data, which is not read yet
                input = input.params.instantiate()
            for name, part in parts.items():
                mean, scale = statistics(input, name)
                part.mean = mean if part.mean is REQUIRED else part.mean
                part.scale = scale if part.scale is REQUIRED else part.scale
        if not params.target_names:
            params.target_names = list(getattr(input, "target_names", ()))
        for size, part in (("input_dim", params.features), ("output_dim", params.targets)):
            if size in model and model.get(size) is REQUIRED:
                model.set({size: len(part.mean)})
        return params

    def check_inputs(self, inputs: Mapping[str, Any]) -> list[str]:
        """Checks names and shapes of the arrays.

        Returns:
          Warnings about arrays that have no effect, and columns that are the same in all
          training examples.

        Raises:
          InputError: an array is missing, or has a wrong shape.
        """
        for path, input in inputs.items():
            check_input(path, input, {X: self.num_features, Y: self.num_targets})
        train = inputs["input"]
        if type(self) is not Regression:  # it may read more
            return column_warnings(train)
        return [*unread_warnings("Regression", train, (X, Y, WEIGHTS)), *column_warnings(train)]

    def loss_weight(self, batch: Batch) -> tf.Tensor:
        """Returns the sum of the weights of the examples."""
        return tf.reduce_sum(batch[WEIGHTS])

    def predict(self, theta: Theta, batch: Batch, ctx: StepContext) -> dict[str, tf.Tensor]:
        """Returns the predicted targets, in their units.

        Shapes:
          batch: "x" [batch, features]; other arrays are ignored
          returns: "y" [batch, targets] float32

        Raises:
          ValueError: there is no "x", or it has another number of features than in training.
        """
        if X not in batch:
            given = ", ".join(map(repr, batch)) or "none"
            raise ValueError(f"the batch has no array {X!r} (features), but has {given}")
        x = self._standardized(theta, batch[X], ctx)
        outputs = self._outputs(self.model.fprop(theta.model, x, ctx))
        return {Y: self.targets.inverse(theta.targets, outputs, ctx)}

    def predictions(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> dict[str, tf.Tensor]:
        """Returns `predict` of features, for decoding and export."""
        return self.predict(theta, {X: x}, ctx)

    def decode(self, program: Program, input: Input) -> Decoded | None:
        """Returns targets and predictions for some held-out examples.

        Override it for another output of `--mode=decode`.
        """
        return decoded_examples(self.predictions, self.target_names, program, input)

    def exports(self, input: Input) -> dict[str, ExportedFunction]:
        """Returns "predict", from features to targets, in the units of the data."""
        del input
        x = ExportedInput("features, as in the data", tf.float32, shape=(self.num_features,))
        names = ", ".join(self.target_names[:MOST_NAMED])
        y = ExportedOutput(f"{names}, in their units: float32, [examples, {self.num_targets}]")
        function = ExportedFunction(
            doc="Predicts the targets of examples.",
            function=self.predictions,
            inputs={X: x},
            outputs={Y: y},
            for_litert=True,
        )
        return {PREDICT: function}

    def pieces(self) -> list[Piece]:
        """Returns the pieces of the model, between standardization and loss; see `Task`."""

        def standardize(theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
            return {**flow, X: self._standardized(theta, flow[X], ctx)}

        return [
            Piece("features", {"features": self.features}, standardize),
            *pieces_of_model("model", self.model),
            Piece("loss", {"targets": self.targets}, self._run_sums),
        ]

    def sums(self, outputs: tf.Tensor, batch: Batch) -> LossSums:
        """Returns the sums of the loss and of r2, under every execution.

        Override it for another loss, or for more metrics.

        Shapes:
          outputs: [batch, targets] float32, predictions of standardized targets
          batch: "y" [batch, targets], standardized; "weights" [batch], and all other arrays of the
            input except "x"
          returns: sums over the examples
        """
        weights, y = tf.cast(batch[WEIGHTS], outputs.dtype), batch[Y]
        squared_error = tf.reduce_sum(weights * tf.reduce_mean(tf.square(outputs - y), 1))
        squared = tf.reduce_sum(weights * tf.reduce_mean(tf.square(y), 1))
        return LossSums(squared_error, {R2: (squared - squared_error, squared)})

    def _run_sums(self, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        outputs = ctx.constrain(self._outputs(flow[X]), ("batch", None))
        y = tf.expand_dims(flow[Y], 1) if flow[Y].shape.rank == 1 else flow[Y]
        y = tf.cast(self.targets.fprop(theta.targets, y, ctx), outputs.dtype)
        sums = loss_sums(self, "sums", self.sums(outputs, {**flow, Y: y}))
        weights = tf.cast(flow[WEIGHTS], outputs.dtype)
        errors = tf.abs(outputs - y) * tf.cast(theta.targets.scale, outputs.dtype)
        metrics = {ABSOLUTE_ERROR: tf.reduce_sum(weights * tf.reduce_mean(errors, 1))}
        if 1 < self.num_targets <= MOST_NAMED:
            for i, name in enumerate(self.target_names):
                only = tf.constant(np.eye(self.num_targets)[i], outputs.dtype)
                one = tf.reduce_sum(weights * tf.reduce_sum(errors * only, 1))
                metrics[f"{ABSOLUTE_ERROR}/{name}"] = one
        weight = tf.reduce_sum(weights)
        own = {name: (value, weight) for name, value in metrics.items()}
        return {**flow, LOSS_SUM: sums.loss_sum, METRICS: {**sums.metrics, **own}}

    def _standardized(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """Returns the standardized features.

        Raises:
          ValueError: x has another shape than in training.
        """
        x = tf.convert_to_tensor(x)
        if list(x.shape)[1:] != [self.num_features]:
            raise ValueError(
                f"{X!r} (features) is {list(x.shape)}, but must be [examples, "
                f"{self.num_features}]: the columns of training, in the same order"
            )
        return self.features.fprop(theta.features, x, ctx)

    def _outputs(self, outputs: tf.Tensor) -> tf.Tensor:
        """Returns the outputs of the model in float32 or wider.

        Raises:
          ValueError: their shape is not [batch, targets].
        """
        if not is_matrix(outputs, self.num_targets):
            raise ValueError(
                f"{type(self.model).__name__}.fprop returns {shown(outputs)}, but must return a "
                f"tensor [batch, {self.num_targets}]: a number for each target"
            )
        return widen(outputs)
