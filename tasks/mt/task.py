"""The translation task: predict the target, token by token, given the source."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.pieces import LOSS_SUM, METRICS, Flow, Piece
from tekso.framework.task import LOSS, Batch, LossSums, Task
from tekso.framework.theta import Theta

MAX_EXPONENT = 80.0  # a loss beyond it has no perplexity worth printing


class Translation(Task):
    """Minimises the cross-entropy of every token of the target, its end included.

    Batches: "source_ids", "source_segment_ids" [B, S], "target_ids" (what is read), "target_labels"
    (what is predicted), "target_segment_ids" [B, T] int32, "target_weights" [B, T] float32 (0 is
    padding), and of packed rows "source_positions" [B, S] and "target_positions" [B, T] int32.
    """

    class Params(Task.Params):
        """Params of Translation."""

        model: Layer.Params = param(
            "The network. Vocabularies, left open, are those of the tokenizers.", default=REQUIRED
        )
        label_smoothing: float = param("Share of the target that is spread evenly.", default=0.0)

    model: Any

    def __init__(self, params: Any) -> None:
        """Builds the network."""
        super().__init__(params)
        if not 0.0 <= self.params.label_smoothing < 1.0:
            raise ValueError(
                f"task.label_smoothing is {self.params.label_smoothing}: want a share in [0, 1)"
            )
        self.child("model", self.params.model)

    @classmethod
    def complete(cls, params: Any, input: Any) -> Any:
        """Fills in what is open: the vocabularies of both sides, and learned positions.

        Raises:
          ValueError: the size of a vocabulary is nowhere said, or smaller than the input's.
        """
        params = params.copy()
        for name in ("source_vocab_size", "target_vocab_size"):
            told, size = params.model.get(name), _vocab_size(input, name)
            if told is REQUIRED:
                if size is None:
                    raise ValueError(
                        f"task.model.{name} is open: in training the text tells it; where no text "
                        f"is read, set it, as in --set task.model.{name}=100"
                    )
                params.model.set({name: size})
            elif size is not None and told < size:
                raise ValueError(
                    f"task.model.{name} is {told}, but the input has {size} tokens: leave it "
                    "unset, or set at least that"
                )
        for side in ("source", "target"):
            length, path = f"{side}_length", f"{side}_positions.max_length"
            if (
                length in input.params
                and path in params.model
                and (params.model.get(path) is REQUIRED)
            ):
                params.model.set({path: input.params.get(length)})
        return params

    def loss_weight(self, batch: Batch) -> tf.Tensor:
        """Returns the number of weighted labels."""
        return tf.reduce_sum(batch["target_weights"])

    def loss(self, theta: Theta, batch: Batch, ctx: Any) -> LossSums:
        """Returns the sum of nats over the weighted labels; labels are smoothed in training."""
        smoothing = self.params.label_smoothing if ctx.is_training else 0.0
        nats = self.model.token_cross_entropy(theta.model, batch, ctx, label_smoothing=smoothing)
        return LossSums(tf.reduce_sum(batch["target_weights"] * nats))

    def pieces(self) -> list[Piece]:
        """See Task: the pieces of the model, and the sum of what it returns."""
        smoothing = self.params.label_smoothing
        pieces = [piece.below("model") for piece in self.model.pieces(label_smoothing=smoothing)]
        return [*pieces, Piece("loss", {}, self._run_sums)]

    def _run_sums(self, theta: Theta, flow: Flow, ctx: Any) -> Flow:
        loss_sum = tf.reduce_sum(flow["target_weights"] * flow["cross_entropy"])
        return {**flow, LOSS_SUM: loss_sum, METRICS: {}}

    def log_probs(self, theta: Theta, batch: Batch, ctx: Any) -> tf.Tensor:
        """Returns the log-probability of every label in nats, [B, T] float32; pure."""
        return -self.model.token_cross_entropy(theta.model, batch, ctx)

    def count(self, batch: Mapping[str, np.ndarray]) -> tuple[int, str]:
        """Returns the number of weighted labels, in tokens of the target."""
        return int(np.count_nonzero(batch["target_weights"])), "tokens"

    def summarize(self, sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        """Adds the perplexity to the means."""
        figures = super().summarize(sums)
        if LOSS in figures and not self.params.label_smoothing:
            figures["perplexity"] = math.exp(min(figures[LOSS], MAX_EXPONENT))
        return figures


def _vocab_size(input: Any, name: str) -> int | None:
    """What an input tells of a vocabulary; one that has read no data may know the tokenizer's."""
    size = getattr(input, name, None)
    if size is None and (
        "source_tokenizer" not in input.params or not input.params.source_tokenizer
    ):
        size = getattr(input, "vocab_size", None)
        if size is not None and "corpus.languages" in input.params:
            size += len(input.params.corpus.languages)
    return size
