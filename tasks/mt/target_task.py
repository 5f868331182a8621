"""The base of tasks that predict the tokens of a text from those before them and a source."""

from __future__ import annotations

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
from tekso.models.decoding.decoder import SequenceToSequence
from tekso.tasks.lm.cross_entropy import perplexity, smoothed_cross_entropy

_NATS = "nats"  # the mean loss without label smoothing; its exponential is the perplexity


class TargetTask(Task):
    """Minimises the cross-entropy of every target token, including the end token.

    Shapes:
      batch: the arrays of the source, and
        "target_ids" (decoder inputs), "target_labels" (to be predicted), "target_segment_ids":
          [B, T] int32; "target_weights": [B, T] float32, 0 for padding
      loss returns: sums over the weighted labels, scalars
      log_probs returns: [B, T] float32
    """

    class Params(Task.Params):
        """Params of TargetTask."""

        model: Layer.Params = param("The network, a SequenceToSequence.", default=REQUIRED)
        label_smoothing: float = param(
            "Share of the target probability that is spread evenly.", default=0.0
        )

    goals = {"perplexity": "min"}  # noqa: RUF012
    model: SequenceToSequence

    def __init__(self, params: Any) -> None:
        """Builds the network."""
        super().__init__(params)
        if not 0.0 <= self.params.label_smoothing < 1.0:
            raise ValueError(
                f"task.label_smoothing is {self.params.label_smoothing}, must be in [0, 1)"
            )
        self.child("model", self.params.model)

    def loss_weight(self, batch: Batch) -> tf.Tensor:
        """Returns the number of weighted labels."""
        return tf.reduce_sum(batch["target_weights"])

    def loss(self, theta: Theta, batch: Batch, ctx: StepContext) -> LossSums:
        """Returns the sum of nats over the weighted labels; label smoothing applies in training."""
        smoothing = self.params.label_smoothing if ctx.is_training else 0.0
        nats = self.model.token_cross_entropy(theta.model, batch, ctx, label_smoothing=smoothing)
        return LossSums(*self._sums(nats, batch, smoothing))

    def _sums(self, nats: tf.Tensor, batch: Batch, smoothing: float) -> Any:
        """Returns the sum of the losses, and the metrics."""
        loss_sum = tf.reduce_sum(batch["target_weights"] * nats)
        return loss_sum, {} if smoothing else {_NATS: (loss_sum, self.loss_weight(batch))}

    def pieces(self) -> list[Piece]:
        """Returns the pieces of the model, and one for loss and metrics; see Task."""
        smoothing = self.params.label_smoothing
        pieces = [piece.below("model") for piece in self.model.pieces(label_smoothing=smoothing)]
        return [*pieces, Piece("loss", {}, self._run_sums)]

    def _run_sums(self, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        smoothing = self.params.label_smoothing if ctx.is_training else 0.0
        loss_sum, metrics = self._sums(flow["cross_entropy"], flow, smoothing)
        return {**flow, LOSS_SUM: loss_sum, METRICS: metrics}

    def logits(self, theta: Theta, batch: Batch, ctx: StepContext) -> tf.Tensor:
        """Returns the scores of the tokens of the target, [B, T, V], for distillation."""
        model: Any = self.model
        scores: tf.Tensor = model.logits(theta.model, batch, ctx)
        return scores

    def logit_weights(self, batch: Batch) -> tf.Tensor:
        """Returns the weights of the labels, [B, T]."""
        return batch["target_weights"]

    def sums_of_logits(self, logits: tf.Tensor, batch: Batch, ctx: StepContext) -> LossSums:
        """Returns the loss and the metrics, given the scores."""
        smoothing = self.params.label_smoothing if ctx.is_training else 0.0
        nats = smoothed_cross_entropy(logits, batch["target_labels"], smoothing)
        return LossSums(*self._sums(nats, batch, smoothing))

    def log_probs(self, theta: Theta, batch: Batch, ctx: StepContext) -> tf.Tensor:
        """Returns the log-probability of every label in nats, [B, T] float32; pure."""
        return -self.model.token_cross_entropy(theta.model, batch, ctx)

    def count(self, batch: Mapping[str, np.ndarray]) -> tuple[int, str]:
        """Returns the number of weighted labels, in tokens of the target."""
        return int(np.count_nonzero(batch["target_weights"])), "tokens"

    def summarize(self, sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        """Adds the perplexity to the means, except with label smoothing."""
        figures = super().summarize(sums)
        nats = figures.pop(_NATS, None)
        if nats is not None:
            figures["perplexity"] = perplexity(nats)
        return figures
