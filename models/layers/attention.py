"""Multi-head attention: self- or cross-attention, causal or not, grouped queries, key-value cache.

Legend: B batch, T queries, S keys, D model dim, N heads, K kv heads, H head dim.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from tekso.framework import ops
from tekso.framework.context import StepContext
from tekso.framework.initializers import GlorotUniform, Initializer, Zeros
from tekso.framework.params import REQUIRED, param
from tekso.framework.primitives.attention import mean_probabilities
from tekso.framework.theta import Theta
from tekso.models.layers import cache as cache_lib
from tekso.models.layers import masking
from tekso.models.layers.attention_positions import AttentionPositions
from tekso.models.layers.cache import KeysAndValues
from tekso.models.layers.masking import Array
from tekso.models.layers.projections import ProjectionLayer
from tekso.models.layers.sizes import with_sizes


class MultiHeadAttention(ProjectionLayer):
    """Multi-head attention: out(softmax(scale * q k^T + bias, where mask) v).

    With `memory_dim`, it is cross-attention: keys and values are computed from the memory.

    `fprop`, `attend_to` and `extend_step` add the attention weights to the collection, as the mean
    over heads and without dropout, if the caller requests them (see `collecting_attention`).

    Shapes:
      x: [B, T, D], positions: [T] or [B, T] int
      memory, for cross-attention only: [B, S, memory_dim]; in self-attention, S is T
      mask: bool, bias: float, broadcastable to [B, N, T, S]
      returns: [B, T, D], dtype of x
    Weights:
      q: [input_dim, N, H], dims ("embed", "heads", "head_dim"); bias q_bias [N, H]
      k, v: [input_dim or memory_dim, K, H], dims ("embed", "heads", "head_dim"), with "kv_heads"
        instead of "heads" if num_kv_heads is set; biases k_bias, v_bias [K, H]
      out: [N, H, input_dim], dims ("heads", "head_dim", "embed"); bias out_bias [input_dim]
      q_lora_a, q_lora_b, …: with an adapter of q, k, v, out (see Lora)
    Source: Vaswani et al. 2017, section 3.2.2; Ainslie et al. 2023 (grouped queries).
      Init: Glorot & Bengio 2010, over all heads of a projection together.
    """

    class Params(ProjectionLayer.Params):
        """Params of MultiHeadAttention."""

        input_dim: int = param("Size of the last dim of input and output.", default=REQUIRED)
        num_heads: int = param("Number of query heads.", default=REQUIRED)
        num_kv_heads: int | None = param(
            "Number of key and value heads, a divisor of num_heads; None: num_heads.", default=None
        )
        head_dim: int | None = param("Size of a head; None: input_dim / num_heads.", default=None)
        memory_dim: int | None = param(
            "Size of the last dim of the memory of cross-attention; None: self-attention.",
            default=None,
        )
        mask: Literal["none", "causal"] = param(
            "none: a query attends to all keys. causal: only to itself and keys before it.",
            default="none",
        )
        window: int | None = param(
            "A query attends only to keys less than this many positions away; None: no limit.",
            default=None,
        )
        positions: AttentionPositions.Params | None = param(
            "Position method of self-attention; None: none.", default=None
        )
        query_scale: float | None = param(
            "Factor on the product of queries and keys; None: 1 / sqrt(head_dim).", default=None
        )
        use_bias: bool = param("Whether the four projections add a bias.", default=True)
        dropout_rate: float = param("Dropout of the attention probabilities.", default=0.0)
        init: Initializer.Params = param(
            "Initializer of q, k and v.", default=GlorotUniform.Params()
        )
        output_init: Initializer.Params | None = param(
            "Initializer of out; None: `init`.", default=None
        )

    positions: AttentionPositions

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        heads, kv_heads, head_dim = p.num_heads, p.num_kv_heads or p.num_heads, _head_dim(p)
        if heads % kv_heads:
            raise ValueError(
                f"MultiHeadAttention: num_kv_heads {kv_heads} does not divide num_heads {heads}"
            )
        if not 0 <= p.dropout_rate < 1:
            raise ValueError(f"MultiHeadAttention: dropout_rate {p.dropout_rate} is not in [0, 1)")
        if p.memory_dim is not None and (p.positions or p.mask == "causal" or p.window):
            raise ValueError(
                "MultiHeadAttention: positions, a causal mask and a window are for self-attention; "
                f"memory_dim {p.memory_dim} makes this cross-attention"
            )
        self._kv_heads, self._head_dim = kv_heads, head_dim
        self._kv_dim_name = "heads" if p.num_kv_heads is None else "kv_heads"
        self._scale = head_dim**-0.5 if p.query_scale is None else p.query_scale

        self._projection("q", p.input_dim, heads, "heads")
        for name in ("k", "v"):
            self._projection(name, p.memory_dim or p.input_dim, kv_heads, self._kv_dim_name)
        self.matrix(
            "out",
            [heads, head_dim, p.input_dim],
            dims=("heads", "head_dim", "embed"),
            init=p.output_init or p.init,
            num_contracted=2,
        )
        if p.use_bias:
            self.weight("out_bias", [p.input_dim], dims=("embed",), init=Zeros.Params())
        if p.positions is not None:
            self.child("positions", with_sizes(p.positions, num_heads=heads, head_dim=head_dim))

    def _projection(self, name: str, input_dim: int, heads: int, dim_name: str) -> None:
        p, head_dim = self.params, self._head_dim
        self.matrix(
            name,
            [input_dim, heads, head_dim],
            dims=("embed", dim_name, "head_dim"),
            init=p.init,
            fan_in=input_dim,
            fan_out=heads * head_dim,
        )
        if p.use_bias:
            self.weight(
                f"{name}_bias",
                [heads, head_dim],
                dims=(dim_name, "head_dim"),
                init=Zeros.Params(),
            )

    def fprop(
        self,
        theta: Theta,
        x: tf.Tensor,
        ctx: StepContext,
        *,
        memory: tf.Tensor | None = None,
        mask: Array | None = None,
        bias: tf.Tensor | None = None,
        positions: Array | None = None,
        prefix: int = 0,
    ) -> tf.Tensor:
        """Attends to x itself, or to the memory.

        Args:
          theta: weights.
          x: input of the queries.
          ctx: step context.
          memory: input of the keys and values of cross-attention.
          mask: False hides a key from a query, in addition to `mask` and `window` of the Params.
          bias: added to the scores, in addition to the bias of `positions`.
          positions: positions of the elements of x; by default 0, 1, 2, …. Only the `positions` of
            the Params use them; the causal mask and the window use the index along the length.
          prefix: number of first elements that all queries attend to, even if the Params hide them.

        Shapes:
          x: [B, T, D], memory: [B, S, memory_dim], positions: [T] or [B, T] int
          mask: bool, bias: float, broadcastable to [B, N, T, S]
          returns: [B, T, D], dtype of x
        Raises:
          ValueError: self-attention gets a memory, or cross-attention gets none.
        """
        self._check_memory(memory)
        if memory is not None:
            q = self._heads(theta, "q", x, ctx, None)
            k, v = (self._heads(theta, name, memory, ctx, None) for name in ("k", "v"))
            return self._attend(theta, q, k, v, mask, bias, ctx)
        places = np.arange(x.shape[1], dtype=np.int32)
        positions = places if positions is None else positions
        visible = self._visible(places, places, prefix)  # first, as it checks the length
        q, k, v = (self._heads(theta, name, x, ctx, positions) for name in ("q", "k", "v"))
        mask = masking.combine(visible, mask)
        bias = self._with_position_bias(theta, q, positions, positions, bias, ctx)
        if self.params.positions is not None:
            q = self.positions.content_queries(theta.positions, q)
        return self._attend(theta, q, k, v, mask, bias, ctx)

    def keys_and_values(self, theta: Theta, memory: tf.Tensor, ctx: StepContext) -> KeysAndValues:
        """Returns keys and values of a memory, computed once for `attend_to` in all decoding steps.

        Shapes:
          memory: [B, S, memory_dim]
          returns: {"k": [B, K, S, H], "v": [B, K, S, H]}
        """
        self._check_memory(memory)
        return {
            name: _heads_first(self._heads(theta, name, memory, ctx, None)) for name in ("k", "v")
        }

    def attend_to(
        self,
        theta: Theta,
        x: tf.Tensor,
        keys_and_values: KeysAndValues,
        ctx: StepContext,
        *,
        mask: Array | None = None,
        bias: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Attends to the keys and values of a memory, without dropout.

        x may have M consecutive rows for every row of the memory (the hypotheses of a source). They
        become M times as many queries, so the memory is not repeated. Mask and bias are then the
        same for all M rows.

        Shapes:
          x: [B * M, T, D]; mask and bias, if M > 1, broadcastable to [B, N, 1, S]
          returns: [B * M, T, D]
        Raises:
          ValueError: the number of rows of x is not a multiple of the memory's.
        """
        q = self._queries(theta, x, keys_and_values, ctx)
        k, v = keys_and_values["k"], keys_and_values["v"]

        def attention_weights() -> tf.Tensor:
            weights = self._attention_weights(q, k, mask, bias, ctx)
            return tf.reshape(weights, [*x.shape[:2], weights.shape[-1]])

        ctx.collected.add_attention(attention_weights)
        return self._attend_known(theta, q, k, v, mask, bias, ctx, x.shape)

    def _queries(
        self, theta: Theta, x: tf.Tensor, keys_and_values: KeysAndValues, ctx: StepContext
    ) -> tf.Tensor:
        """Returns the queries [B, M * T, N, H] of x [B * M, T, D], for a memory of B rows."""
        q, rows = self._heads(theta, "q", x, ctx, None), keys_and_values["k"].shape[0]
        if q.shape[0] == rows:
            return q
        if q.shape[0] % rows:
            raise ValueError(
                f"{self.path or 'MultiHeadAttention'}: x has {q.shape[0]} rows, which is not a "
                f"multiple of the {rows} rows of the memory"
            )
        return tf.reshape(q, [rows, -1, *q.shape[2:]])

    def init_cache(self, batch_size: int, max_length: int, dtype: str = "float32") -> KeysAndValues:
        """Returns an empty cache of `max_length` keys and values.

        Shapes:
          returns: see cache.py
        Raises:
          ValueError: the attention is not causal, so cached elements would depend on later ones.
        """
        if self.params.mask != "causal":
            raise ValueError(
                f"{self.path or 'MultiHeadAttention'}: a cache of keys and values needs "
                f"mask='causal', but mask is {self.params.mask!r}"
            )
        return cache_lib.empty(batch_size, max_length, self._kv_heads, self._head_dim, dtype)

    def extend_step(
        self,
        theta: Theta,
        x: tf.Tensor,
        cache: KeysAndValues,
        position: Any,
        ctx: StepContext,
        *,
        mask: Array | None = None,
        bias: tf.Tensor | None = None,
        positions: Array | None = None,
        prefix: int = 0,
    ) -> tuple[tf.Tensor, KeysAndValues]:
        """Attends from T new elements to all up to them; all steps together equal `fprop`.

        Args:
          theta: weights.
          x: the new elements: one, or a block.
          cache: cache from `init_cache` or the previous step.
          position: index of the first new element: elements 0 … position - 1 are in the cache.
          ctx: step context.
          mask: False hides a key from a query, in addition to later keys.
          bias: added to the scores, in addition to the bias of `positions`.
          positions: positions of all elements of the cache, used by the `positions` of the Params;
            by default 0, 1, 2, ….
          prefix: see `fprop`.

        Shapes:
          x: [B, T, D], position: [] or [B] int, positions: [max_length] or [B, max_length] int
          mask and bias: to [B, N, T, max_length]
          returns: ([B, T, D], cache)
        Raises:
          ValueError: the cache has several hypotheses per row, and x more than one element of each.
        """
        q, mask, bias, cache = self._extended(
            theta, x, cache, position, ctx, mask, bias, positions, prefix
        )
        k, v = cache_lib.read(cache, x.dtype)
        ctx.collected.add_attention(
            lambda: cache_lib.of_places(cache, self._attention_weights(q, k, mask, bias, ctx))
        )
        return self._attend_known(theta, q, k, v, mask, bias, ctx, x.shape), cache

    def _extended(
        self,
        theta: Theta,
        x: tf.Tensor,
        cache: KeysAndValues,
        position: Any,
        ctx: StepContext,
        mask: Array | None,
        bias: tf.Tensor | None,
        positions: Array | None,
        prefix: int,
    ) -> tuple[tf.Tensor, Array | None, tf.Tensor | None, KeysAndValues]:
        """Returns the queries of x, the complete mask and bias, and the cache extended by x."""
        query_index = cache_lib.positions_of_block(position, x.shape[1])
        key_index = np.arange(cache_lib.size_of(cache), dtype=np.int32)
        if positions is None:
            query_positions, key_positions = query_index, key_index
        else:
            query_positions = cache_lib.positions_at(positions, query_index)
            key_positions = positions
        q, k, v = (self._heads(theta, name, x, ctx, query_positions) for name in ("q", "k", "v"))
        cache = cache_lib.write(cache, k, v, position, fill=functools.partial(ops.fill_rows, ctx))
        mask = masking.combine(self._visible(query_index, key_index, prefix), mask)
        mask = cache_lib.own_mask(cache, None if mask is None else masking.tensor(mask))
        bias = self._with_position_bias(theta, q, query_positions, key_positions, bias, ctx)
        if self.params.positions is not None:
            q = self.positions.content_queries(theta.positions, q)
        q = tf.reshape(q, [cache["k"].shape[0], -1, *q.shape[2:]])
        return q, mask, cache_lib.own_bias(cache, bias), cache

    def _check_memory(self, memory: tf.Tensor | None) -> None:
        if (memory is None) != (self.params.memory_dim is None):
            given = "no memory was" if memory is None else "a memory was"
            raise ValueError(
                f"{self.path or 'MultiHeadAttention'}: memory_dim is {self.params.memory_dim}, but "
                f"{given} given; set memory_dim only for cross-attention"
            )

    def _heads(
        self, theta: Theta, name: str, x: tf.Tensor, ctx: StepContext, positions: Array | None
    ) -> tf.Tensor:
        """Projects x to heads, [B, T, D] -> [B, T, N or K, H]; rotates q and k by the positions."""
        bias = theta[f"{name}_bias"] if self.params.use_bias else None
        dim_name = "heads" if name == "q" else self._kv_dim_name
        heads = self.project(theta, name, x, ctx, bias)
        heads = ctx.constrain(heads, ("batch", "length", dim_name, "head_dim"))
        if name == "v" or positions is None or self.params.positions is None:
            return heads
        return self.positions.rotate(theta.positions, heads, positions, ctx)

    def _visible(self, query_places: Array, key_places: Array, prefix: int) -> Array | None:
        p = self.params
        return masking.by_position(
            query_places,
            key_places,
            causal=p.mask == "causal",
            window=p.window,
            prefix=prefix,
        )

    def _with_position_bias(
        self,
        theta: Theta,
        q: tf.Tensor,
        query_positions: Array,
        key_positions: Array,
        bias: tf.Tensor | None,
        ctx: StepContext,
    ) -> tf.Tensor | None:
        if self.params.positions is None:
            return bias
        own = self.positions.bias(
            theta.positions, q, query_positions, key_positions, ctx, scale=self._scale
        )
        return bias if own is None else own if bias is None else own + bias

    def _attend(
        self,
        theta: Theta,
        q: tf.Tensor,
        k: tf.Tensor,
        v: tf.Tensor,
        mask: Array | None,
        bias: tf.Tensor | None,
        ctx: StepContext,
    ) -> tf.Tensor:
        p = self.params
        ctx.collected.add_attention(
            lambda: self._attention_weights(q, _heads_first(k), mask, bias, ctx)
        )
        attended = ops.attend(
            ctx,
            q,
            k,
            v,
            scale=self._scale,
            mask=None if mask is None else masking.tensor(mask),
            bias=bias,
            dropout_rate=p.dropout_rate,
            layer=self,
        )
        return self._out(theta, attended, ctx)

    def _attend_known(
        self,
        theta: Theta,
        q: tf.Tensor,
        k: tf.Tensor,
        v: tf.Tensor,
        mask: Array | None,
        bias: tf.Tensor | None,
        ctx: StepContext,
        shape: tf.TensorShape,
    ) -> tf.Tensor:
        """Attends without dropout to k and v [B, K, S, H]; returns the shape of x."""
        mask = None if mask is None else masking.tensor(mask)
        attended = ops.attend_known(ctx, q, k, v, scale=self._scale, mask=mask, bias=bias)
        return self._out(theta, tf.reshape(attended, [*shape[:2], *attended.shape[2:]]), ctx)

    def _attention_weights(
        self,
        q: tf.Tensor,
        k: tf.Tensor,
        mask: Array | None,
        bias: tf.Tensor | None,
        ctx: StepContext,
    ) -> tf.Tensor:
        """Returns the mean over heads of the attention weights, without dropout.

        Shapes:
          q: [B, T, N, H], k: [B, K, S, H]
          returns: [B, T, S] float32
        """
        mask = None if mask is None else masking.tensor(mask)
        k = ctx.constrain(k, ("batch", self._kv_dim_name, None, "head_dim"))
        return mean_probabilities(q, k, scale=self._scale, mask=mask, bias=bias)

    def _out(self, theta: Theta, attended: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        attended = ctx.constrain(attended, ("batch", "length", "heads", "head_dim"))
        out_bias = theta.out_bias if self.params.use_bias else None
        return self.project(theta, "out", attended, ctx, out_bias)


def _heads_first(x: tf.Tensor) -> tf.Tensor:
    """Transposes [B, S, K, H] to [B, K, S, H]."""
    return tf.transpose(x, [0, 2, 1, 3])


def _head_dim(p: Any) -> int:
    if p.head_dim is not None:
        return int(p.head_dim)
    if p.input_dim % p.num_heads:
        raise ValueError(
            f"MultiHeadAttention: num_heads {p.num_heads} does not divide input_dim "
            f"{p.input_dim}; set head_dim"
        )
    return int(p.input_dim // p.num_heads)
