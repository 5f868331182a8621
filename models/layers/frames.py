"""Frames of audio features: sequences of several lengths in one tensor, normalised and stacked.

Legend: B batch, T frames, C channels.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.primitives.precision import widen
from tekso.framework.theta import Theta


@dataclasses.dataclass(frozen=True)
class FrameSequence:
    """Features of a batch of utterances.

    Attributes:
      features: [B, T, C]; the frames of an utterance come first, then padding, which is 0.
      lengths: [B] int32, number of frames of each utterance.
    """

    features: tf.Tensor
    lengths: tf.Tensor

    @property
    def mask(self) -> tf.Tensor:
        """Bool [B, T], False for padding."""
        return frame_mask(self.lengths, self.features.shape[1])

    def with_features(self, features: tf.Tensor) -> FrameSequence:
        """Returns other features of the same frames, in which padding is set to 0.

        Shapes:
          features: [B, T, any]
        """
        kept = tf.where(tf.expand_dims(self.mask, 2), features, tf.zeros_like(features))
        return FrameSequence(kept, self.lengths)


def frame_mask(lengths: tf.Tensor, num_frames: int) -> tf.Tensor:
    """Returns which positions are before the end of a sequence.

    Shapes:
      lengths: [B] int
      returns: bool [B, num_frames]
    """
    places = tf.reshape(tf.range(num_frames, dtype=lengths.dtype), [1, num_frames])
    return places < tf.expand_dims(lengths, 1)


class NormalizeFrames(Layer):
    """Subtracts a mean from every channel and divides by a deviation.

    Of each utterance ("utterance", over its own frames, without padding) or of all data ("global",
    given as Params).

    Shapes:
      x: features [B, T, input_dim]
      returns: features of the same shape
    Raises:
      ValueError: statistics are missing, superfluous or have another number of channels.
    """

    class Params(Layer.Params):
        """Params of NormalizeFrames."""

        input_dim: int = param("Number of channels.", default=REQUIRED)
        statistics: Literal["utterance", "global"] = param(
            "Where mean and deviation come from.", default="utterance"
        )
        mean: list[float] = param("With global: the mean of every channel.", default=[])
        deviation: list[float] = param("With global: the deviation of every channel.", default=[])
        epsilon: float = param("Added to the variance of an utterance.", default=1e-5)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        wanted = p.input_dim if p.statistics == "global" else 0
        for name in ("mean", "deviation"):
            if len(getattr(p, name)) != wanted:
                raise ValueError(
                    f"NormalizeFrames: {name} has {len(getattr(p, name))} values, but statistics "
                    f"{p.statistics!r} needs {wanted}"
                )
        if any(value <= 0 for value in p.deviation):
            raise ValueError(f"NormalizeFrames: deviation must be positive, given {p.deviation}")

    def fprop(self, theta: Theta, x: FrameSequence, ctx: StepContext) -> FrameSequence:
        """See the class."""
        del theta, ctx
        frames, p = x, self.params
        features = widen(frames.features)
        if p.statistics == "global":
            mean, deviation = (np.array(v, np.float32) for v in (p.mean, p.deviation))
            y = (features - mean.reshape(1, 1, -1)) / deviation.reshape(1, 1, -1)
        else:
            kept = tf.cast(tf.expand_dims(frames.mask, 2), features.dtype)
            count = tf.maximum(tf.reduce_sum(kept, 1, keepdims=True), 1.0)
            mean = tf.reduce_sum(features * kept, 1, keepdims=True) / count
            variance = tf.reduce_sum(tf.square(features - mean) * kept, 1, keepdims=True) / count
            y = (features - mean) * tf.math.rsqrt(variance + p.epsilon)
        return frames.with_features(tf.cast(y, frames.features.dtype))


class StackFrames(Layer):
    """Joins `size` consecutive frames to one: frame t gets frames t * size to t * size + size - 1.

    A frame that only some frames of an utterance fill is kept; the others are 0.

    Shapes:
      x: features [B, T, C]
      returns: features [B, ceil(T / size), size * C]
    """

    class Params(Layer.Params):
        """Params of StackFrames."""

        size: int = param("Frames to join.", default=3)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        if self.params.size < 1:
            raise ValueError(f"StackFrames: size is {self.params.size}, must be at least 1")

    def fprop(self, theta: Theta, x: FrameSequence, ctx: StepContext) -> FrameSequence:
        """See the class."""
        del theta, ctx
        size, features = self.params.size, x.features
        batch, length, channels = features.shape
        missing = -length % size
        if missing:
            features = tf.concat(
                [features, tf.zeros([batch, missing, channels], features.dtype)], 1
            )
        features = tf.reshape(features, [batch, (length + missing) // size, size * channels])
        return FrameSequence(features, tf.math.floordiv(x.lengths + (size - 1), size))
