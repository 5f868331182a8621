"""UNet: labels every pixel; features of every scale skip from the way down to the way up.

    convs ──────────────── skip ─────────────── concat ─ convs ─ 1x1
      └ pool ─ convs ───── skip ──── concat ─ convs ─┘ transposed 2x2
                 └ pool ─ convs ─────┘ transposed 2x2

Source: Ronneberger et al. 2015, "U-Net", figure 1; with padding SAME, so that the output has the
size of the image, and with a normalisation after every convolution.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from tekso.framework import ops
from tekso.framework.context import StepContext
from tekso.framework.layer import Layer
from tekso.framework.params import param
from tekso.framework.pieces import Flow, Piece
from tekso.framework.primitives.precision import widen
from tekso.framework.theta import Theta
from tekso.models.image_model import ImageModel
from tekso.models.layers.conv_norm import ConvNorm
from tekso.models.layers.convolution import Conv2D
from tekso.models.layers.convolution_transpose import ConvTranspose2D
from tekso.models.layers.normalization import BatchNorm, Norm
from tekso.models.layers.pooling import MaxPool
from tekso.models.layers.stack import Stack


class UNet(ImageModel):
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

    class Params(ImageModel.Params):
        """Params of UNet."""

        num_scales: int = param("Number of times that the image is halved.", default=4)
        width: int = param("Number of channels at the scale of the image.", default=64)
        convs_per_scale: int = param("Number of 3x3 convolutions of each part.", default=2)
        norm: Norm.Params = param("Normalisation.", default=BatchNorm.Params(epsilon=1e-5))

    down: list[Stack]
    up: list[ConvTranspose2D]
    merge: list[Stack]
    pool: MaxPool
    classifier: Conv2D

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        if min(p.num_scales, p.width, p.convs_per_scale) < 1:
            raise ValueError(
                f"UNet: num_scales {p.num_scales}, width {p.width} and convs_per_scale "
                f"{p.convs_per_scale} must be at least 1"
            )
        widths = [p.width * 2**i for i in range(p.num_scales + 1)]
        self.child_list(
            "down",
            [self._convs(a, b) for a, b in zip([p.channels, *widths], widths, strict=False)],
        )
        self.child("pool", MaxPool.Params())
        steps = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.child_list(
            "up",
            [ConvTranspose2D.Params(input_dim=a, output_dim=b, dtype=p.dtype) for a, b in steps],
        )
        self.child_list("merge", [self._convs(2 * b, b) for _, b in steps])
        classifier = Conv2D.Params(
            dtype=p.dtype, input_dim=p.width, output_dim=p.classes, kernel_shape=(1, 1)
        )
        self.child("classifier", classifier)

    def _convs(self, input_dim: int, output_dim: int) -> Stack.Params:
        p = self.params
        layers: list[Layer.Params] = [
            ConvNorm.Params(
                dtype=p.dtype,
                input_dim=input_dim if i == 0 else output_dim,
                output_dim=output_dim,
                norm=p.norm,
                activation="relu",
            )
            for i in range(p.convs_per_scale)
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
        x = ops.constrain_image(ctx, tf.concat([flow[name], x], -1))
        x = self.merge[i].fprop(theta.merge[i], x, ctx.fold(len(self.down) + i))
        return {**flow, "x": x, name: None}

    def _run_classifier(self, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        return {**flow, "x": widen(self.classifier.fprop(theta.classifier, flow["x"], ctx))}

    def _checked(self, x: tf.Tensor) -> tf.Tensor:
        factor = 2**self.params.num_scales
        if x.shape[1] % factor or x.shape[2] % factor:
            raise ValueError(
                f"UNet: x is {x.shape}, but height and width must be multiples of {factor}: "
                f"num_scales is {self.params.num_scales}"
            )
        return x
