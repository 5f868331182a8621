"""U-Nets label every pixel or voxel; features of every scale skip from the way down to the way up.

    convs ──────────────── skip ─────────────── concat ─ convs ─ 1x1
      └ pool ─ convs ───── skip ──── concat ─ convs ─┘ transposed 2x2
                 └ pool ─ convs ─────┘ transposed 2x2

Source: Ronneberger et al. 2015, "U-Net", figure 1; of volumes, Çiçek et al. 2016, "3D U-Net",
figure 2. With padding SAME, so that the output has the size of the image, and with a normalisation
after every convolution.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import tensorflow as tf

from tekso.framework import window_ops
from tekso.framework.context import StepContext
from tekso.framework.layer import Layer
from tekso.framework.params import param
from tekso.framework.pieces import Flow, Piece
from tekso.framework.primitives.precision import widen
from tekso.framework.primitives.windows import spatial_dims
from tekso.framework.theta import Theta
from tekso.models.image_model import ImageModel
from tekso.models.layers.conv_norm import ConvNorm
from tekso.models.layers.conv_norm_3d import ConvNorm3D
from tekso.models.layers.convolution import Conv2D
from tekso.models.layers.convolution_3d import Conv3D
from tekso.models.layers.convolution_transpose import ConvTranspose2D
from tekso.models.layers.convolution_transpose_3d import ConvTranspose3D
from tekso.models.layers.normalization import BatchNorm, Norm
from tekso.models.layers.pooling import MaxPool, MaxPool3D, PoolBase
from tekso.models.layers.stack import Stack


class UNetBase(ImageModel):
    """Base of the U-Nets, of images or volumes: the pieces, and how they run.

    Shapes:
      x: [batch, *spatial, channels], numbers of any type; 2 ** num_scales divides every spatial dim
      returns: logits [batch, *spatial, classes], float32 or wider
    Children:
      down/0 … num_scales: Stacks of convolutions; up/0 …: transposed convolutions; merge/0 …:
      Stacks of convolutions; classifier: a convolution of 1 element
    """

    class Params(ImageModel.Params):
        """Params of UNetBase."""

    layers_of: ClassVar[tuple[Any, Any, Any, Any]]
    """Classes: convolution, convolution with norm, transposed convolution, pooling."""

    up_keeps_width: ClassVar[bool] = False
    """Whether transposed convolutions have as many outputs as inputs, and no bias."""

    down: list[Stack]
    up: list[Any]
    merge: list[Stack]
    pool: PoolBase
    classifier: Any

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p, name = self.params, type(self).__name__
        if min(p.num_scales, p.width, p.convs_per_scale) < 1:
            raise ValueError(
                f"{name}: num_scales {p.num_scales}, width {p.width} and convs_per_scale "
                f"{p.convs_per_scale} must be at least 1"
            )

    def _build(self, down: Sequence[Sequence[int]]) -> None:
        """Adds the children.

        Args:
          down: for every scale, the channels of its input and of the outputs of its convolutions.
        """
        p, (conv, _, transposed, pool) = self.params, self.layers_of
        self.child_list("down", [self._convs(channels) for channels in down])
        self.child("pool", pool.Params())
        skips = [channels[-1] for channels in down]
        ups, merges = [], []
        for below, skip in zip(skips[:0:-1], skips[-2::-1], strict=True):
            outputs = below if self.up_keeps_width else skip
            up = transposed.Params(dtype=p.dtype, input_dim=below, output_dim=outputs)
            ups.append(up.set(use_bias=not self.up_keeps_width))
            merges.append(self._convs([skip + outputs, *[skip] * p.convs_per_scale]))
        self.child_list("up", ups)
        self.child_list("merge", merges)
        self.child(
            "classifier",
            conv.Params(
                dtype=p.dtype,
                input_dim=skips[0],
                output_dim=p.classes,
                kernel_shape=(1,) * self.num_spatial_dims,
            ),
        )

    def _convs(self, channels: Sequence[int]) -> Stack.Params:
        p = self.params
        layers: list[Layer.Params] = [
            self.layers_of[1].Params(
                dtype=p.dtype, input_dim=a, output_dim=b, norm=p.norm, activation="relu"
            )
            for a, b in itertools.pairwise(channels)
        ]
        return Stack.Params(num_layers=len(layers), layers=layers)

    def pieces(self) -> list[Piece]:
        """Returns one piece per scale on the way down and on the way up, and the classifier."""
        down = [
            Piece(
                f"down/{i}",
                {f"down/{i}": convs, "pool": self.pool},
                functools.partial(self._run_down, i),
            )
            for i, convs in enumerate(self.down)
        ]
        up = [
            Piece(
                f"up/{i}",
                {f"up/{i}": self.up[i], f"merge/{i}": self.merge[i]},
                functools.partial(self._run_up, i),
            )
            for i in range(len(self.up))
        ]
        head: dict[str, Layer] = {"classifier": self.classifier}
        return [*down, *up, Piece("classifier", head, self._run_classifier)]

    def _run_down(self, i: int, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        if i == 0:
            x = self._checked(self.images(flow["x"], ctx))
        else:
            x = self.pool.fprop(theta.pool, flow["x"], ctx)
        x = self.down[i].fprop(theta.down[i], x, ctx.fold(i))
        skip = {f"skip{i}": x} if i < len(self.up) else {}
        return {**flow, **skip, "x": x}

    def _run_up(self, i: int, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        name = f"skip{len(self.up) - 1 - i}"
        x = self.up[i].fprop(theta.up[i], flow["x"], ctx)
        x = window_ops.concat_channels(ctx, [flow[name], x])
        x = self.merge[i].fprop(theta.merge[i], x, ctx.fold(len(self.down) + i))
        return {**flow, "x": x, name: None}

    def _run_classifier(self, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        return {**flow, "x": widen(self.classifier.fprop(theta.classifier, flow["x"], ctx))}

    def _checked(self, x: tf.Tensor) -> tf.Tensor:
        factor = 2**self.params.num_scales
        if any(size % factor for size in x.shape[1:-1]):
            *rest, last = spatial_dims(self.num_spatial_dims)
            raise ValueError(
                f"{type(self).__name__}: x is {x.shape}, but {', '.join(rest)} and {last} must be "
                f"multiples of {factor}: num_scales is {self.params.num_scales}"
            )
        return x


class UNet(UNetBase):
    """A U-Net; see the module. The width doubles with every scale.

    Shapes:
      x: [batch, height, width, channels], numbers of any type; 2 ** num_scales divides height and
        width
      returns: logits [batch, height, width, classes], float32 or wider
    Children:
      down/0 … num_scales: Stacks of ConvNorm; up/0 …: ConvTranspose2D, 2x2; merge/0 …: Stacks of
      ConvNorm; classifier: Conv2D, 1x1
    Raises:
      ValueError: a size is below 1, or the height or width of x is not divisible.
    Source: Ronneberger et al. 2015.
    """

    class Params(UNetBase.Params):
        """Params of UNet."""

        num_scales: int = param("Number of times that the image is halved.", default=4)
        width: int = param("Number of channels at the scale of the image.", default=64)
        convs_per_scale: int = param("Number of 3x3 convolutions of each part.", default=2)
        norm: Norm.Params = param("Normalisation.", default=BatchNorm.Params(epsilon=1e-5))

    layers_of = (Conv2D, ConvNorm, ConvTranspose2D, MaxPool)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        widths = [p.width * 2**i for i in range(p.num_scales + 1)]
        inputs = [p.channels, *widths]
        down = [[a, *[b] * p.convs_per_scale] for a, b in zip(inputs, widths, strict=False)]
        self._build(down)


class UNet3D(UNetBase):
    """A U-Net of volumes.

    The width doubles in the last convolution of every scale on the way down, so before pooling.
    Transposed convolutions keep the width and have no bias. On a mesh, any of depth, height and
    width may be sharded.

    Shapes:
      x: [batch, depth, height, width, channels], numbers of any type; 2 ** num_scales divides
        depth, height and width
      returns: logits [batch, depth, height, width, classes], float32 or wider
    Children:
      down/0 … num_scales: Stacks of ConvNorm3D; up/0 …: ConvTranspose3D, 2x2x2; merge/0 …: Stacks
      of ConvNorm3D; classifier: Conv3D, 1x1x1
    Raises:
      ValueError: a size is below 1, or a spatial dim of x is not divisible.
    Source: Çiçek et al. 2016, figure 2.
    """

    class Params(UNetBase.Params):
        """Params of UNet3D."""

        num_scales: int = param("Number of times that the volume is halved.", default=3)
        width: int = param("Number of channels after the first convolution.", default=32)
        convs_per_scale: int = param("Number of 3x3x3 convolutions of each part.", default=2)
        norm: Norm.Params = param("Normalisation.", default=BatchNorm.Params(epsilon=1e-5))

    layers_of = (Conv3D, ConvNorm3D, ConvTranspose3D, MaxPool3D)
    num_spatial_dims = 3
    up_keeps_width = True

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        widths = [p.width * 2**i for i in range(p.num_scales + 2)]
        inputs = [p.channels, *widths[1:]]
        down = [
            [a, *[b] * (p.convs_per_scale - 1), c]
            for a, b, c in zip(inputs, widths, widths[1:], strict=False)
        ]
        self._build(down)
