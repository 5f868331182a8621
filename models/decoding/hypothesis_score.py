"""The score of a hypothesis: length-normalised log-probability, and a coverage penalty.

    score = log_prob / ((5 + length) / 6)**alpha + beta * Σ_s log(min(Σ_t attention[t, s], 1))

The length counts the end token. The sum over s covers the source tokens without padding, the sum
over t all steps, including the step of the end token.

Legend: B sources, K hypotheses, S source length.
Source: Wu et al. 2016, "Google's neural machine translation system", eq. 14.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

LEAST_COVERAGE = 1e-9
"""Lower bound of a source token's total attention weight, so that the penalty is finite."""


@dataclasses.dataclass(frozen=True)
class HypothesisScore:
    """Scores of hypotheses of up to `max_length` tokens.

    Attributes:
      alpha: 0 ranks by log-probability; above 0 favours longer hypotheses, below 0 shorter ones.
      beta: weight of the coverage penalty, at least 0.
      max_length: most tokens.
    """

    alpha: float
    beta: float
    max_length: int

    def norm(self, lengths: Any) -> tf.Tensor:
        """Returns the divisors of log-probabilities for hypotheses of some lengths.

        Shapes:
          lengths: any, int in [0, max_length]
          returns: the same, float32
        """
        sizes = np.arange(self.max_length + 1, dtype=np.float64)
        return tf.gather(tf.constant(((5 + sizes) / 6) ** self.alpha, tf.float32), lengths)

    def coverage_penalty(self, coverage_BKS: tf.Tensor, is_source_BS: tf.Tensor) -> tf.Tensor:
        """Returns beta * Σ_s log(min(coverage, 1)), at most 0.

        Shapes:
          coverage_BKS: float32, total attention weight of each source token; is_source_BS: bool
          returns: [B, K] float32
        """
        covered_BKS = tf.math.log(tf.clip_by_value(coverage_BKS, LEAST_COVERAGE, 1.0))
        is_source_B1S = tf.expand_dims(is_source_BS, 1)
        return self.beta * tf.reduce_sum(tf.where(is_source_B1S, covered_BKS, 0.0), -1)

    def bound(self, log_probs: tf.Tensor, length: Any, limits: tf.Tensor) -> tf.Tensor:
        """Returns an upper bound of the scores of all continuations of a live hypothesis.

        A log-probability is negative and can only decrease, so the largest norm of the remaining
        lengths gives the bound. The coverage penalty can still become 0.

        Shapes:
          log_probs: [B], length: [] int, number of tokens so far; limits: [B] int32
          returns: [B] float32
        """
        best = limits if self.alpha >= 0 else tf.minimum(length + 1, self.max_length)
        return log_probs / self.norm(best)
