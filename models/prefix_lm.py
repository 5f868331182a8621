"""PrefixLm: one decoder-only Transformer over the concatenation of source and target.

    source, target ─ embedding (+ positions) ─ dropout ─ stack ─ norm ─ softmax (of the target)

    attention mask     source  target       (columns: keys)
    queries:  source   x x x   . . .        every token of a pair attends to the whole source;
              target   x x x   x . .        target tokens also to themselves and earlier ones
                       x x x   x x .
                       x x x   x x x

The positions of the target continue those of the source, without padding. The distance between two
tokens of a pair therefore depends neither on padding nor on packing.

Legend: B batch, S source length, T target length, D model dim, V vocabulary, N hypotheses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tekso.framework import workarounds
from tekso.framework.context import StepContext, collecting_attention
from tekso.framework.params import REQUIRED, param
from tekso.framework.pieces import Flow, Piece
from tekso.framework.theta import Theta
from tekso.models.decoder_only import DecoderOnly
from tekso.models.decoding.decoder import DecoderStep, repeat_rows
from tekso.models.layers import cache as cache_lib
from tekso.models.layers import masking
from tekso.models.layers.stack import pieces_of_stack

Batch = Mapping[str, tf.Tensor]


class PrefixLm(DecoderOnly):
    """Predicts every token of the target from those before it and the whole source.

    Batches are the same as for EncoderDecoder. Source and target share one vocabulary. Decoding
    writes the source to the cache as one block. Keys and values of source and target are in one
    cache, so every hypothesis has its own copy of the source's.

    Shapes:
      batch: arrays [B, S] of the source and [B, T] of the target; see EncoderDecoder
      returns: logits [B, T, V]; token_cross_entropy: [B, T] float32
      The stack takes and returns [B, S + T, D].
    Children: as in DecoderOnly.
    Source: Liu et al. 2018, "Generating Wikipedia by summarizing long sequences", section 4.2.3
      (one sequence); Raffel et al. 2020, section 3.2.1 (prefix LM).
    """

    class Params(DecoderOnly.Params):
        """Params of PrefixLm."""

        source_vocab_size: int = param("Number of tokens of the source.", default=REQUIRED)
        target_vocab_size: int = param(
            "Number of tokens of the target; equal to source_vocab_size.", default=REQUIRED
        )

    def __init__(self, params: Any) -> None:
        super().__init__(params, vocab_size=params.target_vocab_size)
        p = self.params
        if p.source_vocab_size != p.target_vocab_size:
            raise ValueError(
                f"PrefixLm: source_vocab_size {p.source_vocab_size} and target_vocab_size "
                f"{p.target_vocab_size} differ, but source and target are one sequence"
            )

    # --- the whole target at once ---

    def token_cross_entropy(
        self, theta: Theta, batch: Batch, ctx: StepContext, *, label_smoothing: float = 0.0
    ) -> tf.Tensor:
        """Returns -log p(label | source, target up to here) of every position, in nats.

        Shapes:
          batch: see EncoderDecoder
          returns: [B, T] float32
        """
        theta, x = self._decoded(theta, batch, ctx)
        name, softmax = self._softmax()
        return softmax.cross_entropy(
            theta[name], x, batch["target_labels"], ctx, label_smoothing=label_smoothing
        )

    def logits(self, theta: Theta, batch: Batch, ctx: StepContext) -> tf.Tensor:
        """Returns the scores of the next token at every position of the target.

        Shapes:
          batch: see EncoderDecoder; labels are ignored
          returns: [B, T, V]
        """
        theta, x = self._decoded(theta, batch, ctx)
        return self._logits(theta, x, ctx)

    def fprop(self, theta: Theta, x: Any, ctx: StepContext) -> tf.Tensor:
        """Returns the logits of the batch x; see `logits`."""
        return self.logits(theta, x, ctx)

    def attention(self, theta: Theta, batch: Batch, ctx: StepContext) -> tf.Tensor:
        """Returns attention weights of the target over the source: mean over heads, last layer.

        The weights on target tokens are left out, and the others renormalised to sum to 1 (0
        without a source).

        Shapes:
          batch: see EncoderDecoder; labels are ignored
          returns: [B, T, S] float32
        """
        x = self.embedding.fprop(theta.embedding, _both_ids(batch, ctx), ctx)
        x = self._enter(theta, x, ctx, _both_positions(batch, ctx))
        ctx, length = collecting_attention(ctx), _source_length(batch)
        self.stack.fprop(theta.stack, x, ctx, **_sides(batch, ctx))
        return _of_source(ctx.collected.attention_weights()[:, length:], length)

    def _decoded(self, theta: Theta, batch: Batch, ctx: StepContext) -> tuple[Theta, tf.Tensor]:
        """Returns theta for the softmax, and the input of the softmax, [B, T, D]."""
        theta, x = self._embedded(theta, _both_ids(batch, ctx), ctx)
        x = self._enter(theta, x, ctx, _both_positions(batch, ctx))
        x = self.stack.fprop(theta.stack, x, ctx, **_sides(batch, ctx))
        return theta, self._of_target(theta, x, batch, ctx)

    def _of_target(self, theta: Theta, x: tf.Tensor, batch: Batch, ctx: StepContext) -> tf.Tensor:
        """Returns the normalised target part of x: [B, S + T, D] -> [B, T, D]."""
        x = ctx.constrain(x, ("batch", None, "embed"))[:, _source_length(batch) :]
        return self._normalise(theta, ctx.constrain(x, ("batch", "length", "embed")), ctx)

    # --- the target token by token ---

    def start_decoding(
        self, theta: Theta, batch: Batch, max_length: int, ctx: StepContext
    ) -> dict[str, Any]:
        """Writes the source to the cache as one block; see `Decoder`."""
        is_source = tf.not_equal(batch["source_segment_ids"], 0)
        rows, length = is_source.shape
        if self.params.positions is not None:
            self.positions.check_length(length + max_length)
        lengths = tf.reduce_sum(tf.cast(is_source, tf.int32), 1, keepdims=True)
        places = tf.broadcast_to(tf.expand_dims(tf.range(length), 0), [rows, length])
        state = {
            "visible": tf.concat([is_source, tf.ones([rows, max_length], tf.bool)], 1),
            "positions": tf.concat([places, lengths + tf.expand_dims(tf.range(max_length), 0)], 1),
        }
        x = self.embedding.fprop(theta.embedding, batch["source_ids"], ctx)
        x = self._enter(theta, x, ctx, places)
        cache = self.stack.init_cache(rows, length + max_length, x.dtype.name)
        side = {**_sides_of_step(state, rows), "prefix": length}
        _, cache = self.stack.extend_step(theta.stack, x, cache, tf.constant(0), ctx, **side)
        return {**state, "source": is_source, "cache": cache}

    def decode_step(
        self, theta: Theta, ids: tf.Tensor, state: Any, position: Any, ctx: StepContext
    ) -> DecoderStep:
        """Computes a step, with attention weights as in `attention`; see `Decoder`."""
        length = state["source"].shape[1]
        place = tf.cast(position, tf.int32) + length
        side = _sides_of_step(state, ids.shape[0])
        positions = cache_lib.positions_at(
            side["positions"], cache_lib.positions_of_block(place, 1)
        )
        x = self.embedding.fprop(theta.embedding, tf.expand_dims(ids, 1), ctx)
        x = self._enter(theta, x, ctx, positions)
        ctx = collecting_attention(ctx)
        x, cache = self.stack.extend_step(
            theta.stack, x, state["cache"], place, ctx, **side, prefix=length
        )
        logits = self._logits(theta, self._normalise(theta, x, ctx), ctx)
        return DecoderStep(
            logits=tf.cast(tf.squeeze(logits, 1), tf.float32),
            attention=_of_source(tf.squeeze(ctx.collected.attention_weights(), 1), length),
            state={**state, "cache": cache},
        )

    def expand(self, state: Any, k: int) -> dict[str, Any]:
        """See `Decoder`."""
        move = functools.partial(cache_lib.expand, k=k)
        return {**state, "cache": self.stack.move_rows(state["cache"], move)}

    def select(self, state: Any, rows: tf.Tensor) -> dict[str, Any]:
        """See `Decoder`."""
        move = functools.partial(cache_lib.choose, rows=rows)
        return {**state, "cache": self.stack.move_rows(state["cache"], move)}

    # --- pieces ---

    def pieces(self, *, label_smoothing: float = 0.0) -> list[Piece]:
        """Returns the pieces of `token_cross_entropy` in order, for pipelines.

        Every layer of the stack is a piece. Label smoothing applies to training only. The first
        piece takes the batch. Pieces add "x" [B, S + T, D] ([B, T, D] from the final norm) and at
        last "cross_entropy" [B, T].
        """
        norm = {"final_norm": self.final_norm} if self.params.final_norm is not None else {}
        return [
            self._embedding_piece(),
            *pieces_of_stack("stack", self.stack, self._run_layers),
            Piece("final_norm", norm, self._run_of_target),
            self._softmax_piece("target_labels", label_smoothing),
        ]

    def _run_embed(self, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        x = self.embedding.fprop(theta.embedding, _both_ids(flow, ctx), ctx)
        return {**flow, "x": self._enter(theta, x, ctx, _both_positions(flow, ctx))}

    def _run_layers(
        self, compute: Callable[..., tf.Tensor], theta: Theta, flow: Flow, ctx: StepContext
    ) -> Flow:
        return {**flow, "x": compute(theta.stack, flow["x"], ctx, **_sides(flow, ctx))}

    def _run_of_target(self, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        return {**flow, "x": self._of_target(theta, flow["x"], flow, ctx)}


def _source_length(batch: Mapping[str, Any]) -> int:
    return int(batch["source_ids"].shape[1])


def _both(source: tf.Tensor, target: tf.Tensor, ctx: StepContext) -> tf.Tensor:
    """Concatenates [B, S] and [B, T] to [B, S + T]."""
    return workarounds.concat(ctx, [source, target], 1, dims=("batch", None))


def _both_ids(batch: Mapping[str, Any], ctx: StepContext) -> tf.Tensor:
    """Returns the tokens of the source followed by the target's: [B, S + T]."""
    return _both(batch["source_ids"], batch["target_ids"], ctx)


def _both_positions(batch: Mapping[str, Any], ctx: StepContext) -> tf.Tensor:
    """Returns positions in a pair, [B, S + T]; the target's continue the source's."""
    positions = {}
    for side in ("source", "target"):
        places = tf.expand_dims(tf.range(batch[f"{side}_ids"].shape[1]), 0)
        given = batch.get(f"{side}_positions")
        positions[side] = tf.zeros_like(batch[f"{side}_ids"]) + places if given is None else given
    target = tf.expand_dims(batch["target_segment_ids"], 2)
    same = tf.equal(target, tf.expand_dims(batch["source_segment_ids"], 1))
    before = tf.reduce_sum(tf.cast(same & tf.not_equal(target, 0), tf.int32), 2)
    return _both(positions["source"], positions["target"] + before, ctx)


def _sides(batch: Mapping[str, Any], ctx: StepContext) -> dict[str, Any]:
    """Returns mask, positions and prefix length of a batch for the layers."""
    segments = _both(batch["source_segment_ids"], batch["target_segment_ids"], ctx)
    return {
        "mask": masking.segments(segments),
        "positions": _both_positions(batch, ctx),
        "prefix": _source_length(batch),
    }


def _sides_of_step(state: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """Returns mask and positions of the cache for the layers, for `rows` hypotheses."""
    visible, positions = repeat_rows(
        (state["visible"], state["positions"]), rows // state["visible"].shape[0]
    )
    return {"mask": masking.padding(visible), "positions": positions}


def _of_source(attention: tf.Tensor, length: int) -> tf.Tensor:
    """Returns renormalised attention weights over the source alone: [..., S + T] -> [..., S]."""
    attention = attention[..., :length]
    return tf.math.divide_no_nan(attention, tf.reduce_sum(attention, -1, keepdims=True))
