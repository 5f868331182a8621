"""Base of the searches for targets: length limits, forced prefixes, forbidden tokens.

Legend: B sources, H targets of a source, S source length, P prefix length, T most tokens of a
target, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.params import Configurable, param
from tekso.framework.theta import Theta
from tekso.models.decoding.decoder import Decoder

IMPOSSIBLE = float("-inf")
"""Log-probability of forbidden tokens, and of missing hypotheses."""

LEAST = -1e36
"""Hypotheses are missing if their log-probability is not above it: LiteRT has -3.4e38 for -inf."""


@dataclasses.dataclass(frozen=True)
class Prefix:
    """Tokens that every target of a source begins with.

    They are read one by one and count in log-probabilities and lengths. An end token in a prefix
    does not end the target.

    Attributes:
      ids: [B, P] int32; ids beyond the length are ignored.
      lengths: [B] int32, 0 … P; 0: no prefix.
    """

    ids: tf.Tensor
    lengths: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Limits:
    """Most tokens of targets, end included.

    Attributes:
      longest: T, the limit of all sources, known at tracing.
      of_source: [B] int32, the limit of each source; 0 for a source that is only padding.
    """

    longest: int
    of_source: tf.Tensor


class Search(Configurable):
    """Base of beam search and sampling."""

    class Params(Configurable.Params):
        """Params of a search."""

        max_length: int | None = param(
            "Most tokens of a target, end included. None: only max_length_ratio limits it.",
            default=None,
        )
        max_length_ratio: float | None = param(
            "A target has at most max_length_ratio * (source tokens) + max_length_extra tokens. "
            "None: only max_length limits it.",
            default=2.0,
        )
        max_length_extra: int = param("See max_length_ratio.", default=10)
        min_length: int = param("Fewest tokens of a target, end included.", default=1)
        num_hypotheses: int = param("Targets returned for each source.", default=1)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        if p.max_length is None and p.max_length_ratio is None:
            raise ValueError(
                f"{self._name}: max_length and max_length_ratio are both None, so a target would "
                "have no length limit; set one of them"
            )
        if p.max_length is not None and p.max_length < 1:
            raise ValueError(f"{self._name}.max_length is {p.max_length}, must be at least 1")
        if p.max_length_ratio is not None and not 0 <= p.max_length_ratio < float("inf"):
            raise ValueError(
                f"{self._name}.max_length_ratio is {p.max_length_ratio}, must be finite and at "
                "least 0, or None"
            )
        if p.min_length < 1:
            raise ValueError(f"{self._name}.min_length is {p.min_length}, must be at least 1")
        if p.num_hypotheses < 1:
            raise ValueError(
                f"{self._name}.num_hypotheses is {p.num_hypotheses}, must be at least 1"
            )

    @property
    def _name(self) -> str:
        return type(self).__name__

    def search(
        self,
        model: Decoder,
        theta: Theta,
        batch: Mapping[str, tf.Tensor],
        ctx: StepContext,
        end_id: int,
        *,
        prefix: Prefix | None = None,
        forbidden_ids: Sequence[int] = (),
    ) -> dict[str, tf.Tensor]:
        """Returns targets of every source; pure.

        Args:
          model: the model that decodes.
          theta: weights of the model.
          batch: "source_ids" and "source_segment_ids" [B, S] int32; segment 0 is padding.
          ctx: step context.
          end_id: the token that ends a target, and the decoder's first input.
          prefix: tokens that the targets begin with.
          forbidden_ids: tokens that are never chosen (but may be in a prefix). The probabilities of
            the other tokens are not renormalised.

        Shapes:
          returns: {"ids": [B, H, T] int32, end included, 0 after it;
                    "lengths": [B, H] int32, 0 if there is no target, for example for a source that
                    is only padding;
                    "log_probs": [B, H] float32, log-probability under the model;
                    "scores": [B, H] float32, which rank the targets;
                    "is_finished": [B, H] bool, whether the target has an end token}
        Raises:
          ValueError: an id is not in the vocabulary; the prefix leaves no room.
        """
        raise NotImplementedError

    def limits(self, is_source_BS: tf.Tensor, prefix: Prefix | None) -> Limits:
        """Returns the length limits of targets, at least one token more than a prefix.

        Shapes:
          is_source_BS: [B, S] bool, False for padding
        Raises:
          ValueError: max_length leaves no room after the longest prefix.
        """
        p = self.params
        longest_prefix = 0 if prefix is None else int(prefix.ids.shape[1])
        sizes = np.arange(is_source_BS.shape[1] + 1)
        by_size = np.full(len(sizes), np.iinfo(np.int32).max, np.int64)
        if p.max_length_ratio is not None:
            by_size = np.floor(p.max_length_ratio * sizes).astype(np.int64) + p.max_length_extra
            by_size = np.maximum(by_size, 1)
        if p.max_length is not None:
            if longest_prefix >= p.max_length:
                raise ValueError(
                    f"{self._name}: prefixes of up to {longest_prefix} tokens leave no room within "
                    f"max_length {p.max_length}"
                )
            by_size = np.minimum(by_size, p.max_length)
        longest = max(int(by_size.max()), longest_prefix + 1)
        size_B = tf.reduce_sum(tf.cast(is_source_BS, tf.int32), 1)
        limits_B = tf.gather(tf.constant(by_size, tf.int32), size_B)
        if prefix is not None:
            limits_B = tf.maximum(limits_B, prefix.lengths + 1)
        return Limits(longest, tf.where(size_B > 0, limits_B, 0))

    def penalty(self, vocab_size: int, end_id: int, forbidden_ids: Sequence[int], t: Any) -> Any:
        """Returns a bias for the scores of token t, -inf for forbidden tokens; None without any.

        Shapes:
          t: [] int
          returns: [V] float32
        Raises:
          ValueError: a forbidden token is not in the vocabulary, or is the end token.
        """
        p = self.params
        check_ids(vocab_size, end_id, forbidden_ids, where=self._name)
        forbidden = forbidding(vocab_size, forbidden_ids)
        if p.min_length == 1:
            return tf.constant(forbidden) if len(forbidden_ids) else None
        too_short = forbidding(vocab_size, [*forbidden_ids, end_id])
        return tf.where(tf.reshape(t + 1 < p.min_length, [1]), too_short, forbidden)


def check_ids(vocab_size: int, end_id: int, forbidden_ids: Sequence[int], *, where: str) -> None:
    """Checks that ids are in the vocabulary.

    Raises:
      ValueError: an id is not in the vocabulary, or the end token is forbidden.
    """
    if not 0 <= end_id < vocab_size:
        raise ValueError(f"{where}: end_id is {end_id}, the model has tokens 0 … {vocab_size - 1}")
    for token in forbidden_ids:
        if not 0 <= token < vocab_size or token == end_id:
            raise ValueError(
                f"{where}: forbidden_ids has {token}; allowed are tokens 0 … {vocab_size - 1} "
                f"except the end token ({end_id})"
            )


def log_total(logits_NV: tf.Tensor) -> tf.Tensor:
    """Returns log(sum(exp(logits))); a log-probability is a logit minus this value.

    It is computed from the largest softmax probability, which is at least 1 / V, so its log is
    exact. This takes one kernel over the vocabulary instead of four.

    Shapes:
      logits_NV: float32
      returns: [N, 1] float32
    """
    best_N1 = tf.reduce_max(logits_NV, 1, keepdims=True)
    return best_N1 - tf.math.log(tf.reduce_max(tf.nn.softmax(logits_NV), 1, keepdims=True))


def token_log_probs(logits_NV: tf.Tensor, ids_N: tf.Tensor) -> tf.Tensor:
    """Returns the log-probability of one token per row.

    Shapes:
      logits_NV: float32, ids_N: int32
      returns: [N] float32
    """
    chosen_N = tf.gather(logits_NV, ids_N, batch_dims=1)
    return tf.minimum(chosen_N - tf.squeeze(log_total(logits_NV), 1), 0.0)


def forced_tokens(prefix: Prefix, t: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns whether token t is forced, and the forced token.

    Shapes:
      t: [] int
      returns: [B] bool, [B] int32
    """
    last = prefix.ids.shape[1] - 1
    return t < prefix.lengths, tf.gather(prefix.ids, tf.minimum(t, last), axis=1)


def forbidding(vocab_size: int, ids: Sequence[int]) -> np.ndarray:
    """Returns a bias for the scores of all tokens that forbids some of them.

    Shapes:
      returns: [vocab_size] float32
    """
    marked = np.zeros(vocab_size, np.float32)
    marked[list(ids)] = IMPOSSIBLE
    return marked
