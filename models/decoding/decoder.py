"""What a model of target given source offers: Decoder to searches, SequenceToSequence to a task.

    state = start_decoding(…)      sources are read once; one hypothesis a source
    state = expand(state, K)       K hypotheses a source
    loop:   step = decode_step(…)  scores of the next token of every hypothesis
            state = select(step.state, rows)   those that live on, in their new order

A state has two parts. What belongs to a source (keys and values of the memory, masks) is kept once,
however many hypotheses ask. What belongs to a hypothesis (its cache, its recurrent state) has a row
for each: row n is of source n // K.

Legend: B sources, K hypotheses a source, N = B * K, S source length, T target length, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.pieces import Piece
from tekso.framework.theta import Theta


@dataclasses.dataclass(frozen=True)
class DecoderStep:
    """What a step of decoding gives.

    Attributes:
      logits: scores of the next token, [N, V] float32.
      attention: where the step looked in the source, [N, S] float32, a share of 1 each (0
        everywhere for a source of padding alone); None where the model has no such thing.
      state: of all hypotheses after the step.
    """

    logits: tf.Tensor
    attention: tf.Tensor | None
    state: Any


class Decoder(Protocol):
    """A model that can be asked for a target token by token.

    All methods are pure; a state is a nest of tensors, and keeps structure, shapes and types from
    step to step, so that it may go through a loop.
    """

    def start_decoding(
        self, theta: Theta, batch: Mapping[str, tf.Tensor], max_length: int, ctx: StepContext
    ) -> Any:
        """Reads the sources and returns the state of one hypothesis each.

        Args:
          theta: weights.
          batch: "source_ids" and "source_segment_ids" [B, S] int32; 0 is padding.
          max_length: most target tokens that will be read.
          ctx: step context.
        """
        ...

    def decode_step(
        self, theta: Theta, ids: tf.Tensor, state: Any, position: Any, ctx: StepContext
    ) -> DecoderStep:
        """Reads a token of every hypothesis and returns the scores of the next.

        Args:
          theta: weights.
          ids: the token before; at position 0 the one that stands for the beginning.
          state: of `start_decoding`, `expand`, `select` or the step before.
          position: how many tokens were read before, the same for all.
          ctx: step context.

        Shapes:
          ids: [N] int32, position: [] int
        """
        ...

    def expand(self, state: Any, k: int) -> Any:
        """Returns every hypothesis k times: row n becomes rows n * k … n * k + k - 1."""
        ...

    def select(self, state: Any, rows: tf.Tensor) -> Any:
        """Returns the hypotheses of some rows, each of the source that it had.

        Shapes:
          rows: [N'] int32, with as many rows a source for every source, in the order of sources
        """
        ...


class SequenceToSequence(Decoder, Protocol):
    """A layer that the translation task can train, and whose targets can be searched for.

    Its Params have `source_vocab_size` and `target_vocab_size`. What a batch holds, the class
    EncoderDecoder says. Of a model that has `attention(theta, batch, ctx)` besides, where every
    position of the target looks in the source ([B, T, S] float32), evaluations draw pictures.
    """

    def token_cross_entropy(
        self,
        theta: Theta,
        batch: Mapping[str, tf.Tensor],
        ctx: StepContext,
        *,
        label_smoothing: float = 0.0,
    ) -> tf.Tensor:
        """Returns -log p(label | source, target up to here) of every position, in nats.

        Shapes:
          returns: [B, T] float32
        """
        ...

    def pieces(self, *, label_smoothing: float = 0.0) -> list[Piece]:
        """Returns the parts of `token_cross_entropy` in order, between which it can be cut.

        The first gets the batch; the last adds "cross_entropy" [B, T] to what flows. Labels are
        smoothed in training only.
        """
        ...


def repeat_rows(nest: Any, k: int, *, dim: int = 0) -> Any:
    """Returns tensors in which every row of a dim stands k times, one after the other."""
    return tf.nest.map_structure(lambda t: tf.repeat(t, k, axis=dim), nest)


def take_rows(nest: Any, rows: tf.Tensor, *, dim: int = 0) -> Any:
    """Returns tensors with some rows of a dim, in the order in which they are given."""
    return tf.nest.map_structure(lambda t: tf.gather(t, rows, axis=dim), nest)
