"""The block of a Conformer: feed-forward, self-attention, convolution, feed-forward.

Legend: B batch, T length, D dim.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import tensorflow as tf

from tekso.framework import ops, window_ops
from tekso.framework.context import StepContext
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.theta import Theta
from tekso.models.layers import masking
from tekso.models.layers.attention import MultiHeadAttention
from tekso.models.layers.attention_positions import AttentionPositions
from tekso.models.layers.convolution import DepthwiseConv2D
from tekso.models.layers.dropout import Dropout
from tekso.models.layers.feed_forward import FeedForward
from tekso.models.layers.linear import Linear
from tekso.models.layers.normalization import BatchNorm, LayerNorm, Norm
from tekso.models.layers.relative_scores import RelativeSinusoids
from tekso.models.layers.sizes import with_sizes


class ConvolutionModule(Layer):
    """y = project(swish(norm(depthwise(value(x) * sigmoid(gate(x)))))).

    Padding is 0 before the convolution and does not count in the statistics of BatchNorm, so it has
    no effect on an utterance.

    Shapes:
      x: [B, T, dim]; mask: bool [B, T], False for padding
      returns: [B, T, dim], dtype of x
    Weights:
      value/…, gate/…, output/…: those of Linear; depthwise/…: of DepthwiseConv2D; norm/…
    Source: Gulati et al. 2020, section 2.2; the gate is a gated linear unit (Dauphin et al. 2017).
    """

    class Params(Layer.Params):
        """Params of ConvolutionModule."""

        dim: int = param("Size of the last dim of input and output.", default=REQUIRED)
        kernel_size: int = param("Frames of the convolution.", default=32)
        padding: Literal["same", "causal"] = param(
            "same: an output depends on frames before and after it. causal: on no later frame.",
            default="same",
        )
        norm: Norm.Params = param(
            "After the convolution. BatchNorm, as published, couples the utterances of a batch.",
            default=BatchNorm.Params(),
        )

    depthwise: DepthwiseConv2D
    norm: Norm
    output: Linear

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        for name in ("value", "gate"):
            self.child(name, Linear.Params(input_dim=p.dim, output_dim=p.dim))
        self.child(
            "depthwise", DepthwiseConv2D.Params(input_dim=p.dim, kernel_shape=(p.kernel_size, 1))
        )
        self.child("norm", with_sizes(p.norm, dim=p.dim))
        self.child(
            "output", Linear.Params(input_dim=p.dim, output_dim=p.dim, dims=("mlp", "embed"))
        )

    def fprop(
        self, theta: Theta, x: tf.Tensor, ctx: StepContext, *, mask: tf.Tensor | None = None
    ) -> tf.Tensor:
        """See the class."""
        y = self._gated(theta, x, ctx, mask)
        if self.params.padding == "causal":
            batch, length, dim = y.shape
            missing = tf.zeros([batch, self.params.kernel_size // 2, dim], y.dtype)
            y = self._convolved(theta, tf.concat([missing, y], 1), ctx)[:, :length]
        else:
            y = self._convolved(theta, y, ctx)
        return self._finished(theta, y, x.dtype, ctx, mask)

    def stream(
        self, theta: Theta, x: tf.Tensor, before: tf.Tensor, ctx: StepContext, *, mask: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the output of the next frames with padding "causal", and what follows needs.

        Shapes:
          x: [B, T, dim]; before: [B, kernel_size - 1, dim], zeros at the beginning
          returns: [B, T, dim]; [B, kernel_size - 1, dim]
        """
        size = self.params.kernel_size
        gated = self._gated(theta, x, ctx, mask)
        both = tf.concat([tf.cast(before, gated.dtype), gated], 1)
        first = (size - 1) // 2  # the output whose last input is the first of x
        y = self._convolved(theta, both, ctx)[:, first : first + x.shape[1]]
        kept = tf.cast(both[:, both.shape[1] - size + 1 :], before.dtype)
        return self._finished(theta, y, x.dtype, ctx, mask), kept

    def _gated(
        self, theta: Theta, x: tf.Tensor, ctx: StepContext, mask: tf.Tensor | None
    ) -> tf.Tensor:
        value, gate = (getattr(self, n).fprop(theta[n], x, ctx) for n in ("value", "gate"))
        y = value * tf.sigmoid(gate)
        return y if mask is None else tf.where(tf.expand_dims(mask, 2), y, tf.zeros_like(y))

    def _convolved(self, theta: Theta, y: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        image = window_ops.constrain_image(ctx, tf.expand_dims(y, 2))
        return tf.squeeze(self.depthwise.fprop(theta.depthwise, image, ctx), 2)

    def _finished(
        self,
        theta: Theta,
        y: tf.Tensor,
        dtype: tf.DType,
        ctx: StepContext,
        mask: tf.Tensor | None,
    ) -> tf.Tensor:
        if isinstance(self.norm, BatchNorm):
            y = self.norm.fprop(theta.norm, y, ctx, mask=mask)
        else:
            y = self.norm.fprop(theta.norm, y, ctx)
        y = ops.activate(ctx, "swish", tf.cast(y, dtype))
        return self.output.fprop(theta.output, y, ctx)


class ConformerBlock(Layer):
    """Half a feed-forward layer, self-attention, convolution, half a feed-forward layer, norm.

    Every part but the last adds dropout(part(norm(x))) to x; a feed-forward layer adds half of it.

    Shapes:
      x: [B, T, dim]; mask: bool [B, T], False for padding
      returns: [B, T, dim], dtype of x
    Weights:
      first/…, second/…: those of FeedForward; attention/…, convolution/…; first_norm/…,
      second_norm/…, attention_norm/…, convolution_norm/…, norm/…: of LayerNorm
    Source: Gulati et al. 2020, eq. 1.
    """

    class Params(Layer.Params):
        """Params of ConformerBlock."""

        dim: int = param("Size of the last dim of input and output.", default=REQUIRED)
        num_heads: int = param("Number of attention heads.", default=4)
        positions: AttentionPositions.Params | None = param(
            "Position method of the attention; None: none.", default=RelativeSinusoids.Params()
        )
        expansion: int = param("Hidden units of a feed-forward layer, per dim.", default=4)
        convolution: ConvolutionModule.Params = param(
            "The convolution.", default=ConvolutionModule.Params()
        )
        dropout_rate: float = param("Dropout of the output of each part.", default=0.0)

    attention_norm: LayerNorm
    attention: MultiHeadAttention
    convolution_norm: LayerNorm
    convolution: ConvolutionModule
    norm: LayerNorm

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        feed_forward = FeedForward.Params(
            input_dim=p.dim,
            hidden_dim=p.expansion * p.dim,
            activation="swish",
            dropout_rate=p.dropout_rate,
        )
        attention = MultiHeadAttention.Params(
            input_dim=p.dim,
            num_heads=p.num_heads,
            positions=p.positions,
            dropout_rate=p.dropout_rate,
        )
        parts = {
            "first": feed_forward,
            "attention": attention,
            "convolution": with_sizes(p.convolution, dim=p.dim),
            "second": feed_forward,
        }
        for name, part in parts.items():
            self.child(f"{name}_norm", LayerNorm.Params(dim=p.dim))
            self.child(name, part)
            self.child(f"{name}_dropout", Dropout.Params(rate=p.dropout_rate))
        self.child("norm", LayerNorm.Params(dim=p.dim))

    def fprop(
        self,
        theta: Theta,
        x: tf.Tensor,
        ctx: StepContext,
        *,
        mask: tf.Tensor | None = None,
        visible: np.ndarray | None = None,
    ) -> tf.Tensor:
        """See the class.

        Args:
          theta: weights.
          x: the frames.
          ctx: step context.
          mask: False for padding.
          visible: False hides a key frame from a query frame in self-attention; None: none.

        Shapes:
          x: [B, T, dim]; mask: bool [B, T]; visible: bool [T, T]
        """
        keys: Any = None if mask is None else tf.expand_dims(tf.expand_dims(mask, 1), 1)
        keys = masking.combine(None if visible is None else visible[None, None], keys)
        x = x + 0.5 * self._part(theta, "first", x, ctx)
        x = x + self._part(theta, "attention", x, ctx, mask=keys)
        x = x + self._part(theta, "convolution", x, ctx, mask=mask)
        x = x + 0.5 * self._part(theta, "second", x, ctx)
        y = self.norm.fprop(theta.norm, x, ctx)
        return ctx.constrain(y, ("batch", "length", "embed"))

    def stream_start(self, batch_size: int, frames: int) -> Any:
        """Returns the state before the first frames, in float32 for layers of any type.

        Args:
          batch_size: number of streams.
          frames: earlier frames that a chunk attends to, at most.
        """
        dim, size = self.params.dim, self.convolution.params.kernel_size
        return {
            "attended": tf.zeros([batch_size, frames, dim]),
            "seen": tf.zeros([batch_size], tf.int32),
            "convolved": tf.zeros([batch_size, size - 1, dim]),
        }

    def stream(
        self, theta: Theta, x: tf.Tensor, state: Any, ctx: StepContext, *, mask: tf.Tensor
    ) -> tuple[tf.Tensor, Any]:
        """Returns the output of the next frames of a stream, and the next state.

        Shapes:
          x: [B, T, dim]; mask: bool [B, T], False for padding after the end of the stream
        """
        kept, length = state["attended"].shape[1], x.shape[1]
        x = x + 0.5 * self._part(theta, "first", x, ctx)
        y = self.attention_norm.fprop(theta.attention_norm, x, ctx)
        both = tf.concat([tf.cast(state["attended"], y.dtype), y], 1)
        is_seen = tf.reshape(tf.range(kept), [1, kept]) >= kept - tf.expand_dims(state["seen"], 1)
        keys = tf.concat([is_seen, mask], 1)[:, None, None]
        x = x + self.attention.fprop(theta.attention, both, ctx, mask=keys)[:, kept:]
        y = self.convolution_norm.fprop(theta.convolution_norm, x, ctx)
        y, convolved = self.convolution.stream(
            theta.convolution, y, state["convolved"], ctx, mask=mask
        )
        x = x + y
        x = x + 0.5 * self._part(theta, "second", x, ctx)
        after = {
            "attended": tf.cast(both[:, length:], state["attended"].dtype),
            "seen": tf.minimum(state["seen"] + length, kept),
            "convolved": convolved,
        }
        return self.norm.fprop(theta.norm, x, ctx), after

    def _part(
        self, theta: Theta, name: str, x: tf.Tensor, ctx: StepContext, **given: Any
    ) -> tf.Tensor:
        y = getattr(self, f"{name}_norm").fprop(theta[f"{name}_norm"], x, ctx)
        y = getattr(self, name).fprop(theta[name], y, ctx, **given)
        found: tf.Tensor = getattr(self, f"{name}_dropout").fprop(Theta(), y, ctx)
        return found
