"""Rematerialize: a wrapper that keeps only the input of a layer and computes it again backward."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tekso.framework import ops
from tekso.framework.context import StepContext
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.theta import Theta


class Rematerialize(Layer):
    """Computes `layer`, and computes it again in the backward pass instead of keeping its inside.

    It takes the place of the layer that it wraps: weight paths, first values and random numbers are
    those of the layer alone, so it may be put around a layer, or taken away, between two runs from
    one checkpoint, and the numbers are the same.

    Source: Chen et al. 2016, "Training deep nets with sublinear memory cost".
    """

    class Params(Layer.Params):
        """Params of Rematerialize."""

        layer: Layer.Params = param("The layer to wrap.", default=REQUIRED)
        dims: tuple[str | None, ...] = param(
            "Dim names of the input and output, by which their layout is pinned.",
            default=("batch", "length", "embed"),
        )

    layer: Any

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.layer = self._adopt("", self.params.layer)
        # What it declared counts as this layer's own.
        self._weights, self._children = self.layer._weights, self.layer._children
        self.couples_examples = self.layer.couples_examples

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext, **side: Any) -> tf.Tensor:
        """Returns what the layer's fprop returns; `side` are its keyword arguments."""
        tensors = {name: value for name, value in side.items() if tf.is_tensor(value)}
        known = {name: value for name, value in side.items() if name not in tensors}

        def run(theta: Theta, x: tf.Tensor, tensors: dict[str, tf.Tensor], ctx: StepContext) -> Any:
            y = self.layer.fprop(theta, self._pin(x, ctx), ctx, **tensors, **known)
            return self._pin(y, ctx)

        return ops.rematerialize(ctx, run, theta, x, tensors)

    def _pin(self, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        return ctx.constrain(x, self.params.dims) if x.shape.rank == len(self.params.dims) else x

    def init_cache(self, batch_size: int, max_length: int, dtype: str = "float32") -> Any:
        """Returns the layer's empty cache."""
        return self.layer.init_cache(batch_size, max_length, dtype)

    def extend_step(
        self, theta: Theta, x: tf.Tensor, cache: Any, position: Any, ctx: StepContext, **side: Any
    ) -> Any:
        """Returns what the layer's extend_step returns: there is no backward pass in decoding."""
        return self.layer.extend_step(theta, x, cache, position, ctx, **side)

    def cache_memory(self, theta: Theta, cache: Any, memory: tf.Tensor, ctx: StepContext) -> Any:
        """Returns the cache with what the layer's cross-attention needs of the memory."""
        return self.layer.cache_memory(theta, cache, memory, ctx)

    def move_rows(self, cache: Any, move: Any) -> Any:
        """Returns the cache with other rows, the memory as it was."""
        return self.layer.move_rows(cache, move)

    def look(self, theta: Theta, x: tf.Tensor, ctx: StepContext, **side: Any) -> tf.Tensor:
        """Returns where the layer looks in its memory."""
        return self.layer.look(theta, x, ctx, **side)

    def look_step(
        self, theta: Theta, x: tf.Tensor, cache: Any, position: Any, ctx: StepContext, **side: Any
    ) -> Any:
        """Returns what the layer's look_step returns."""
        return self.layer.look_step(theta, x, cache, position, ctx, **side)

    def updated_statistics(self, theta: Theta, statistics: Any) -> dict[str, tf.Tensor]:
        """Returns what the layer makes of its statistics."""
        return self.layer.updated_statistics(theta, statistics)
