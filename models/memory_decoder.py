"""MemoryDecoder: base of the models whose Transformer decoder attends to an encoded source.

    target ─ embedding (+ positions) ─ dropout ─ decoder, attends to the memory ─ norm ─ softmax

Legend: B batch, S elements of the memory, T target length, D model dim, V target vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tekso.framework.context import StepContext, collecting_attention
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.pieces import Flow, Piece
from tekso.framework.theta import Theta
from tekso.models.decoding.decoder import DecoderStep
from tekso.models.layers import cache as cache_lib
from tekso.models.layers.attention import MultiHeadAttention
from tekso.models.layers.dropout import Dropout
from tekso.models.layers.embedding import Embedding
from tekso.models.layers.masking import Array
from tekso.models.layers.normalization import LayerNorm, Norm
from tekso.models.layers.positions import PositionsBase, SinusoidalPositions
from tekso.models.layers.sizes import with_sizes
from tekso.models.layers.softmax import Softmax
from tekso.models.layers.stack import Stack, StackBase, pieces_of_stack
from tekso.models.layers.transformer import TransformerLayer
from tekso.models.shared_tables import SharedTables

Batch = Mapping[str, tf.Tensor]

ENCODER_LAYER = TransformerLayer.Params()


def decoder_layer(encoder_layer: TransformerLayer.Params) -> TransformerLayer.Params:
    """Returns a decoder layer for an encoder layer: causal, with attention to the memory.

    The attention to the memory has the Params of the encoder's attention.
    """
    layer = encoder_layer.copy().set(memory_attention=encoder_layer.attention.copy())
    layer.attention.mask = "causal"
    return layer


DECODER_LAYER = decoder_layer(ENCODER_LAYER)


class MemoryDecoder(SharedTables):
    """Base of the models that predict each token from those before it and a memory.

    A subclass adds the encoder of the memory and defines `_memory`, `_sides` and `pieces`.

    Shapes:
      batch, all int32:
        "target_ids", "target_labels", "target_segment_ids": [B, T]; and the arrays of the source
      returns: logits [B, T, V]; token_cross_entropy: [B, T] float32
    Children:
      target_embedding, target_positions, decoder, decoder_norm, softmax (if set)
    Source: Vaswani et al. 2017, section 3.
    """

    class Params(SharedTables.Params):
        """Params of MemoryDecoder."""

        target_vocab_size: int = param("Number of tokens of the target.", default=REQUIRED)
        dim: int = param("Size of the activations between layers.", default=REQUIRED)
        target_embedding: Embedding.Params = param(
            "Table of target tokens; scaled, so that positions do not dominate.",
            default=Embedding.Params(scale="sqrt_dim"),
        )
        softmax: Softmax.Params | None = param(
            "Output layer with a separate table; None: tied to target_embedding.", default=None
        )
        target_positions: PositionsBase.Params | None = param(
            "Positions added to the target embeddings.", default=SinusoidalPositions.Params()
        )
        dropout_rate: float = param("Dropout of the embeddings.", default=0.0)
        decoder: StackBase.Params = param(
            "The layers over the target; causal, with attention to the memory.",
            default=Stack.Params(layer=DECODER_LAYER),
        )
        decoder_norm: Norm.Params | None = param(
            "Normalisation after the last layer of the decoder.", default=LayerNorm.Params()
        )

    target_positions: PositionsBase
    target_dropout: Dropout
    decoder: StackBase
    decoder_norm: Norm

    # --- what a subclass defines ---

    def _memory(self, theta: Theta, batch: Batch, ctx: StepContext) -> tf.Tensor:
        """Returns the memory of the source of a batch, [B, S, D]."""
        raise NotImplementedError(f"{type(self).__name__} has no _memory()")

    def _sides(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Returns masks and positions of a batch for the decoder layers."""
        raise NotImplementedError(f"{type(self).__name__} has no _sides()")

    def _memory_mask(self, batch: Batch) -> Array | None:
        """Returns which elements of the memory a search attends to; None: all."""
        del batch
        return None

    def _with_target(
        self, theta: Theta, batch: Batch, ctx: StepContext
    ) -> tuple[Theta, tf.Tensor, tf.Tensor]:
        """Returns theta for the softmax, the memory, and the embedded target."""
        memory = self._memory(theta, batch, ctx)
        if self.params.softmax is not None:
            x = self.target_embedding.fprop(theta.target_embedding, batch["target_ids"], ctx)
            return theta, memory, x
        x, weights = self.target_embedding.fprop_shared(
            theta.target_embedding, batch["target_ids"], ctx
        )
        return Theta(theta, target_embedding=weights), memory, x

    # --- children ---

    def _add_side(self, side: str) -> None:
        """Adds positions and dropout of the source or the target."""
        p: Any = self.params
        if p.get(f"{side}_positions") is not None:
            self.child(f"{side}_positions", with_sizes(p.get(f"{side}_positions"), dim=p.dim))
        self.child(f"{side}_dropout", Dropout.Params(rate=p.dropout_rate))

    def _add_stack(self, name: str) -> None:
        """Adds the stack of layers "encoder" or "decoder", and its normalisation."""
        p: Any = self.params
        self.child(name, with_sizes(p.get(name), dim=p.dim))
        if p.get(f"{name}_norm") is not None:
            self.child(f"{name}_norm", with_sizes(p.get(f"{name}_norm"), dim=p.dim))

    def _check_attention(self, stacks: Mapping[str, str]) -> None:
        """Checks the attention of all layers.

        Args:
          stacks: {name of a stack: mask that its self-attention needs}.

        Raises:
          ValueError: a self-attention has the wrong mask, or no decoder layer attends to the
            source.
        """
        sees_source, owner = False, type(self).__name__
        for name, wanted in stacks.items():
            for layer in getattr(self, name).walk():
                if not isinstance(layer, MultiHeadAttention):
                    continue
                if layer.params.memory_dim is not None:
                    sees_source |= name == "decoder"
                elif layer.params.mask != wanted:
                    raise ValueError(
                        f"{owner}: {layer.path} has mask={layer.params.mask!r}, but "
                        f"self-attention in the {name} needs mask={wanted!r}"
                    )
        if not sees_source:
            raise ValueError(
                f"{owner}: no layer of the decoder attends to the source; set "
                "decoder.layer.memory_attention"
            )

    # --- the whole target at once ---

    def token_cross_entropy(
        self, theta: Theta, batch: Batch, ctx: StepContext, *, label_smoothing: float = 0.0
    ) -> tf.Tensor:
        """Returns -log p(label | source, target up to here) of every position, in nats.

        Shapes:
          batch: see the class
          returns: [B, T] float32
        """
        theta, x = self._decoded(theta, batch, ctx)
        return self._cross_entropy(theta, x, batch["target_labels"], ctx, label_smoothing)

    def logits(self, theta: Theta, batch: Batch, ctx: StepContext) -> tf.Tensor:
        """Returns the scores of the next token at every position of the target.

        Shapes:
          batch: see the class; labels are ignored
          returns: [B, T, V]
        """
        theta, x = self._decoded(theta, batch, ctx)
        return self._logits(theta, x, ctx)

    def fprop(self, theta: Theta, x: Any, ctx: StepContext) -> tf.Tensor:
        """Returns the logits of the batch x; see `logits`."""
        return self.logits(theta, x, ctx)

    def attention(self, theta: Theta, batch: Batch, ctx: StepContext) -> tf.Tensor:
        """Returns attention weights of the target over the source: mean over heads, last layer.

        Shapes:
          batch: see the class; labels are ignored
          returns: [B, T, S] float32; each position sums to 1, or to 0 without a source
        """
        theta, memory, target = self._with_target(theta, batch, ctx)
        x = self._enter_target(theta, target, ctx, batch.get("target_positions"))
        ctx = collecting_attention(ctx)
        self.decoder.fprop(theta.decoder, x, ctx, **self._sides(batch), memory=memory)
        return ctx.collected.attention_weights()

    def _decoded(self, theta: Theta, batch: Batch, ctx: StepContext) -> tuple[Theta, tf.Tensor]:
        """Returns theta for the softmax, and the input of the softmax, [B, T, D]."""
        theta, memory, target = self._with_target(theta, batch, ctx)
        x = self._enter_target(theta, target, ctx, batch.get("target_positions"))
        x = self.decoder.fprop(theta.decoder, x, ctx, **self._sides(batch), memory=memory)
        return theta, self._normalise("decoder_norm", theta, x, ctx)

    # --- the target token by token ---

    def start_decoding(
        self, theta: Theta, batch: Batch, max_length: int, ctx: StepContext
    ) -> dict[str, Any]:
        """Encodes the source, and caches keys and values of the memory; see `Decoder`."""
        if self.params.target_positions is not None:
            self.target_positions.check_length(max_length)
        memory = self._memory(theta, batch, ctx)
        cache = self.decoder.init_cache(memory.shape[0], max_length, memory.dtype.name)
        state = {"cache": self.decoder.cache_memory(theta.decoder, cache, memory, ctx)}
        mask = self._memory_mask(batch)
        return state if mask is None else {**state, "memory_mask": mask}

    def decode_step(
        self, theta: Theta, ids: tf.Tensor, state: Any, position: Any, ctx: StepContext
    ) -> DecoderStep:
        """Computes a step; attention weights: mean over heads, last layer. See `Decoder`."""
        target = self.target_embedding.fprop(theta.target_embedding, tf.expand_dims(ids, 1), ctx)
        x = self._enter_target(theta, target, ctx, cache_lib.positions_of_block(position, 1))
        ctx, mask = collecting_attention(ctx), state.get("memory_mask")
        x, cache = self.decoder.extend_step(
            theta.decoder, x, state["cache"], position, ctx, memory_mask=mask
        )
        logits = self._logits(theta, self._normalise("decoder_norm", theta, x, ctx), ctx)
        return DecoderStep(
            logits=tf.cast(tf.squeeze(logits, 1), tf.float32),
            attention=tf.squeeze(ctx.collected.attention_weights(), 1),
            state={**state, "cache": cache},
        )

    def expand(self, state: Any, k: int) -> dict[str, Any]:
        """See `Decoder`."""
        move = functools.partial(cache_lib.expand, k=k)
        return {**state, "cache": self.decoder.move_rows(state["cache"], move)}

    def select(self, state: Any, rows: tf.Tensor) -> dict[str, Any]:
        """See `Decoder`."""
        move = functools.partial(cache_lib.choose, rows=rows)
        return {**state, "cache": self.decoder.move_rows(state["cache"], move)}

    # --- pieces ---

    def _target_pieces(self, label_smoothing: float) -> list[Piece]:
        """Returns the pieces from "memory" in the flow to "cross_entropy"."""
        table = {"target_embedding": self.target_embedding}
        pieces = [
            self._piece("target_embedding", table, self._run_target, "target_positions"),
            *pieces_of_stack("decoder", self.decoder, self._run_decoder),
        ]
        if self.params.decoder_norm is not None:
            norm = {"decoder_norm": self.decoder_norm}
            pieces.append(Piece("decoder_norm", norm, self._run_decoder_norm))
        name, softmax = self._softmax()
        last = functools.partial(self._run_cross_entropy, label_smoothing)
        return [*pieces, Piece("softmax", {name: softmax}, last)]

    def _piece(self, name: str, layers: Mapping[str, Layer], run: Any, positions: str) -> Piece:
        """Returns a piece that computes the input of a stack."""
        if self.params.get(positions) is not None:
            layers = {**layers, positions: getattr(self, positions)}
        return Piece(name, layers, run)

    def _run_target(self, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        x = self.target_embedding.fprop(theta.target_embedding, flow["target_ids"], ctx)
        x = self._enter_target(theta, x, ctx, flow.get("target_positions"))
        return {**flow, "x": x}

    def _run_decoder(
        self, compute: Callable[..., tf.Tensor], theta: Theta, flow: Flow, ctx: StepContext
    ) -> Flow:
        x = compute(theta.decoder, flow["x"], ctx, **self._sides(flow), memory=flow["memory"])
        return {**flow, "x": x}

    def _run_decoder_norm(self, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        return {**flow, "x": self._normalise("decoder_norm", theta, flow["x"], ctx)}

    def _run_cross_entropy(
        self, label_smoothing: float, theta: Theta, flow: Flow, ctx: StepContext
    ) -> Flow:
        smoothing = label_smoothing if ctx.is_training else 0.0
        loss = self._cross_entropy(theta, flow["x"], flow["target_labels"], ctx, smoothing)
        return {**flow, "cross_entropy": loss}

    def _enter_target(
        self, theta: Theta, x: tf.Tensor, ctx: StepContext, positions: Array | None
    ) -> tf.Tensor:
        """Returns the input of the decoder for embedded tokens."""
        if self.params.target_positions is not None:
            x = self.target_positions.fprop(theta.target_positions, x, ctx, positions=positions)
        x = ctx.constrain(x, ("batch", "length", "embed"))
        return self.target_dropout.fprop(Theta(), x, ctx)

    def _normalise(self, name: str, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        if self.params.get(name) is None:
            return x
        return getattr(self, name).fprop(theta[name], x, ctx)
