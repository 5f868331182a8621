"""Location-aware attention: additive attention that also sees where it attended before.

Legend: B sources, K queries per source, S source length, Q query_dim, M memory_dim, A size of a
key, W kernel_size.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.params import param
from tekso.framework.theta import Theta
from tekso.models.layers.source_attention import AdditiveAttention


class LocationAwareAttention(AdditiveAttention):
    """score(q, m_s) = w_score · tanh(q @ w_query + m_s @ w_key + near_s @ w_filters @ w_location).

    near_s has the attention weights of the previous step at s - (W - 1) / 2 … s + (W - 1) / 2, 0
    outside of the source and before the first step. So w_filters are the kernels of a convolution.

    Shapes:
      x: [B, K, Q], encoded: [B, S, M], previous: [B, K, S]; A is hidden_dim, or Q if that is None
      attend returns: contexts [B, K, M], probabilities [B, K, S]
    Weights:
      w_query: [Q, A], w_key: [M, A], w_score: [A], as in AdditiveAttention
      w_filters: [W, num_filters], dims (None, None); w_location: [num_filters, A], same dims
    Raises:
      ValueError: kernel_size is not odd.
    Source: Chorowski et al. 2015, eqs. 8 and 9, without smoothing and sharpening.
    """

    class Params(AdditiveAttention.Params):
        """Params of LocationAwareAttention."""

        num_filters: int = param("Kernels of the convolution.", default=10)
        kernel_size: int = param("Size of a kernel, in source elements; odd.", default=31)

    uses_previous = True

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        if p.kernel_size < 1 or p.kernel_size % 2 == 0:
            raise ValueError(f"LocationAwareAttention: kernel_size is {p.kernel_size}, must be odd")
        size = p.query_dim if p.hidden_dim is None else p.hidden_dim
        self.matrix("w_filters", [p.kernel_size, p.num_filters], dims=(None, None), init=p.init)
        self.matrix("w_location", [p.num_filters, size], dims=(None, None), init=p.init)

    def _scores(
        self,
        theta: Theta,
        queries: tf.Tensor,
        keys: tf.Tensor,
        ctx: StepContext,
        previous: tf.Tensor | None = None,
    ) -> tf.Tensor:
        if previous is None:
            raise ValueError("LocationAwareAttention: attend() needs `previous`, the last weights")
        size, length = self.params.kernel_size, previous.shape[2]
        gap = tf.zeros([*previous.shape[:2], size // 2], previous.dtype)
        wide = tf.concat([gap, previous, gap], 2)
        near = tf.stack([wide[:, :, i : i + length] for i in range(size)], 3)
        near = tf.cast(near, keys.dtype)
        location = self.project(
            theta, "w_location", self.project(theta, "w_filters", near, ctx), ctx
        )
        projected = tf.expand_dims(self.project(theta, "w_query", queries, ctx), 2)
        hidden = tf.tanh(projected + tf.expand_dims(keys, 1) + location)
        return tf.einsum("bksa,a->bks", hidden, theta.w_score)
