"""Positions inside attention: rotary (rotates queries and keys) and relative (score bias).

Legend: B batch, T queries, S keys, N heads, H head dim.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework import ops
from tekso.framework.context import StepContext
from tekso.framework.initializers import GlorotUniform, Initializer, Normal
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.primitives.lookup import lookup
from tekso.framework.theta import Theta
from tekso.models.layers.masking import Array, distances
from tekso.models.layers.positions import sines


class AttentionPositions(Layer):
    """Base of the position methods of self-attention; a subclass overrides `rotate` or `bias`.

    Shapes:
      rotate: x [B, T, any number of heads, H], positions [T] or [B, T] int
        returns shape and dtype of x
      bias: q [B, T, N, H], query_positions [T] or [B, T] int, key_positions [S] or [B, S] int
        returns a tensor broadcastable to [B, N, T, S], or None
    """

    class Params(Layer.Params):
        """Params of positions inside attention."""

        num_heads: int = param("Number of query heads.", default=REQUIRED)
        head_dim: int = param("Size of a head.", default=REQUIRED)

    def rotate(self, theta: Theta, x: tf.Tensor, positions: Array, ctx: StepContext) -> tf.Tensor:
        """Returns queries or keys rotated by their positions.

        Shapes:
          x: [B, T, any number of heads, H], positions: [T] or [B, T] int
          returns: shape and dtype of x
        """
        return x

    def content_queries(self, theta: Theta, q: tf.Tensor) -> tf.Tensor:
        """Returns the queries whose products with the keys are the scores; by default q itself.

        Shapes:
          q: [B, T, N, H]
          returns: [B, T, N, H]
        """
        return q

    def bias(
        self,
        theta: Theta,
        q: tf.Tensor,
        query_positions: Array,
        key_positions: Array,
        ctx: StepContext,
        *,
        scale: float,
    ) -> tf.Tensor | None:
        """Returns a bias for the scores, or None.

        Args:
          theta: weights.
          q: queries, before they are scaled.
          query_positions: position of every query.
          key_positions: position of every key.
          ctx: step context.
          scale: factor on the product of queries and keys.

        Shapes:
          q: [B, T, N, H], query_positions: [T] or [B, T], key_positions: [S] or [B, S]
          returns: broadcastable to [B, N, T, S]
        """
        return None


class RotaryPositions(AttentionPositions):
    """Rotates pair i of the dims at position t by the angle t * base ** (-2i / H).

    Pair i is (x[i], x[i + H/2]). The paper pairs neighbouring dims, which is the same up to a fixed
    permutation of the dims of a head. A score then depends only on the distance between query and
    key.

    Shapes:
      rotate: x [B, T, any number of heads, H], positions [T] or [B, T] int
        returns shape and dtype of x
    Source: Su et al. 2021, "RoFormer", eqs. 14 and 15.
    """

    class Params(AttentionPositions.Params):
        """Params of RotaryPositions."""

        base: float = param("Ratio of the longest to the shortest wavelength.", default=1e4)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        if self.params.head_dim % 2:
            raise ValueError(
                f"RotaryPositions: head_dim {self.params.head_dim} is odd, must be even"
            )

    def rotate(self, theta: Theta, x: tf.Tensor, positions: Array, ctx: StepContext) -> tf.Tensor:
        """See the class."""
        p = self.params
        rates = p.base ** (-2 / p.head_dim * np.arange(p.head_dim // 2))
        sine, cosine = (tf.expand_dims(s, -2) for s in sines(positions, rates))
        return ops.rotate(ctx, x, sine, cosine)


class RelativeBias(AttentionPositions):
    """Adds a learned scalar per head and bucket of distances.

    Half of the buckets have one distance each, the other half have ranges that grow logarithmically
    up to max_distance; larger distances share the last bucket. If causal, all keys after a query
    count as distance 0 (and should be masked); otherwise, keys before and after the query have half
    of the buckets each.

    To share one table between layers, add one RelativeBias to the model and pass its bias to the
    stack.

    Shapes:
      bias: query_positions [T] or [B, T] int, key_positions [S] or [B, S] int
        returns [1, N, T, S] if both positions have one dim, else [B, N, T, S]
    Weights:
      w: [num_buckets, num_heads], dims (None, "heads")
    Source: Raffel et al. 2020, section 2.1.
    """

    class Params(AttentionPositions.Params):
        """Params of RelativeBias."""

        num_buckets: int = param("Number of buckets.", default=32)
        max_distance: int = param("From this distance on, the last bucket is used.", default=128)
        causal: bool = param(
            "Whether buckets distinguish only keys before the query.", default=True
        )
        init: Initializer.Params = param("Initializer of w.", default=Normal.Params(stddev=0.02))

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        self._bucket_of = distance_buckets(p.num_buckets, p.max_distance, causal=p.causal)
        self.weight("w", [p.num_buckets, p.num_heads], dims=(None, "heads"), init=p.init)

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
        """Returns the bias [1 or B, N, T, S]; see the class."""
        index = _clipped_distance(query_positions, key_positions, self.params.max_distance)
        if isinstance(index, np.ndarray):
            buckets = tf.constant(self._bucket_of[index])
        else:
            buckets = tf.gather(self._bucket_of, index)
        bias = lookup(theta.w, buckets)  # [T, S, N] or [B, T, S, N]
        if bias.shape.rank == 3:
            bias = tf.expand_dims(bias, 0)
        return tf.transpose(bias, [0, 3, 1, 2])


class RelativeKeys(AttentionPositions):
    """Adds scale * q · a[distance] to the scores, with a learned vector per clipped distance.

    The paper's relative values are left out, because it found that they make no difference.

    Shapes:
      bias: q [B, T, N, H], query_positions [T] or [B, T] int, key_positions [S] or [B, S] int
        returns [B, N, T, S], dtype of q
    Weights:
      w: [2 * max_distance + 1, head_dim], dims (None, "head_dim"): from far before to far after
    Source: Shaw et al. 2018, eqs. 4 and 5, shared between heads as in section 3.3.
    """

    class Params(AttentionPositions.Params):
        """Params of RelativeKeys."""

        max_distance: int = param("Greater distances share one vector.", default=16)
        init: Initializer.Params = param("Initializer of w.", default=GlorotUniform.Params())

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        rows = 2 * p.max_distance + 1
        self.weight("w", [rows, p.head_dim], dims=(None, "head_dim"), init=p.init)

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
        """Returns the bias [B, N, T, S]; see the class."""
        limit = self.params.max_distance
        index = 2 * limit - _clipped_distance(query_positions, key_positions, limit)
        vectors = tf.cast(lookup(theta.w, tf.convert_to_tensor(index)), q.dtype)
        form = "btnh,tsh->bnts" if vectors.shape.rank == 3 else "btnh,btsh->bnts"
        return tf.einsum(form, q * scale, vectors)


def distance_buckets(num_buckets: int, max_distance: int, *, causal: bool) -> np.ndarray:
    """Returns the bucket of every distance, from -max_distance (a key after the query).

    Shapes:
      returns: [2 * max_distance + 1] int32
    Raises:
      ValueError: there are too few buckets, or max_distance is too small for them.
    """
    one_way = num_buckets if causal else num_buckets // 2
    single = one_way // 2
    if single < 1 or (not causal and num_buckets % 2) or max_distance <= single:
        raise ValueError(
            f"relative bias: {num_buckets} buckets up to distance {max_distance}; num_buckets must "
            f"be at least {2 if causal else 4}{'' if causal else ' and even'}, and max_distance "
            f"above {max(single, 1)}, the number of buckets for one distance"
        )
    distance = np.arange(-max_distance, max_distance + 1)
    away = np.maximum(distance, 0) if causal else np.abs(distance)
    growth = np.log(np.maximum(away, 1) / single) / math.log(max_distance / single)
    ranges = growth * (one_way - single) + 1e-9  # a range begins where the logarithm is an integer
    ranged = np.minimum(single + ranges.astype(np.int32), one_way - 1)
    bucket = np.where(away < single, away, ranged)
    if not causal:
        bucket = bucket + np.where(distance < 0, one_way, 0)
    return bucket.astype(np.int32)


def _clipped_distance(query_positions: Array, key_positions: Array, limit: int) -> Array:
    """Returns distances of keys before queries, clipped to +-limit, plus limit: [(B,) T, S]."""
    distance = distances(query_positions, key_positions)
    if isinstance(distance, np.ndarray):
        return np.clip(distance, -limit, limit) + limit
    return tf.clip_by_value(distance, -limit, limit) + limit
