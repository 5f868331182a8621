"""Positions that are added to embeddings: learned or sinusoidal.

Positions have one of three forms: None (0, 1, 2, … along the length), a NumPy array known at
tracing, or a tensor (packed texts, decoding).

Legend: B batch, T length, D dim.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework import ops, workarounds
from tekso.framework.context import StepContext
from tekso.framework.initializers import Initializer, Normal
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.theta import Theta
from tekso.models.layers.masking import Array, check_size


class PositionsBase(Layer):
    """Adds a vector of its position to every element of a sequence.

    Shapes:
      x: [B, T, D]
      positions: [T] or [B, T] int; None: 0, 1, 2, …
      returns: [B, T, D], dtype of x
    """

    class Params(Layer.Params):
        """Params of a layer that adds positions."""

        dim: int = param("Size of the last dim of input and output.", default=REQUIRED)

    def fprop(
        self, theta: Theta, x: tf.Tensor, ctx: StepContext, *, positions: Array | None = None
    ) -> tf.Tensor:
        """See the class."""
        raise NotImplementedError(f"{type(self).__name__} has no fprop()")

    def check_length(self, length: int) -> None:
        """Checks that there are `length` positions, for positions that are tensors.

        Raises:
          ValueError: there are fewer positions.
        """


class LearnedPositions(PositionsBase):
    """Adds a learned vector per position.

    Shapes:
      x: [B, T, D], positions: [T] or [B, T] int; None: 0, 1, 2, …
      returns: [B, T, D], dtype of x
    Weights:
      w: [max_length, dim], dims ("positions", "embed")
    Raises:
      ValueError: the input is longer than max_length. Positions given as a tensor are not checked;
        use `check_length`.
    Source: Gehring et al. 2017, section 3.1.
    """

    class Params(PositionsBase.Params):
        """Params of LearnedPositions."""

        max_length: int = param("Number of positions.", default=REQUIRED)
        init: Initializer.Params = param("Initializer of w.", default=Normal.Params(stddev=0.02))

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        self.weight("w", [p.max_length, p.dim], dims=("positions", "embed"), init=p.init)

    def fprop(
        self, theta: Theta, x: tf.Tensor, ctx: StepContext, *, positions: Array | None = None
    ) -> tf.Tensor:
        """See the class."""
        if positions is None:
            last, vectors = x.shape[1] - 1, theta.w[: x.shape[1]]
        else:
            last = positions.max() if isinstance(positions, np.ndarray) else 0
            vectors = ops.lookup(ctx, theta.w, tf.convert_to_tensor(positions))
        self.check_length(last + 1)
        return x + tf.cast(vectors, x.dtype)

    def check_length(self, length: int) -> None:
        """See PositionsBase."""
        if length > self.params.max_length:
            raise ValueError(
                f"{self.path or type(self).__name__}: position {length - 1} is needed, but only "
                f"{self.params.max_length} are learned; increase max_length, or shorten the texts "
                "(in translation: task.translator.search.max_length)"
            )


class SinusoidalPositions(PositionsBase):
    """Adds sines (first half of the dims) and cosines (second half) of geometric wavelengths.

    Angle i of position t is t / min * (max / min) ** (-i / (D/2 - 1)), with both timescales.

    Shapes:
      x: [B, T, D], positions: [T] or [B, T] int; None: 0, 1, 2, …
      returns: [B, T, D], dtype of x
    Source: Vaswani et al. 2017, section 3.5, in the order of tensor2tensor and Lingvo.
    """

    class Params(PositionsBase.Params):
        """Params of SinusoidalPositions."""

        min_timescale: float = param("Shortest wavelength / 2 pi, in positions.", default=1.0)
        max_timescale: float = param("Longest wavelength / 2 pi, in positions.", default=1e4)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        if self.params.dim % 2:
            raise ValueError(f"SinusoidalPositions: dim {self.params.dim} is odd, must be even")

    def fprop(
        self, theta: Theta, x: tf.Tensor, ctx: StepContext, *, positions: Array | None = None
    ) -> tf.Tensor:
        """See the class."""
        p = self.params
        half = p.dim // 2
        step = math.log(p.max_timescale / p.min_timescale) / max(half - 1, 1)
        rates = np.exp(-step * np.arange(half)) / p.min_timescale
        sine, cosine = sines(np.arange(x.shape[1]) if positions is None else positions, rates)
        halves = [tf.cast(half, x.dtype) for half in (sine, cosine)]
        dims = ("batch", "length", None)[-halves[0].shape.rank :]
        return x + workarounds.concat(ctx, halves, -1, dims=dims)


def sines(positions: Array, rates: np.ndarray) -> tuple[Array, Array]:
    """Returns sine and cosine of position times rate, in float32.

    Shapes:
      positions: [...] int, rates: [N]
      returns: two of [..., N]; NumPy arrays if the positions are
    Raises:
      ValueError: the NumPy arrays would be too large.
    """
    if isinstance(positions, np.ndarray):
        check_size("position", positions.size, "wavelength", rates.size)
        angles = np.expand_dims(positions, -1) * rates
        return np.sin(angles).astype(np.float32), np.cos(angles).astype(np.float32)
    angles = tf.expand_dims(tf.cast(positions, tf.float32), -1) * rates.astype(np.float32)
    return tf.sin(angles), tf.cos(angles)
