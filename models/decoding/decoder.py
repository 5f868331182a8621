"""Interfaces of sequence-to-sequence models: Decoder for searches, SequenceToSequence for tasks.

    state = start_decoding(…)      encode the sources once; one hypothesis per source
    state = expand(state, K)       K hypotheses per source
    loop:   step = decode_step(…)  scores of the next token of every hypothesis
            state = select(step.state, rows)   the surviving hypotheses, in their new order

A state has two parts. Values of a source (keys and values of the memory, masks) are stored once per
source. Values of a hypothesis (its cache, its recurrent state) have one row per hypothesis: row n
belongs to source n // K.

Legend: B sources, K hypotheses per source, N = B * K, S source length, T target length,
V vocabulary.
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
    """Result of a decoding step.

    Attributes:
      logits: scores of the next token, [N, V] float32.
      attention: attention weights of the step over the source, [N, S] float32; each row sums to 1
        (or is 0 for a source that is only padding). None if the model provides none.
      state: state of all hypotheses after the step.
      added: what a search adds to the log-probabilities of the next token, such as the weighted
        log-probabilities of a language model, [N, V] float32; the sum is at most 0. None: nothing.
    """

    logits: tf.Tensor
    attention: tf.Tensor | None
    state: Any
    added: tf.Tensor | None = None


class Decoder(Protocol):
    """A model that decodes a target token by token.

    All methods are pure. A state is a nest of tensors. Its structure, shapes and types stay the
    same from step to step, so that it can be the state of a loop.
    """

    def start_decoding(
        self, theta: Theta, batch: Mapping[str, tf.Tensor], max_length: int, ctx: StepContext
    ) -> Any:
        """Encodes the sources and returns the state with one hypothesis per source.

        Args:
          theta: weights.
          batch: "source_ids" and "source_segment_ids" [B, S] int32; 0 is padding.
          max_length: most target tokens.
          ctx: step context.
        """
        ...

    def decode_step(
        self, theta: Theta, ids: tf.Tensor, state: Any, position: Any, ctx: StepContext
    ) -> DecoderStep:
        """Reads one token of every hypothesis and returns the scores of the next.

        Args:
          theta: weights.
          ids: the previous token; at position 0 the start token.
          state: state from `start_decoding`, `expand`, `select` or the previous step.
          position: number of tokens read before, the same for all hypotheses.
          ctx: step context.

        Shapes:
          ids: [N] int32, position: [] int
        """
        ...

    def expand(self, state: Any, k: int) -> Any:
        """Repeats every hypothesis k times: row n becomes rows n * k … n * k + k - 1."""
        ...

    def select(self, state: Any, rows: tf.Tensor) -> Any:
        """Returns the state of the hypotheses at some rows; each stays with its source.

        Shapes:
          rows: [N'] int32, in the order of sources, the same number of rows for every source
        """
        ...


class SequenceToSequence(Decoder, Protocol):
    """A layer that the translation task can train, and that searches can decode.

    Its Params have `source_vocab_size` and `target_vocab_size`. The class EncoderDecoder documents
    the arrays of a batch. If the model also has `attention(theta, batch, ctx)`, which returns
    attention weights of the target positions over the source ([B, T, S] float32), evaluations plot
    them.
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
        """Returns the pieces of `token_cross_entropy` in order, for pipelines.

        The first piece takes the batch; the last adds "cross_entropy" [B, T]. Label smoothing
        applies to training only.
        """
        ...


def repeat_rows(nest: Any, k: int, *, dim: int = 0) -> Any:
    """Repeats every row of a dim k times, next to each other."""
    return tf.nest.map_structure(lambda t: tf.repeat(t, k, axis=dim), nest)


def take_rows(nest: Any, rows: tf.Tensor, *, dim: int = 0) -> Any:
    """Returns tensors with the given rows of a dim, in the given order."""
    return tf.nest.map_structure(lambda t: tf.gather(t, rows, axis=dim), nest)
