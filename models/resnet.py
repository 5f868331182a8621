"""ResNet v1.5: residual networks for images.

    stem ─ num_blocks[0] blocks ─ num_blocks[1] blocks … ─ mean over the image ─ linear

The width doubles from one group of blocks to the next, and the first block of every group but the
first has stride 2.

    depth   block        num_blocks      trainable weights, 1,000 classes
    18      basic        2, 2, 2, 2      11,689,512
    34      basic        3, 4, 6, 3      21,797,672
    50      bottleneck   3, 4, 6, 3      25,557,032
    101     bottleneck   3, 4, 23, 3     44,549,160
    152     bottleneck   3, 8, 36, 3     60,192,808

Source: He et al. 2016, "Deep residual learning for image recognition", table 1. The stride is in
the 3x3 convolution of a bottleneck, the scale of each block's last normalisation starts at 0, and
padding does not depend on the size of the image, as in MLPerf and PyTorch.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.initializers import Initializer, Normal
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.pieces import Flow, Piece, of_layers
from tekso.framework.theta import Theta
from tekso.models.image_model import PooledImageModel
from tekso.models.layers.conv_norm import ConvNorm
from tekso.models.layers.drop_path import linear_rates
from tekso.models.layers.pooling import MaxPool
from tekso.models.layers.residual_blocks import (
    BATCH_NORM,
    BasicBlock,
    BottleneckBlock,
    ResidualBlock,
    block_groups,
)
from tekso.models.layers.sizes import with_sizes

DEPTHS = {
    18: (BasicBlock, [2, 2, 2, 2]),
    34: (BasicBlock, [3, 4, 6, 3]),
    50: (BottleneckBlock, [3, 4, 6, 3]),
    101: (BottleneckBlock, [3, 4, 23, 3]),
    152: (BottleneckBlock, [3, 8, 36, 3]),
}
"""{depth: (block, number of blocks in each group)} of the published networks."""


class Stem(Layer):
    """The first layer: a convolution, and pooling for large images.

    Shapes:
      x: [batch, height, width, input_dim]
      returns: [batch, new height, new width, output_dim]; by default a fourth of height and width
    Children:
      conv: ConvNorm
    """

    class Params(Layer.Params):
        """Params of Stem."""

        input_dim: int = param("Number of channels of the input.", default=REQUIRED)
        output_dim: int = param("Number of channels of the output.", default=REQUIRED)
        conv: ConvNorm.Params = param(
            "The convolution.",
            default=ConvNorm.Params(
                kernel_shape=(7, 7),
                strides=(2, 2),
                padding="FIXED",
                norm=BATCH_NORM,
                activation="relu",
            ),
        )
        pool: MaxPool.Params | None = param(
            "Pooling after the convolution; None: none.",
            default=MaxPool.Params(window_shape=(3, 3), padding="FIXED"),
        )

    conv: ConvNorm
    pool: MaxPool

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        conv = with_sizes(p.conv, input_dim=p.input_dim, output_dim=p.output_dim)
        self.child("conv", conv.set(dtype=p.dtype))
        if p.pool is not None:
            self.child("pool", p.pool)

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """See the class."""
        x = self.conv.fprop(theta.conv, x, ctx)
        return x if self.params.pool is None else self.pool.fprop(theta.pool, x, ctx)


SMALL_STEM = Stem.Params(
    conv=ConvNorm.Params(kernel_shape=(3, 3), norm=BATCH_NORM, activation="relu"), pool=None
)
"""The stem for images of 28 to 64 pixels: a 3x3 convolution of stride 1, without pooling."""


class ResNet(PooledImageModel):
    """A residual network for images; see the module.

    Shapes:
      x: [batch, height, width, channels], numbers of any type, any height and width
      returns: logits [batch, classes], float32 or wider; without a classifier, features [batch,
        height / n, width / n, feature_dim]
    Children:
      stem; blocks/0, blocks/1, …; classifier: Linear, dims ("channels", "classes")
    Raises:
      ValueError: num_blocks is empty or has a number below 1.
    Source: He et al. 2016, table 1; Goyal et al. 2017, section 5.1 (stride, initial values).
    """

    class Params(PooledImageModel.Params):
        """Params of ResNet."""

        num_blocks: list[int] = param(
            "Number of blocks of each group; see DEPTHS.", default=[3, 4, 6, 3]
        )
        width: int = param("Width of the first group; doubles from group to group.", default=64)
        stem: Stem.Params = param(
            "First layer; SMALL_STEM for small images.", default=Stem.Params()
        )
        block: ResidualBlock.Params = param("Every block.", default=BottleneckBlock.Params())
        drop_path_rate: float = param(
            "Stochastic depth of the last block; increases linearly from 0 in the first.",
            default=0.0,
        )
        dropout_rate: float = param("Dropout before the classifier.", default=0.0)
        classifier_init: Initializer.Params = param(
            "Initializer of the classifier.", default=Normal.Params(stddev=0.01)
        )

    has_features = True
    stem: Stem
    blocks: list[ResidualBlock]

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        if not p.num_blocks or min(p.num_blocks) < 1:
            raise ValueError(f"ResNet: num_blocks is {p.num_blocks}: every group needs a block")
        stem = with_sizes(p.stem, input_dim=p.channels, output_dim=p.width)
        self.child("stem", stem.set(dtype=p.dtype))
        strides = [1] + [2] * (len(p.num_blocks) - 1)
        blocks = block_groups(p.block.copy().set(dtype=p.dtype), p.num_blocks, p.width, strides)
        rates = linear_rates(p.drop_path_rate, len(blocks))
        for block, rate in zip(blocks, rates, strict=True):
            block.set(drop_path_rate=rate)
        self.child_list("blocks", blocks)
        if p.classes is not None:
            self.classify_pooled(self.feature_dim, p.classifier_init, p.dropout_rate)

    @property
    def feature_dim(self) -> int:
        """Number of channels of the last block."""
        return self.blocks[-1].output_dim

    def pieces(self) -> list[Piece]:
        """Returns the stem, one piece per block, and the classifier."""
        head = [] if self.params.classes is None else [self.classifier_piece()]
        return [
            Piece("stem", {"stem": self.stem}, self._run_stem),
            *of_layers("blocks", self.blocks, self._run_block),
            *head,
        ]

    def _run_stem(self, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        x = self.images(flow["x"], ctx)
        return {**flow, "x": self.stem.fprop(theta.stem, x, ctx)}

    def _run_block(self, i: int, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        return {**flow, "x": self.blocks[i].fprop(theta.blocks[i], flow["x"], ctx.fold(i))}


def resnet(depth: int, **changes: Any) -> ResNet.Params:
    """Returns the Params of a published network.

    Args:
      depth: 18, 34, 50, 101 or 152.
      changes: values of other fields, such as `classes`.

    Raises:
      ValueError: there is no network of this depth.
    """
    if depth not in DEPTHS:
        raise ValueError(f"resnet: depth is {depth}, but must be one of {sorted(DEPTHS)}")
    block, num_blocks = DEPTHS[depth]
    return ResNet.Params(num_blocks=list(num_blocks), block=block.Params()).set(**changes)
