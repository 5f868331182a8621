"""TransformerLayer: self-attention, optional attention to a memory, and a feed-forward layer.

    pre-norm                                post-norm
    x ──┬─ norm ─ attention ─ dropout ─ +   x ──┬─ attention ─ dropout ─ + ─ norm
        └───────────────────────────────┘       └───────────────────────┘

Legend: B batch, T length, S length of the memory, D model dim, N heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.theta import Theta
from tekso.models.layers import masking
from tekso.models.layers.attention import MultiHeadAttention
from tekso.models.layers.dropout import Dropout
from tekso.models.layers.feed_forward import FeedForward, FeedForwardBase
from tekso.models.layers.masking import Array
from tekso.models.layers.normalization import LayerNorm, Norm
from tekso.models.layers.sizes import with_sizes

Cache = dict[str, Any]


class TransformerLayer(Layer):
    """One layer of an encoder or decoder; each part is a child that can be swapped.

    Attention weights, if the caller requests them, are those of memory_attention if it is set, else
    of attention.

    Shapes:
      x: [B, T, D], positions: [T] or [B, T] int, memory: [B, S, memory_dim]
      mask: bool, bias: float, broadcastable to [B, N, T, T]; memory_mask: to [B, N, T, S]
      returns: [B, T, D], dtype of x
    Children:
      attention_norm, attention
      memory_attention_norm, memory_attention: if memory_attention is set
      feed_forward_norm, feed_forward
    Source: Vaswani et al. 2017, section 3.1 (post-norm); Xiong et al. 2020 (pre-norm).
    """

    class Params(Layer.Params):
        """Params of TransformerLayer."""

        dim: int = param("Size of the last dim of input and output.", default=REQUIRED)
        norm_position: Literal["pre", "post"] = param(
            "Whether each part normalises its input, or the sum of its input and output.",
            default="pre",
        )
        norm: Norm.Params = param("Normalisation of every part.", default=LayerNorm.Params())
        attention: MultiHeadAttention.Params = param(
            "Self-attention.", default=MultiHeadAttention.Params()
        )
        memory_attention: MultiHeadAttention.Params | None = param(
            "Attention to a memory, such as the output of an encoder.", default=None
        )
        feed_forward: FeedForwardBase.Params = param(
            "Feed-forward layer after the attention.", default=FeedForward.Params()
        )
        dropout_rate: float = param("Dropout of the output of each part.", default=0.0)

    attention: MultiHeadAttention
    memory_attention: MultiHeadAttention
    feed_forward: FeedForwardBase

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        self._part("attention", with_sizes(p.attention, input_dim=p.dim))
        if p.memory_attention is not None:
            memory = with_sizes(p.memory_attention, input_dim=p.dim)
            if memory.memory_dim is None:
                memory.memory_dim = p.dim
            self._part("memory_attention", memory)
        self._part("feed_forward", with_sizes(p.feed_forward, input_dim=p.dim))

    def _part(self, name: str, params: Any) -> None:
        p = self.params
        self.child(f"{name}_norm", with_sizes(p.norm, dim=p.dim))
        self.child(name, params)
        self.child(f"{name}_dropout", Dropout.Params(rate=p.dropout_rate))

    def fprop(
        self,
        theta: Theta,
        x: tf.Tensor,
        ctx: StepContext,
        *,
        mask: Array | None = None,
        bias: tf.Tensor | None = None,
        positions: Array | None = None,
        memory: tf.Tensor | None = None,
        memory_mask: Array | None = None,
        prefix: int = 0,
    ) -> tf.Tensor:
        """Computes the layer.

        Args:
          theta: weights.
          x: input.
          ctx: step context.
          mask: False hides an element of x from another, in addition to the attention's own mask.
            An element that it hides from itself is padding (see MixtureOfExperts).
          bias: added to the scores of self-attention.
          positions: positions of the elements of x; by default 0, 1, 2, ….
          memory: input of the keys and values of memory_attention.
          memory_mask: False hides an element of the memory from an element of x.
          prefix: number of first elements of x that all attend to; see MultiHeadAttention.

        Shapes:
          x: [B, T, D], positions: [T] or [B, T] int, memory: [B, S, memory_dim]
          mask, bias: broadcastable to [B, N, T, T], memory_mask: to [B, N, T, S]
          returns: [B, T, D], dtype of x
        Raises:
          ValueError: a memory is given without memory_attention, or memory_attention gets no
            memory.
        """
        self._check_memory(memory is not None)

        def attend(x: tf.Tensor) -> tf.Tensor:
            return self.attention.fprop(
                theta.attention,
                x,
                ctx,
                mask=mask,
                bias=bias,
                positions=positions,
                prefix=prefix,
            )

        def attend_to_memory(x: tf.Tensor) -> tf.Tensor:
            return self.memory_attention.fprop(
                theta.memory_attention, x, ctx, memory=memory, mask=memory_mask
            )

        x = self._add(theta, "attention", x, ctx, attend)
        if memory is not None:
            x = self._add(theta, "memory_attention", x, ctx, attend_to_memory)
        return self._feed_forward(theta, x, ctx, mask=mask)

    def init_cache(self, batch_size: int, max_length: int, dtype: str = "float32") -> Cache:
        """Returns an empty cache of `max_length` elements: {"attention": keys and values}."""
        return {"attention": self.attention.init_cache(batch_size, max_length, dtype)}

    def cache_memory(
        self, theta: Theta, cache: Cache, memory: tf.Tensor, ctx: StepContext
    ) -> Cache:
        """Returns the cache with the keys and values of a memory, for all steps."""
        self._check_memory(True)
        keys_and_values = self.memory_attention.keys_and_values(theta.memory_attention, memory, ctx)
        return {**cache, "memory_attention": keys_and_values}

    def move_rows(self, cache: Cache, move: Callable[..., Any]) -> Cache:
        """Returns the cache with moved rows of self-attention; the memory does not change."""
        return {**cache, "attention": move(cache["attention"])}

    def extend_step(
        self,
        theta: Theta,
        x: tf.Tensor,
        cache: Cache,
        position: Any,
        ctx: StepContext,
        *,
        mask: Array | None = None,
        bias: tf.Tensor | None = None,
        memory_mask: Array | None = None,
        positions: Array | None = None,
        prefix: int = 0,
    ) -> tuple[tf.Tensor, Cache]:
        """Computes T new elements, the first at `position`.

        x may have several rows for every row of the memory; see `MultiHeadAttention.attend_to`.
        The other arguments are as in `fprop`, except that `positions` has the positions of all
        elements of the cache.

        Shapes:
          x: [B, T, D], position: [] or [B] int, positions: [max_length] or [B, max_length] int
          mask, bias: broadcastable to [B, N, T, max_length], memory_mask: to [B, N, T, S]
          returns: ([B, T, D], cache)
        Raises:
          ValueError: memory_attention is set, but `cache_memory` was not called.
        """
        self._check_memory("memory_attention" in cache)
        cache = dict(cache)

        def attend(x: tf.Tensor) -> tf.Tensor:
            y, cache["attention"] = self.attention.extend_step(
                theta.attention,
                x,
                cache["attention"],
                position,
                ctx,
                mask=mask,
                bias=bias,
                positions=positions,
                prefix=prefix,
            )
            return y

        def attend_to_memory(x: tf.Tensor) -> tf.Tensor:
            return self.memory_attention.attend_to(
                theta.memory_attention, x, cache["memory_attention"], ctx, mask=memory_mask
            )

        x = self._add(theta, "attention", x, ctx, attend)
        if "memory_attention" in cache:
            x = self._add(theta, "memory_attention", x, ctx, attend_to_memory)
        return self._feed_forward(theta, x, ctx), cache

    def _given(self, theta: Theta, name: str, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """Returns the input of a part, normalised with norm_position "pre"."""
        if self.params.norm_position == "post":
            return x
        return getattr(self, f"{name}_norm").fprop(theta[f"{name}_norm"], x, ctx)

    def _feed_forward(
        self, theta: Theta, x: tf.Tensor, ctx: StepContext, *, mask: Array | None = None
    ) -> tf.Tensor:
        side: dict[str, Any] = {}
        if self.feed_forward.takes_padding:
            side["is_token"] = masking.tokens(mask, x.shape[1])

        def compute(x: tf.Tensor) -> tf.Tensor:
            return self.feed_forward.fprop(theta.feed_forward, x, ctx, **side)

        x = self._add(theta, "feed_forward", x, ctx, compute)
        return ctx.constrain(x, ("batch", "length", "embed"))

    def _add(
        self,
        theta: Theta,
        name: str,
        x: tf.Tensor,
        ctx: StepContext,
        compute: Callable[[tf.Tensor], tf.Tensor],
    ) -> tf.Tensor:
        """Adds the output of a part to its input, and normalises before or after."""
        y = compute(self._given(theta, name, x, ctx))
        dropout = getattr(self, f"{name}_dropout")
        y = x + dropout.fprop(theta[f"{name}_dropout"], y, ctx)
        if self.params.norm_position == "pre":
            return y
        return getattr(self, f"{name}_norm").fprop(theta[f"{name}_norm"], y, ctx)

    def _check_memory(self, given: bool) -> None:
        has_part = self.params.memory_attention is not None
        if given != has_part:
            raise ValueError(
                f"{self.path or 'TransformerLayer'}: "
                + (
                    "memory_attention is set, but no memory was given (fprop: memory=…; "
                    "decoding: cache_memory before the first step)"
                    if has_part
                    else "a memory was given, but memory_attention is not set"
                )
            )
