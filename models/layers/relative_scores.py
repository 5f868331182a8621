"""Relative positions as in Transformer-XL: scores of distances by a projection of sinusoids.

Legend: B batch, T length, N heads, H head dim.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework import ops
from tekso.framework.context import StepContext
from tekso.framework.initializers import GlorotUniform, Initializer, Zeros
from tekso.framework.params import param
from tekso.framework.theta import Theta
from tekso.models.layers.attention_positions import AttentionPositions
from tekso.models.layers.masking import Array


class RelativeSinusoids(AttentionPositions):
    """Scores are scale * ((q + u) · k + (q + v) · r[distance]), with r a projection of sinusoids.

    For self-attention over whole sequences, not for decoding step by step.

    Shapes:
      bias: q [B, T, N, H], query_positions and key_positions [T]: 0, 1, 2, …
        returns [B, N, T, T], dtype of q
    Weights:
      r: [N * H, N, H], dims (None, "heads", "head_dim")
      u, v: [N, H], dims ("heads", "head_dim"); start at 0
    Raises:
      ValueError: the size N * H is odd, or positions are not 0, 1, 2, ….
    Source: Dai et al. 2019, section 3.3; Gulati et al. 2020, section 2.1.
    """

    class Params(AttentionPositions.Params):
        """Params of RelativeSinusoids."""

        init: Initializer.Params = param("Initializer of r.", default=GlorotUniform.Params())

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        self._dim = p.num_heads * p.head_dim
        if self._dim % 2:
            raise ValueError(f"RelativeSinusoids: {p.num_heads} heads of {p.head_dim} are odd")
        self.weight(
            "r",
            [self._dim, p.num_heads, p.head_dim],
            dims=(None, "heads", "head_dim"),
            init=p.init,
            fan_in=self._dim,
            fan_out=self._dim,
        )
        for name in ("u", "v"):
            shape = [p.num_heads, p.head_dim]
            self.weight(name, shape, dims=("heads", "head_dim"), init=Zeros.Params())

    def content_queries(self, theta: Theta, q: tf.Tensor) -> tf.Tensor:
        """Returns q + u."""
        return q + tf.cast(theta.u, q.dtype)

    def bias(
        self,
        theta: Theta,
        q: tf.Tensor,
        query_positions: Array,
        key_positions: Array,
        ctx: StepContext,
        *,
        scale: float,
    ) -> tf.Tensor:
        """Returns the scores of the distances; see the class."""
        batch, length, heads, _ = q.shape
        for positions in (query_positions, key_positions):
            if not isinstance(positions, np.ndarray) or not np.array_equal(
                positions, np.arange(length)
            ):
                raise ValueError(
                    "RelativeSinusoids: positions must be 0, 1, 2, …: it is for whole sequences, "
                    "not for packed texts or decoding"
                )
        # From the key T - 1 places before the query to the key T - 1 places after it.
        table = sinusoids(np.arange(length - 1, -length, -1), self._dim)
        r = ops.project(ctx, tf.constant(table, q.dtype), tf.cast(theta.r, q.dtype))
        scores = tf.einsum("btnh,snh->bnts", (q + tf.cast(theta.v, q.dtype)) * scale, r)
        # Row i needs columns T - 1 - i to 2 T - 2 - i. With a column more, each row of the flat
        # array begins one place later.
        scores = tf.concat([tf.zeros_like(scores[..., :1]), scores], 3)
        flat = tf.reshape(scores, [batch, heads, length * 2 * length])[:, :, length:]
        return tf.reshape(flat, [batch, heads, length, 2 * length - 1])[..., :length]


def sinusoids(positions: np.ndarray, dim: int) -> np.ndarray:
    """Returns sines, then cosines, of positions at wavelengths from 2 pi to 20,000 pi.

    Shapes:
      positions: [n]
      returns: [n, dim]
    """
    rates = 10_000.0 ** (-2.0 / dim * np.arange(dim // 2))
    angles = positions[:, None] * rates
    return np.concatenate([np.sin(angles), np.cos(angles)], 1)
