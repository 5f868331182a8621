"""The base of tasks that predict the tokens of a text."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.pieces import LOSS_SUM, METRICS, Flow, Piece
from tekso.framework.task import Batch, LossSums, Task
from tekso.framework.theta import Theta
from tekso.tasks.lm.cross_entropy import smoothed_cross_entropy


class TokenTask(Task, abc.ABC):
    """Minimises the cross-entropy of every weighted token; the base of tasks on texts.

    Shapes:
      batch: PREFIX"labels": [B, L] int32; PREFIX"weights": [B, L] float32, 0 for padding
      loss returns: sums over the weighted labels, scalars
    """

    class Params(Task.Params):
        """Params of TokenTask."""

        model: Layer.Params = param("The network.", default=REQUIRED)
        label_smoothing: float = param(
            "Share of the target probability that is spread evenly.", default=0.0
        )

    prefix = ""
    """Beginning of the names of the arrays of a batch that have labels and weights."""

    model: Any

    def __init__(self, params: Any) -> None:
        """Builds the network."""
        super().__init__(params)
        if not 0.0 <= self.params.label_smoothing < 1.0:
            raise ValueError(
                f"task.label_smoothing is {self.params.label_smoothing}, must be in [0, 1)"
            )
        self.child("model", self.params.model)

    @abc.abstractmethod
    def nats(
        self, theta: Theta, batch: Batch, ctx: StepContext, label_smoothing: float
    ) -> tf.Tensor:
        """Returns the cross-entropy of every label, [B, L]."""

    @abc.abstractmethod
    def metrics(self, loss_sum: tf.Tensor, batch: Batch, label_smoothing: float) -> dict[str, Any]:
        """Returns the metrics, given the sum of the losses and the label smoothing in it."""

    def _smoothing(self, ctx: StepContext) -> float:
        """Returns the label smoothing of a step; it applies in training only."""
        return self.params.label_smoothing if ctx.is_training else 0.0

    def loss_weight(self, batch: Batch) -> tf.Tensor:
        """Returns the number of weighted labels."""
        return tf.reduce_sum(batch[f"{self.prefix}weights"])

    def loss(self, theta: Theta, batch: Batch, ctx: StepContext) -> LossSums:
        """Returns the sum of nats over the weighted labels; label smoothing applies in training."""
        return self._sums(self.nats(theta, batch, ctx, self._smoothing(ctx)), batch, ctx)

    def _sums(self, nats: tf.Tensor, batch: Batch, ctx: StepContext) -> LossSums:
        loss_sum = tf.reduce_sum(batch[f"{self.prefix}weights"] * nats)
        return LossSums(loss_sum, self.metrics(loss_sum, batch, self._smoothing(ctx)))

    def pieces(self) -> list[Piece]:
        """Returns the pieces of the model, and one for loss and metrics; see Task."""
        smoothing = self.params.label_smoothing
        pieces = [piece.below("model") for piece in self.model.pieces(label_smoothing=smoothing)]
        return [*pieces, Piece("loss", {}, self._run_sums)]

    def _run_sums(self, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        sums = self._sums(flow["cross_entropy"], flow, ctx)
        return {**flow, LOSS_SUM: sums.loss_sum, METRICS: sums.metrics}

    def logit_weights(self, batch: Batch) -> tf.Tensor:
        """Returns the weights of the labels, [B, L]."""
        return batch[f"{self.prefix}weights"]

    def sums_of_logits(self, logits: tf.Tensor, batch: Batch, ctx: StepContext) -> LossSums:
        """Returns the loss and the metrics, given the scores."""
        labels = batch[f"{self.prefix}labels"]
        return self._sums(smoothed_cross_entropy(logits, labels, self._smoothing(ctx)), batch, ctx)

    def count(self, batch: Mapping[str, np.ndarray]) -> tuple[int, str]:
        """Returns the number of weighted labels, in tokens."""
        return int(np.count_nonzero(batch[f"{self.prefix}weights"])), "tokens"
