"""Rematerialize: a wrapper that saves only a layer's input and recomputes the rest backward."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tekso.framework import ops
from tekso.framework.context import StepContext
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.theta import Theta


class Rematerialize(Layer):
    """Computes `layer`, and recomputes it in the backward pass instead of saving activations.

    Weight paths, initial values and random numbers are the same as without the wrapper. It can be
    added or removed between two runs from one checkpoint, without changing any result.

    Shapes:
      x and keyword arguments: as for `layer`; x has one dim for each name in `dims`, by default
        [batch, length, embed], or gets no sharding constraint
      returns: what `layer` returns, one tensor
    Weights: those of `layer`.
    Source: Chen et al. 2016, "Training deep nets with sublinear memory cost".
    """

    class Params(Layer.Params):
        """Params of Rematerialize."""

        layer: Layer.Params = param("The layer to wrap.", default=REQUIRED)
        dims: tuple[str | None, ...] = param(
            "Dim names of input and output, for their sharding constraints.",
            default=("batch", "length", "embed"),
        )

    layer: Any

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.layer = self._adopt("", self.params.layer)
        # The wrapper shares the layer's weights and children.
        self._weights, self._children = self.layer._weights, self.layer._children
        self.couples_examples = self.layer.couples_examples
        self.gathers_examples = self.layer.gathers_examples

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext, **side: Any) -> tf.Tensor:
        """Returns what the layer's fprop returns; `side` are its keyword arguments."""
        if ctx.collected.requests_attention:  # attention weights cannot leave `ops.rematerialize`
            return self.layer.fprop(theta, x, ctx, **side)
        tensors = {name: value for name, value in side.items() if tf.is_tensor(value)}
        known = {name: value for name, value in side.items() if name not in tensors}

        def run(theta: Theta, x: tf.Tensor, tensors: dict[str, tf.Tensor], ctx: StepContext) -> Any:
            y = self.layer.fprop(theta, self._constrain(x, ctx), ctx, **tensors, **known)
            return self._constrain(y, ctx)

        return ops.rematerialize(ctx, run, theta, x, tensors)

    def _constrain(self, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        return ctx.constrain(x, self.params.dims) if x.shape.rank == len(self.params.dims) else x

    def init_cache(self, batch_size: int, max_length: int, dtype: str = "float32") -> Any:
        """Returns the layer's empty cache."""
        return self.layer.init_cache(batch_size, max_length, dtype)

    def extend_step(
        self, theta: Theta, x: tf.Tensor, cache: Any, position: Any, ctx: StepContext, **side: Any
    ) -> Any:
        """Returns the layer's extend_step, without rematerialisation: decoding has no gradients."""
        return self.layer.extend_step(theta, x, cache, position, ctx, **side)

    def cache_memory(self, theta: Theta, cache: Any, memory: tf.Tensor, ctx: StepContext) -> Any:
        """Returns the cache with the keys and values of the memory for cross-attention."""
        return self.layer.cache_memory(theta, cache, memory, ctx)

    def move_rows(self, cache: Any, move: Any) -> Any:
        """Returns the cache with moved rows; the memory does not change."""
        return self.layer.move_rows(cache, move)

    @property
    def has_statistics(self) -> bool:
        """See `Layer`."""
        return bool(self.layer.has_statistics)

    def updated_statistics(self, theta: Theta, statistics: Any) -> dict[str, tf.Tensor]:
        """Returns the layer's updated statistics."""
        found: dict[str, tf.Tensor] = self.layer.updated_statistics(theta, statistics)
        return found
