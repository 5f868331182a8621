"""Residual blocks of image models: two 3x3 convolutions, or a bottleneck of 1x1, 3x3 and 1x1.

    basic                                    bottleneck (v1.5)
    x ─┬─ 3x3 (stride) ─ 3x3 ── + ─ relu     x ─┬─ 1x1 ─ 3x3 (stride) ─ 1x1 ── + ─ relu
       └───── shortcut ─────────┘               └────────── shortcut ──────────┘

Every convolution is followed by a normalisation, and all but the last also by a ReLU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tekso.framework import ops, window_ops
from tekso.framework.context import StepContext
from tekso.framework.initializers import Zeros
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.theta import Theta
from tekso.models.layers.conv_norm import ConvNorm
from tekso.models.layers.drop_path import DropPath
from tekso.models.layers.normalization import BatchNorm, Norm
from tekso.models.layers.sizes import with_sizes
from tekso.models.layers.squeeze_excite import SqueezeExcite

BATCH_NORM = BatchNorm.Params(epsilon=1e-5, decay=0.9)
"""The normalisation of the published networks: He et al. 2016, MLPerf 0.6."""


class ResidualBlock(Layer):
    """Base of the blocks: y = relu(shortcut(x) + drop_path(squeeze_excite(branch(x)))).

    The shortcut is the identity, or a strided 1x1 convolution with a normalisation if the block
    has a stride or changes the number of channels. The scale of the branch's last normalisation
    starts at 0 (Goyal et al. 2017, section 5.1), so the block starts as its shortcut.

    Shapes:
      x: [batch, height, width, input_dim]
      returns: [batch, ceil(height / stride), ceil(width / stride), output_dim]
    Children:
      convs/0, convs/1, …; shortcut, squeeze_excite (if any): see the class
    """

    class Params(Layer.Params):
        """Params of ResidualBlock."""

        input_dim: int = param("Number of channels of the input.", default=REQUIRED)
        width: int = param("Number of channels of the 3x3 convolutions.", default=REQUIRED)
        stride: int = param("Steps of the 3x3 convolution, in both dims.", default=1)
        norm: Norm.Params = param("Normalisation after every convolution.", default=BATCH_NORM)
        squeeze_excite: SqueezeExcite.Params | None = param(
            "Scales the channels of the branch.", default=None
        )
        drop_path_rate: float = param("Probability of dropping the branch.", default=0.0)

    EXPANSION = 1
    """Channels of the output per channel of the 3x3 convolutions."""

    convs: list[ConvNorm]
    shortcut: ConvNorm
    squeeze_excite: SqueezeExcite
    drop_path: DropPath

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        convs = self.branch()
        if "scale_init" in convs[-1].norm:
            convs[-1].norm.set(scale_init=Zeros.Params())
        self.child_list("convs", convs)
        if p.stride != 1 or p.input_dim != self.output_dim:
            self.child("shortcut", self.unit(p.input_dim, self.output_dim, 1, p.stride))
        if p.squeeze_excite is not None:
            squeeze = with_sizes(p.squeeze_excite, dim=self.output_dim)
            self.child("squeeze_excite", squeeze.set(dtype=p.dtype))
        self.child("drop_path", DropPath.Params(rate=p.drop_path_rate))

    @property
    def output_dim(self) -> int:
        """Number of channels of the output."""
        return int(self.params.width) * self.EXPANSION

    def branch(self) -> list[ConvNorm.Params]:
        """Returns the Params of the convolutions of the branch."""
        raise NotImplementedError(f"{type(self).__name__} has no branch()")

    def unit(
        self, input_dim: int, output_dim: int, kernel: int, stride: int = 1, **changes: Any
    ) -> ConvNorm.Params:
        """Returns Params of a convolution with the dtype and the normalisation of this block."""
        p = self.params
        return ConvNorm.Params(
            dtype=p.dtype,
            input_dim=input_dim,
            output_dim=output_dim,
            kernel_shape=(kernel, kernel),
            strides=(stride, stride),
            padding="FIXED",
            norm=p.norm.copy(),
            **changes,
        )

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """See the class."""
        y = x
        for i, conv in enumerate(self.convs):
            y = conv.fprop(theta.convs[i], y, ctx)
        if self.params.squeeze_excite is not None:
            y = self.squeeze_excite.fprop(theta.squeeze_excite, y, ctx)
        if "shortcut" in theta:
            x = self.shortcut.fprop(theta.shortcut, x, ctx)
        y = x + self.drop_path.fprop(theta.drop_path, y, ctx)
        return window_ops.constrain_image(ctx, ops.activate(ctx, "relu", y))


class BasicBlock(ResidualBlock):
    """A residual block of two 3x3 convolutions; the first has the stride.

    Shapes:
      x: [batch, height, width, input_dim]
      returns: [batch, ceil(height / stride), ceil(width / stride), width]
    Source: He et al. 2016, "Deep residual learning", figure 5, left.
    """

    class Params(ResidualBlock.Params):
        """Params of BasicBlock."""

    def branch(self) -> list[ConvNorm.Params]:
        """See ResidualBlock."""
        p = self.params
        return [
            self.unit(p.input_dim, p.width, 3, p.stride, activation="relu"),
            self.unit(p.width, p.width, 3),
        ]


class BottleneckBlock(ResidualBlock):
    """A residual block of 1x1, 3x3 and 1x1 convolutions; the 3x3 has the stride ("v1.5").

    Shapes:
      x: [batch, height, width, input_dim]
      returns: [batch, ceil(height / stride), ceil(width / stride), 4 * width]
    Source: He et al. 2016, figure 5, right, which has the stride in the first 1x1; in the 3x3:
      Goyal et al. 2017, MLPerf 0.6.
    """

    class Params(ResidualBlock.Params):
        """Params of BottleneckBlock."""

        num_groups: int = param("Channel groups of the 3x3 (ResNeXt: 32).", default=1)

    EXPANSION = 4

    def branch(self) -> list[ConvNorm.Params]:
        """See ResidualBlock."""
        p = self.params
        groups = {"num_groups": p.num_groups}
        return [
            self.unit(p.input_dim, p.width, 1, activation="relu"),
            self.unit(p.width, p.width, 3, p.stride, activation="relu", **groups),
            self.unit(p.width, self.output_dim, 1),
        ]


def block_groups(
    block: ResidualBlock.Params, num_blocks: Sequence[int], width: int, strides: Sequence[int]
) -> list[ResidualBlock.Params]:
    """Returns the Params of the blocks of a residual network, whose width doubles by group.

    Args:
      block: Params of every block.
      num_blocks: number of blocks of each group.
      width: width of the first group, and number of channels of the input.
      strides: stride of the first block of each group.
    """
    blocks, input_dim = [], width
    for group, (count, stride) in enumerate(zip(num_blocks, strides, strict=True)):
        for i in range(count):
            own = with_sizes(block, input_dim=input_dim, width=width * 2**group)
            blocks.append(own.set(stride=stride if i == 0 else 1))
            input_dim = own.width * own.owner.EXPANSION
    return blocks
