"""The score of a hypothesis: log-probability by length, and a penalty for sources not covered.

    score = log_prob / ((5 + length) / 6)**alpha + beta * Σ_s log(min(Σ_t attention[t, s], 1))

The length counts the end token. The sum over s goes over the tokens of the source, not padding;
that over t over all steps, that of the end included.

Legend: B sources, K hypotheses, S source length.
Source: Wu et al. 2016, "Google's neural machine translation system", eq. 14.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

LEAST_COVERAGE = 1e-9
"""A source token that got less attention counts as if it got this: a penalty stays finite."""


@dataclasses.dataclass(frozen=True)
class HypothesisScore:
    """Scores of hypotheses of up to `max_length` tokens.

    Attributes:
      alpha: 0 ranks by log-probability, more favours longer hypotheses, less than 0 shorter ones.
      beta: weight of the coverage penalty, at least 0.
      max_length: most tokens.
    """

    alpha: float
    beta: float
    max_length: int

    def norm(self, lengths: Any) -> tf.Tensor:
        """Returns what log-probabilities of hypotheses of some length are divided by.

        Shapes:
          lengths: any, int in [0, max_length]
          returns: the same, float32
        """
        sizes = np.arange(self.max_length + 1, dtype=np.float64)
        return tf.gather(tf.constant(((5 + sizes) / 6) ** self.alpha, tf.float32), lengths)

    def coverage_penalty(self, coverage_BKS: tf.Tensor, is_source_BS: tf.Tensor) -> tf.Tensor:
        """Returns beta * Σ_s log(min(coverage, 1)), at most 0.

        Shapes:
          coverage_BKS: float32, the attention that each source token got; is_source_BS: bool
          returns: [B, K] float32
        """
        covered_BKS = tf.math.log(tf.clip_by_value(coverage_BKS, LEAST_COVERAGE, 1.0))
        is_source_B1S = tf.expand_dims(is_source_BS, 1)
        return self.beta * tf.reduce_sum(tf.where(is_source_B1S, covered_BKS, 0.0), -1)

    def bound(self, log_probs: tf.Tensor, length: Any, limits: tf.Tensor) -> tf.Tensor:
        """Returns a score that no continuation of a live hypothesis exceeds.

        A log-probability only falls from here on, and it is negative, so the best norm is the
        largest one ahead. A coverage penalty can still become 0.

        Shapes:
          log_probs: [B], length: [] int, the tokens so far; limits: [B] int32
          returns: [B] float32
        """
        best = limits if self.alpha >= 0 else tf.minimum(length + 1, self.max_length)
        return log_probs / self.norm(best)
