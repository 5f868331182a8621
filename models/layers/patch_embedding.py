"""Images as sequences: projected patches, and a learned token before them."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.initializers import Initializer, LecunNormal, Zeros
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.theta import Theta
from tekso.models.layers.convolution import Conv2D
from tekso.models.layers.lora import Lora
from tekso.models.layers.projections import KERNEL_ADAPTER_DOC


class PatchEmbedding(Layer):
    """Projects the patches of an image, row by row: a convolution whose stride is its kernel.

    Shapes:
      x: [batch, height, width, input_dim]; patch_size divides height and width
      returns: [batch, height / patch_size * width / patch_size, dim]
    Children:
      projection: Conv2D, w [patch_size, patch_size, input_dim, dim] and a bias
    Raises:
      ValueError: patch_size does not divide height or width.
    Source: Dosovitskiy et al. 2021, eq. 1.
    """

    class Params(Layer.Params):
        """Params of PatchEmbedding."""

        input_dim: int = param("Number of channels of the image.", default=REQUIRED)
        dim: int = param("Size of an embedded patch.", default=REQUIRED)
        patch_size: int = param("Height and width of a patch.", default=16)
        init: Initializer.Params = param("Initializer of w.", default=LecunNormal.Params())
        kernel_adapter: Lora.Params | None = param(KERNEL_ADAPTER_DOC, default=None)

    projection: Conv2D

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        projection = Conv2D.Params(
            dtype=p.dtype,
            input_dim=p.input_dim,
            output_dim=p.dim,
            kernel_shape=(p.patch_size, p.patch_size),
            strides=(p.patch_size, p.patch_size),
            padding="VALID",
            init=p.init,
            kernel_adapter=p.kernel_adapter,
        )
        self.child("projection", projection)

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """See the class."""
        size = self.params.patch_size
        if x.shape[1] % size or x.shape[2] % size:
            raise ValueError(
                f"PatchEmbedding: patches of {size} x {size} do not divide an image of "
                f"{x.shape[1]} x {x.shape[2]}"
            )
        x = self.projection.fprop(theta.projection, x, ctx)
        x = ctx.constrain(x, ("batch", None, None, "embed"))
        x = tf.reshape(x, [-1, x.shape[1] * x.shape[2], self.params.dim])
        return ctx.constrain(x, ("batch", "length", "embed"))


class ClassToken(Layer):
    """Puts a learned vector before the first element of every sequence.

    Shapes:
      x: [batch, length, dim]
      returns: [batch, 1 + length, dim], dtype of x
    Weights:
      w: [dim], dims ("embed",), starts at 0
    Source: Dosovitskiy et al. 2021, eq. 1; Devlin et al. 2019.
    """

    class Params(Layer.Params):
        """Params of ClassToken."""

        dim: int = param("Size of the last dim.", default=REQUIRED)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.weight("w", [self.params.dim], dims=("embed",), init=Zeros.Params())

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """See the class."""
        examples = x.shape[0] if x.shape[0] is not None else tf.shape(x)[0]
        token = tf.cast(theta.w, x.dtype) * tf.ones([examples, 1, 1], x.dtype)
        token = ctx.constrain(token, ("batch", None, "embed"))
        x = ctx.constrain(x, ("batch", None, "embed"))
        return ctx.constrain(tf.concat([token, x], 1), ("batch", "length", "embed"))
