"""Samples the next token from logits: greedy, temperature, top-k and nucleus sampling.

Legend: B batch, V vocabulary, K candidates.
"""

from __future__ import annotations

import tensorflow as tf

SMALLEST_UNIFORM = 2.0**-25
"""Lower bound of uniform numbers, half of 2**-24 (24-bit), so that Gumbel noise is finite."""


def check_sampling(
    *, temperature: float, top_k: int | None, top_p: float, where: str = "sampling"
) -> None:
    """Checks the ranges of the settings.

    Raises:
      ValueError: a setting is out of range.
    """
    if not 0.0 <= temperature < float("inf"):
        raise ValueError(f"{where}.temperature is {temperature}, must be 0 (greedy) or more")
    if top_k is not None and top_k < 1:
        raise ValueError(f"{where}.top_k is {top_k}, must be at least 1, or None for all tokens")
    if not 0.0 < top_p <= 1.0:
        raise ValueError(f"{where}.top_p is {top_p}, must be in (0, 1]; 1 keeps all tokens")


def sample(
    logits_BV: tf.Tensor,
    uniform_BV: tf.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
) -> tf.Tensor:
    """Samples a token from softmax(logits / temperature), truncated by top-k and nucleus sampling.

    First the `top_k` likeliest tokens are kept, then the smallest set of them with a total
    probability of at least `top_p`; among equally likely tokens the lower id comes first. The
    remaining probabilities are renormalised.

    The sample is the argmax of logits + Gumbel noise, computed from one uniform number per token,
    so the same numbers give the same token on every device.

    Shapes:
      logits_BV: float; uniform_BV: float32 in [0, 1)
      returns: [B] int32
    Source:
      Nucleus: Holtzman et al. 2020, "The curious case of neural text degeneration", section 3.1.
      Gumbel: Gumbel 1954; Maddison et al. 2014, "A* sampling", section 2.
    """
    if temperature == 0.0:
        return tf.argmax(logits_BV, -1, output_type=tf.int32)
    wide_BV = tf.cast(logits_BV, tf.float32)
    wide_BV = (wide_BV - tf.reduce_max(wide_BV, -1, keepdims=True)) / temperature
    noise_BV = -tf.math.log(-tf.math.log(tf.maximum(uniform_BV, SMALLEST_UNIFORM)))
    vocab_size = logits_BV.shape[-1]
    if (top_k is None or top_k >= vocab_size) and top_p == 1.0:
        return tf.argmax(wide_BV + noise_BV, -1, output_type=tf.int32)

    kept = vocab_size if top_k is None else min(top_k, vocab_size)
    values_BK, ids_BK = tf.math.top_k(wide_BV, kept)
    if top_p < 1.0:
        shares_BK = tf.nn.softmax(values_BK)
        likelier_BK = tf.cumsum(shares_BK, -1, exclusive=True)
        values_BK = tf.where(likelier_BK < top_p, values_BK, float("-inf"))
    noise_BK = tf.gather(noise_BV, ids_BK, batch_dims=1)
    choice_B = tf.argmax(values_BK + noise_BK, -1, output_type=tf.int32)
    return tf.gather(ids_BK, choice_B, batch_dims=1)
