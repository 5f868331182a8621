"""SpecAugment: warps time and masks random channels and random spans of time in training.

Legend: B batch, T frames, C channels, M masks.
"""

from __future__ import annotations

from typing import Any, Literal

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.layer import Layer
from tekso.framework.params import param
from tekso.framework.theta import Theta
from tekso.models.layers.frames import FrameSequence

PolicyName = Literal["LB", "LD", "SM", "SS"]

_SIZES = ("num_frequency_masks", "frequency_width", "num_time_masks", "time_width", "warp_width")
_LEAST = 1e-6  # frames; only a drawn number of exactly 0 comes closer to an end


class SpecAugment(Layer):
    """Sets random channels and random spans of frames to 0, the mean of normalised features.

    Each frequency mask covers f channels from f0, with f uniform in 0 … frequency_width and f0
    uniform in 0 … C - f. Each time mask covers t frames from t0, with t uniform in
    0 … min(time_width, time_share * length) and t0 uniform in 0 … length - t, where length is that
    of the utterance. Outside training, the features do not change. Masks and warps depend only on
    the seed, the step and the position of the utterance in the global batch.

    With `warp_width` W above 0, time is warped before it is masked: a frame c of an utterance of
    more than 2 W frames, uniform in W … length - 1 - W, moves by w, uniform in -W … W. The first
    and the last frame stay, and the frames between are interpolated linearly:

        y[t] = x[t * c / (c + w)]                                                  t <= c + w
        y[t] = x[c + (t - c - w) * (length - 1 - c) / (length - 1 - c - w)]        t > c + w

    The paper warps by a spline through these three points; linear pieces are the usual
    approximation of it.

    Shapes:
      x: features [B, T, C]
      returns: features of the same shape
    Raises:
      ValueError: a width or a number of masks is negative, or time_share is not in [0, 1].
    Source: Park et al. 2019, sections 2 and 3.1; `spec_augment` returns its policies. Its time
      warping, W = 80 (LB, LD) or 40 (SM, SS), is the costliest part and adds least (section 5).
    """

    class Params(Layer.Params):
        """Params of SpecAugment."""

        num_frequency_masks: int = param("Frequency masks per utterance.", default=1)
        frequency_width: int = param("Most channels of a mask (F).", default=15)
        num_time_masks: int = param("Time masks per utterance.", default=1)
        time_width: int = param("Most frames of a mask (T).", default=50)
        time_share: float = param("Most frames, as a share of the utterance (p).", default=1.0)
        warp_width: int = param("Most frames that time is warped by (W); 0: none.", default=0)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        for name in _SIZES:
            if getattr(p, name) < 0:
                raise ValueError(f"SpecAugment: {name} is {getattr(p, name)}, must be at least 0")
        if not 0.0 <= p.time_share <= 1.0:
            raise ValueError(f"SpecAugment: time_share is {p.time_share}, must be in [0, 1]")

    def fprop(self, theta: Theta, x: FrameSequence, ctx: StepContext) -> FrameSequence:
        """See the class."""
        del theta
        if not ctx.is_training:
            return x
        p, y = self.params, x.features
        batch, length, channels = y.shape
        if p.warp_width:
            y = self._warped(y, x.lengths, ctx)
        if p.num_frequency_masks:
            size = tf.ones([batch, 1], tf.int32) * channels
            widest = tf.minimum(size, p.frequency_width)
            kept = self._kept(ctx, "frequency", size, widest, p.num_frequency_masks, channels)
            y = y * tf.cast(tf.expand_dims(kept, 1), y.dtype)
        if p.num_time_masks:
            size = tf.expand_dims(x.lengths, 1)
            share = tf.cast(tf.floor(tf.cast(size, tf.float32) * p.time_share), tf.int32)
            widest = tf.minimum(share, p.time_width)
            kept = self._kept(ctx, "time", size, widest, p.num_time_masks, length)
            y = y * tf.cast(tf.expand_dims(kept, 2), y.dtype)
        return FrameSequence(y, x.lengths)

    def _warped(self, y: tf.Tensor, lengths: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """Returns features whose time is warped; see the class.

        Shapes:
          y: [B, T, C]; lengths: [B]
        """
        batch, length, _ = y.shape
        width = float(self.params.warp_width)
        last = tf.expand_dims(tf.cast(lengths, tf.float32), 1) - 1.0
        center = width + ctx.uniform(self, [batch, 1], "warp_center") * (last - 2.0 * width)
        moved = center + (2.0 * ctx.uniform(self, [batch, 1], "warp_by") - 1.0) * width
        place = tf.expand_dims(tf.range(length, dtype=tf.float32), 0)
        before = place * center / tf.maximum(moved, _LEAST)
        after = last - (last - place) * (last - center) / tf.maximum(last - moved, _LEAST)
        source = tf.where(place <= moved, before, after)
        inside = (last >= 2.0 * width) & (place <= last)
        source = tf.where(inside, tf.clip_by_value(source, 0.0, tf.maximum(last, 0.0)), place)
        first = tf.floor(source)
        share = tf.cast(tf.expand_dims(source - first, 2), y.dtype)
        first = tf.cast(first, tf.int32)
        y = ctx.constrain(y, ("batch", None, None))
        low = tf.gather(y, first, batch_dims=1)
        high = tf.gather(y, tf.minimum(first + 1, length - 1), batch_dims=1)
        return ctx.constrain(low + share * (high - low), ("batch", None, None))

    def _kept(
        self,
        ctx: StepContext,
        name: str,
        size: tf.Tensor,
        widest: tf.Tensor,
        num_masks: int,
        length: int,
    ) -> tf.Tensor:
        """Returns which places no mask covers.

        Shapes:
          size, widest: [B, 1] int32
          returns: bool [B, length]
        """
        shape = [size.shape[0], num_masks]
        width = _whole(ctx.uniform(self, shape, f"{name}_width"), widest)
        start = _whole(ctx.uniform(self, shape, f"{name}_start"), size - width)
        place = tf.reshape(tf.range(length), [1, 1, length])
        first, end = tf.expand_dims(start, 2), tf.expand_dims(start + width, 2)
        return tf.reduce_all((place < first) | (place >= end), 1)


def _whole(drawn: tf.Tensor, largest: tf.Tensor) -> tf.Tensor:
    """Returns whole numbers uniform in 0 … largest from numbers uniform in [0, 1)."""
    scaled = drawn * tf.cast(largest + 1, tf.float32)
    return tf.minimum(tf.cast(tf.floor(scaled), tf.int32), largest)


def spec_augment(policy: PolicyName) -> SpecAugment.Params:
    """Returns Params of a policy for 80 channels, as published, without time warping.

    LB and LD are for LibriSpeech (basic, double), SM and SS for Switchboard (mild, strong).
    Source: Park et al. 2019, table 1.
    """
    frequency_width, time_width, time_share, masks = {
        "LB": (27, 100, 1.0, 1),
        "LD": (27, 100, 1.0, 2),
        "SM": (15, 70, 0.2, 2),
        "SS": (27, 70, 0.2, 2),
    }[policy]
    return SpecAugment.Params(
        num_frequency_masks=masks,
        frequency_width=frequency_width,
        num_time_masks=masks,
        time_width=time_width,
        time_share=time_share,
    )
