"""The base of tasks that predict the tokens of a text from those before them and a source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.task import Batch
from tekso.framework.theta import Theta
from tekso.models.decoding.decoder import SequenceToSequence
from tekso.tasks.lm.cross_entropy import perplexity
from tekso.tasks.lm.token_task import TokenTask

_NATS = "nats"  # the mean loss without label smoothing; its exponential is the perplexity


class TargetTask(TokenTask):
    """Minimises the cross-entropy of every target token, including the end token.

    Shapes:
      batch: the arrays of the source, and
        "target_ids" (decoder inputs), "target_labels" (to be predicted), "target_segment_ids":
          [B, T] int32; "target_weights": [B, T] float32, 0 for padding
      loss returns: sums over the weighted labels, scalars
      log_probs returns: [B, T] float32
    """

    class Params(TokenTask.Params):
        """Params of TargetTask."""

        model: Layer.Params = param("The network, a SequenceToSequence.", default=REQUIRED)

    goals = {"perplexity": "min"}  # noqa: RUF012
    prefix = "target_"
    model: SequenceToSequence

    def nats(
        self, theta: Theta, batch: Batch, ctx: StepContext, label_smoothing: float
    ) -> tf.Tensor:
        """See TokenTask."""
        return self.model.token_cross_entropy(
            theta.model, batch, ctx, label_smoothing=label_smoothing
        )

    def metrics(self, loss_sum: tf.Tensor, batch: Batch, label_smoothing: float) -> dict[str, Any]:
        """See TokenTask; with label smoothing there are none in training."""
        return {} if label_smoothing else {_NATS: (loss_sum, self.loss_weight(batch))}

    def logits(self, theta: Theta, batch: Batch, ctx: StepContext) -> tf.Tensor:
        """Returns the scores of the tokens of the target, [B, T, V], for distillation."""
        model: Any = self.model
        scores: tf.Tensor = model.logits(theta.model, batch, ctx)
        return scores

    def log_probs(self, theta: Theta, batch: Batch, ctx: StepContext) -> tf.Tensor:
        """Returns the log-probability of every label in nats, [B, T] float32; pure."""
        return -self.model.token_cross_entropy(theta.model, batch, ctx)

    def summarize(self, sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        """Adds the perplexity to the means, except with label smoothing."""
        figures = super().summarize(sums)
        nats = figures.pop(_NATS, None)
        if nats is not None:
            figures["perplexity"] = perplexity(nats)
        return figures
