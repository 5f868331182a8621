"""The cross-entropy of tokens, given their scores."""

from __future__ import annotations

import math

import tensorflow as tf

from tekso.framework.primitives.precision import widen

_MAX_EXPONENT = 80.0  # caps the perplexity of very large losses


def perplexity(nats: float) -> float:
    """Returns the perplexity of a mean cross-entropy."""
    return math.exp(min(nats, _MAX_EXPONENT))


def smoothed_cross_entropy(
    logits: tf.Tensor, labels: tf.Tensor, label_smoothing: float = 0.0
) -> tf.Tensor:
    """Returns the cross-entropy of every label in nats.

    Args:
      logits: scores of all tokens.
      labels: ids of the right tokens.
      label_smoothing: share of the target probability that is spread evenly.

    Shapes:
      logits: [B, L, V], labels: [B, L] int
      returns: [B, L], float32 or wider
    """
    logits = widen(logits)
    nats = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    if not label_smoothing:
        return nats
    even = -tf.reduce_mean(tf.nn.log_softmax(logits), axis=-1)
    return (1.0 - label_smoothing) * nats + label_smoothing * even
