"""The language-model task: predict the next token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.exports import ExportedFunction
from tekso.framework.input.input import Input
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, literals, param
from tekso.framework.path_patterns import listed
from tekso.framework.task import LOSS, Batch, Decoded, Program
from tekso.framework.theta import Theta
from tekso.tasks.lm.cross_entropy import perplexity
from tekso.tasks.lm.decode import TextDecoder
from tekso.tasks.lm.exports import language_model_exports
from tekso.tasks.lm.token_task import TokenTask
from tekso.tasks.unset_sizes import set_vocab_size

BITS_PER_BYTE = "bits_per_byte"


class LanguageModel(TokenTask):
    """Minimises the cross-entropy of every next token.

    Shapes:
      batch:
        "ids", "labels": [B, L] int32; "weights": [B, L] float32, 0 for padding
        "num_bytes": [B] float32, UTF-8 bytes of the weighted labels; needed for bits per byte only
        packed text also has "segment_ids" (0 for padding) and "positions", [B, L] int32
      loss returns: sums over the weighted labels, scalars
      log_probs returns: [B, L] float32
    """

    class Params(TokenTask.Params):
        """Params of LanguageModel."""

        model: Layer.Params = param(
            "The network. If its vocab_size is not set, the tokenizer's is used.", default=REQUIRED
        )
        decode: TextDecoder.Params | None = param(
            "Sampling and scoring at the end of a run; None: neither.",
            default=TextDecoder.Params(),
        )

    goals = {BITS_PER_BYTE: "min", "perplexity": "min"}  # noqa: RUF012

    def __init__(self, params: Any) -> None:
        """Builds the network and the decoder."""
        super().__init__(params)
        decode, model = self.params.decode, self.params.model
        window = decode.window if decode is not None else None
        if window and "positions.max_length" in model and window > model.positions.max_length:
            raise ValueError(
                f"task.decode.window is {window}, but the model has learned "
                f"{model.positions.max_length} positions: set at most {model.positions.max_length}"
            )
        self._decoder = decode.instantiate(task=self) if decode is not None else None

    @classmethod
    def complete(cls, params: Any, input: Input) -> Any:
        """Sets the vocabulary size, learned positions and decoding window, where they are not set.

        Positions and window get the length of the input's examples.

        Raises:
          ValueError: the vocabulary size is set nowhere, or is smaller than the input's.
        """
        params = params.copy()
        vocab_size = getattr(input, "vocab_size", None)
        set_vocab_size(params.model, "vocab_size", vocab_size, data="text")
        length = input.params.length if "length" in input.params else None
        path = "positions.max_length"
        if length is not None and path in params.model and params.model.get(path) is REQUIRED:
            params.model.set({path: length})
        if params.decode is not None and params.decode.window is None:
            params.decode.window = length
        return params

    def metrics(self, loss_sum: tf.Tensor, batch: Batch, label_smoothing: float) -> dict[str, Any]:
        """See TokenTask; with label smoothing, bits per byte are reported in evaluation only."""
        if "num_bytes" not in batch or label_smoothing:
            return {}
        return {BITS_PER_BYTE: (loss_sum / math.log(2.0), tf.reduce_sum(batch["num_bytes"]))}

    def equal_losses(self, batch: Mapping[str, np.ndarray]) -> tuple[Batch, Batch, str] | None:
        """Returns an example without and with changed later tokens; None without custom layers.

        Only one token has a weight, in the middle. Its loss depends on the tokens up to its place.
        """
        layers = [layer for layer in self.model.walk() if not _is_of_tekso(layer)]
        middle = batch["ids"].shape[1] // 2
        largest = int(batch["ids"].max())
        if not layers or middle < 1 or largest < 1:
            return None
        ids, weights = batch["ids"].copy(), np.zeros_like(batch["weights"])
        ids[:, middle:] = (ids[:, middle:] + 1) % (largest + 1)
        weights[:, middle - 1] = 1
        one = {**batch, "weights": weights}
        names = sorted({f"{type(layer).__name__} ({layer.path})" for layer in layers})
        problem = (
            f"{type(self).__name__}: the loss of a token depends on the tokens after it, so the "
            "model sees the token that it predicts. Each output of a layer may depend on its own "
            "and on earlier positions only: a convolution pads only before the text, an average or "
            f"a norm is not over the length. Custom layers: {listed(names)}. If the model is meant "
            f"to do so, return None in equal_losses() of a subclass of {type(self).__name__}"
        )
        return one, {**one, "ids": ids}, problem

    def logits(self, theta: Theta, batch: Batch, ctx: StepContext) -> tf.Tensor:
        """Returns the scores of the next tokens, [B, L, V], for distillation."""
        side = {name: batch[name] for name in ("positions", "segment_ids") if name in batch}
        scores: tf.Tensor = self.model.logits(theta.model, batch["ids"], ctx, **side)
        return scores

    def log_probs(
        self, theta: Theta, ids_BL: tf.Tensor, labels_BL: tf.Tensor, ctx: StepContext
    ) -> Any:
        """Returns the log-probability of every label in nats, [B, L] float32; pure."""
        return -self.nats(theta, {"ids": ids_BL, "labels": labels_BL}, ctx, 0.0)

    def nats(
        self, theta: Theta, batch: Batch, ctx: StepContext, label_smoothing: float
    ) -> tf.Tensor:
        """See TokenTask."""
        return self.model.token_cross_entropy(
            theta.model,
            batch["ids"],
            batch["labels"],
            ctx,
            positions=batch.get("positions"),
            segment_ids=batch.get("segment_ids"),
            label_smoothing=label_smoothing,
        )

    def summarize(self, sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        """Adds the perplexity to the means."""
        figures = super().summarize(sums)
        if LOSS in figures and (BITS_PER_BYTE in figures or not self.params.label_smoothing):
            figures["perplexity"] = perplexity(figures[LOSS])
        return figures

    @classmethod
    def decodes_data(cls, params: Any) -> bool:
        """Returns whether decoding takes prompts from the input; see Task."""
        return params.decode is not None and not params.decode.prompts

    def decode(self, program: Program, input: Input) -> Decoded | None:
        """Returns samples after the prompts and scores of files, according to the decode Params."""
        return self._decoder.decode(program, input) if self._decoder is not None else None

    def exports(self, input: Input) -> dict[str, ExportedFunction]:
        """Returns functions that score texts and continue prompts, using the decode Params."""
        decode = self.params.decode if self.params.decode is not None else TextDecoder.Params()
        tokenizer = getattr(input, "tokenizer", None)
        return language_model_exports(
            self,
            decode,
            end_id=getattr(tokenizer, "end_id", None),
            forbidden_ids=getattr(tokenizer, "unused_ids", ()),
        )

    def setting_to_try(self, eval_inputs: Mapping[str, Any]) -> str | None:
        """Returns a suggested prompt: the first of the Params, or the start of a held-out text."""
        prompt = self._decoder and self._decoder.example_prompt(eval_inputs.values())
        return f"task.decode.prompts={literals.write([prompt])}" if prompt else None


def _is_of_tekso(layer: Layer) -> bool:
    return type(layer).__module__.startswith("tekso.")
