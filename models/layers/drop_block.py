"""DropBlock: sets square regions of every channel to 0 in training."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework import window_ops
from tekso.framework.context import StepContext
from tekso.framework.layer import Layer
from tekso.framework.params import param
from tekso.framework.primitives.windows import Window
from tekso.framework.theta import Theta


class DropBlock(Layer):
    """Sets blocks of block_size x block_size elements to 0, so that about `rate` of x becomes 0.

    Blocks lie inside the image; they are drawn for each channel. The other elements are scaled so
    that the mean of the mask of an example is 1. (The paper scales by the mask of the whole batch,
    which would couple examples.) A block is at most as large as the image. As for Dropout, the mask
    depends on the global position of an element, not on devices and micro-batches.

    Shapes:
      x: [batch, height, width, channels]
      returns: shape and dtype of x
    Raises:
      ValueError: the rate is not in [0, 1), or block_size is below 1.
    Source: Ghiasi et al. 2018, "DropBlock", algorithm 1 and eq. 1.
    """

    class Params(Layer.Params):
        """Params of DropBlock."""

        rate: float = param("Share of elements that become 0, in [0, 1).", default=0.0)
        block_size: int = param("Height and width of a block.", default=7)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        if not 0 <= p.rate < 1 or p.block_size < 1:
            raise ValueError(
                f"DropBlock: rate {p.rate} must be in [0, 1), and block_size {p.block_size} at "
                "least 1"
            )

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """See the class."""
        if not ctx.is_training or self.params.rate == 0.0:
            return x
        mask = self._mask(x, ctx)
        # A sum of zeros and ones is exact, so the scale has the same bits in every layout.
        kept = tf.reduce_sum(mask, [1, 2, 3], keepdims=True)
        scale = math.prod(x.shape[1:]) / tf.maximum(kept, 1.0)
        return x * tf.cast(mask * scale, x.dtype)

    def _mask(self, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """Returns 0 in the blocks and 1 elsewhere, float32."""
        height, width = x.shape[1], x.shape[2]
        size = min(self.params.block_size, height, width)
        rows, columns = height - size + 1, width - size + 1
        per_seed = self.params.rate / size**2 * (height * width) / (rows * columns)
        # A seed is in the middle of its block, and there is none near the edges. So a pooling with
        # padding SAME marks the blocks; it also works on a mesh that shards height or width.
        inside = [
            (np.arange(n) >= size // 2) & (np.arange(n) < n - (size - 1) // 2)
            for n in (height, width)
        ]
        allowed = np.outer(*inside)[None, :, :, None]
        uniform = ctx.uniform(self, list(x.shape))
        seeds = tf.cast(uniform < per_seed, tf.float32) * tf.constant(allowed, tf.float32)
        seeds = window_ops.constrain_image(ctx, seeds)
        window = Window((size, size), (1, 1), (1, 1), "SAME")
        return 1 - window_ops.constrain_image(ctx, window_ops.max_pool(ctx, seeds, window))
