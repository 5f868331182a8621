"""ConvNorm3D: a convolution of volumes, a normalisation and an activation."""

from __future__ import annotations

from tekso.framework.initializers import HeNormal, Initializer
from tekso.framework.params import REQUIRED, param
from tekso.framework.primitives.activations import Activation
from tekso.framework.primitives.windows import Padding
from tekso.models.layers.conv_norm import ConvNormBase
from tekso.models.layers.convolution_3d import Conv3D
from tekso.models.layers.normalization import BatchNorm, Norm


class ConvNorm3D(ConvNormBase):
    """y = activation(norm(conv(x))) of volumes; the convolution has no bias.

    Shapes:
      x: [batch, depth, height, width, input_dim]
      returns: [batch, new depth, new height, new width, output_dim]; see `output_size`
    Children:
      conv: Conv3D; norm
    """

    class Params(ConvNormBase.Params):
        """Params of ConvNorm3D."""

        input_dim: int = param("Number of channels of the input.", default=REQUIRED)
        output_dim: int = param("Number of channels of the output.", default=REQUIRED)
        kernel_shape: tuple[int, int, int] = param(
            "Depth, height and width of the kernel.", default=(3, 3, 3)
        )
        strides: tuple[int, int, int] = param(
            "Steps of the window: depth, height, width.", default=(1, 1, 1)
        )
        padding: Padding = param("See Conv2D.", default="SAME")
        num_groups: int = param("Number of channel groups, convolved separately.", default=1)
        norm: Norm.Params = param("Normalisation.", default=BatchNorm.Params())
        init: Initializer.Params = param("Initializer of w.", default=HeNormal.Params())
        activation: Activation = param("Applied to the output.", default="identity")

    convolution = Conv3D
