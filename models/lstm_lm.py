"""LstmLm: a language model of stacked LSTM layers, with a full or a sampled softmax.

Legend: B batch, T length, V vocabulary.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.pieces import Flow, Piece, of_layers
from tekso.framework.primitives.fusion import XlaFusion
from tekso.framework.theta import Theta
from tekso.models.layers.dropout import Dropout
from tekso.models.layers.embedding import Embedding
from tekso.models.layers.recurrent import RecurrentStack, segment_flags
from tekso.models.layers.recurrent_cells import State
from tekso.models.layers.sizes import with_sizes
from tekso.models.layers.softmax import Softmax

_MIN_DIM = 128  # of vectors whose products with a matrix are worth a lookup in the results


class LstmLm(Layer):
    """Embedding, stacked LSTM, softmax.

    The input size of the softmax is the output size of the LSTM: hidden_dim or projection_dim of
    `stack.cell`.

    Shapes:
      x of fprop, and ids, labels, positions, segment_ids: [B, T] int
      returns: logits [B, T, V]; token_cross_entropy: [B, T] float32
    Children: embedding, stack, softmax.
    Source: Jozefowicz et al. 2016, "Exploring the limits of language modeling".
    """

    class Params(Layer.Params):
        """Params of LstmLm."""

        vocab_size: int = param("Number of tokens.", default=REQUIRED)
        embedding: Embedding.Params = param(
            "The embedding; the model sets its sizes.", default=Embedding.Params()
        )
        stack: RecurrentStack.Params = param(
            "The LSTM; the model sets its input_dim.", default=RecurrentStack.Params()
        )
        softmax: Softmax.Params = param(
            "The softmax, full or sampled; the model sets its sizes.",
            default=Softmax.Params(use_bias=True),
        )
        embedding_dim: int = param("Size of an embedded token.", default=REQUIRED)
        dropout_rate: float = param(
            "Dropout of the embedded tokens and of the LSTM's output.", default=0.0
        )

    embedding: Embedding
    dropout: Dropout
    stack: RecurrentStack
    softmax: Softmax

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        self.child(
            "embedding", with_sizes(p.embedding, vocab_size=p.vocab_size, dim=p.embedding_dim)
        )
        self.child("dropout", Dropout.Params(rate=p.dropout_rate))
        if p.stack.direction != "forward":
            raise ValueError(
                f"LstmLm: the stack's direction is {p.stack.direction!r}, so a token would be "
                "predicted from itself; set direction='forward'"
            )
        self.child("stack", with_sizes(p.stack, input_dim=p.embedding_dim))
        self.child(
            "softmax",
            with_sizes(p.softmax, vocab_size=p.vocab_size, input_dim=self.stack.output_dim),
        )

    def hidden(
        self,
        theta: Theta,
        ids: tf.Tensor,
        ctx: StepContext,
        *,
        positions: tf.Tensor | None = None,
        segment_ids: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Returns the input of the softmax.

        Args:
          theta: weights.
          ids: tokens.
          ctx: step context.
          positions: ignored, because the recurrence already knows the order.
          segment_ids: segments of packed texts; the state is reset to 0 at every segment; 0 is
            padding.

        Shapes:
          ids, positions, segment_ids: [B, T] int
          returns: [B, T, size of the LSTM's output]
        """
        ids, flags = tf.convert_to_tensor(ids), segment_flags(segment_ids)
        if self._projects_table(ids, ctx):
            table = self.embedding.fprop(theta.embedding, tf.range(self.params.vocab_size), ctx)
            x = self.stack.fprop_rows(theta.stack, table, ids, ctx, **flags)
        else:
            x = self.stack.fprop(theta.stack, self._embedded(theta, ids, ctx), ctx, **flags)
        return self._dropped(x, ctx)

    def token_cross_entropy(
        self,
        theta: Theta,
        ids: tf.Tensor,
        labels: tf.Tensor,
        ctx: StepContext,
        *,
        positions: tf.Tensor | None = None,
        segment_ids: tf.Tensor | None = None,
        label_smoothing: float = 0.0,
    ) -> tf.Tensor:
        """Returns -log p(label | ids up to here) of every token, in nats.

        Shapes:
          ids, labels, positions, segment_ids: [B, T] int
          returns: [B, T] float32
        """
        x = self.hidden(theta, ids, ctx, positions=positions, segment_ids=segment_ids)
        return self.softmax.cross_entropy(
            theta.softmax, x, labels, ctx, label_smoothing=label_smoothing
        )

    def logits(
        self,
        theta: Theta,
        ids: tf.Tensor,
        ctx: StepContext,
        *,
        positions: tf.Tensor | None = None,
        segment_ids: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Returns the scores of the next token at every position.

        Shapes:
          ids, positions, segment_ids: [B, T] int
          returns: [B, T, V]
        """
        x = self.hidden(theta, ids, ctx, positions=positions, segment_ids=segment_ids)
        return self.softmax.logits(theta.softmax, x, ctx)

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """Returns the logits of the tokens x; see `logits`."""
        return self.logits(theta, x, ctx)

    def init_cache(self, batch_size: int, max_length: int, dtype: str = "float32") -> list[State]:
        """Returns the state before the first token; its size does not depend on max_length."""
        return self.stack.zero_state(batch_size, tf.as_dtype(dtype))

    def extend_step(
        self,
        theta: Theta,
        ids: tf.Tensor,
        cache: list[State],
        position: Any,
        ctx: StepContext,
        *,
        logits_of: Literal["all", "last"] = "all",
    ) -> tuple[tf.Tensor, list[State]]:
        """Reads T new tokens; all steps together give the same result as `logits`.

        Args:
          theta: weights.
          ids: the new tokens: one, or a block.
          cache: state from `init_cache` or the previous step.
          position: ignored, because the recurrence already knows the order.
          ctx: step context.
          logits_of: whether to return logits of all tokens of the block, or only of the last.

        Shapes:
          ids: [B, T] int
          returns: (logits [B, T, V], or [B, 1, V] with "last"; cache)
        """
        x = self._embedded(theta, ids, ctx)
        x, cache = self.stack.extend_step(theta.stack, x, cache, ctx)
        if logits_of == "last":
            x = x[:, -1:]
        return self.softmax.logits(theta.softmax, x, ctx), cache

    def _projects_table(self, ids: tf.Tensor, ctx: StepContext) -> bool:
        """Returns whether the first layer's input products are of the table, not of the tokens.

        Each token's product is the same wherever it is. In bytes, a batch has several times as many
        tokens as there are different ones. Narrow vectors would save less than the wider lookup
        takes. Without compiled clusters, products are those of the layers' inputs, so that counts
        of operations by layer agree with those of pieces.
        """
        p = self.params
        return bool(
            p.embedding_dim >= _MIN_DIM
            and not (p.dropout_rate and ctx.is_training)
            and ctx.mode != "decode"
            and isinstance(ctx.fuse, XlaFusion)
            and not {"lookup", "project"} & ctx.forms.keys()
            and type(self)._embedded is LstmLm._embedded
            and type(self.embedding).fprop is Embedding.fprop
            and self.stack.takes_rows()
            and ids.dtype in (tf.int32, tf.int64)
            and ids.shape.is_fully_defined()
            and ids.shape.num_elements() >= 2 * p.vocab_size
        )

    def _embedded(self, theta: Theta, ids: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        x = self.embedding.fprop(theta.embedding, ids, ctx)
        x = ctx.constrain(x, ("batch", "length", "embed"))
        return self.dropout.fprop(Theta(), x, ctx.fold(0))

    def _dropped(self, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        return self.dropout.fprop(Theta(), x, ctx.fold(1))

    def pieces(self, *, label_smoothing: float = 0.0) -> list[Piece]:
        """Returns the pieces of `token_cross_entropy` in order, for pipelines.

        Every layer of the stack is a piece. Label smoothing applies to training only. The first
        piece takes {"ids", "labels"} and, for packed texts, {"positions", "segment_ids"}. Pieces
        add "x" (activations) and at last "cross_entropy" [B, T].
        """
        last = functools.partial(self._run_softmax, label_smoothing)
        return [
            Piece("embedding", {"embedding": self.embedding}, self._run_embedding),
            *of_layers("stack/layers", self.stack.layers, self._run_layer),
            Piece("softmax", {"softmax": self.softmax}, last),
        ]

    def _run_embedding(self, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        return {**flow, "x": self._embedded(theta, flow["ids"], ctx)}

    def _run_layer(self, index: int, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        segments = segment_flags(flow.get("segment_ids"))
        x = self.stack.fprop_layer(index, theta.stack, flow["x"], ctx, **segments)
        return {**flow, "x": x}

    def _run_softmax(
        self, label_smoothing: float, theta: Theta, flow: Flow, ctx: StepContext
    ) -> Flow:
        x = self._dropped(flow["x"], ctx)
        loss = self.softmax.cross_entropy(
            theta.softmax,
            x,
            flow["labels"],
            ctx,
            label_smoothing=label_smoothing if ctx.is_training else 0.0,
        )
        return {**flow, "cross_entropy": loss}
