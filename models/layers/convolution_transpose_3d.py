"""ConvTranspose3D: the transpose of a strided convolution, which enlarges volumes."""

from __future__ import annotations

from tekso.framework.initializers import HeNormal, Initializer
from tekso.framework.params import REQUIRED, param
from tekso.framework.primitives.activations import Activation
from tekso.models.layers.convolution_transpose import ConvTransposeBase


class ConvTranspose3D(ConvTransposeBase):
    """The transpose of a convolution of volumes; see `ConvTranspose2D`.

    Shapes:
      x: [batch, depth, height, width, input_dim]
      returns: [batch, depth * stride, height * stride, width * stride, output_dim], dtype of w
    Weights:
      w: [kernel depth, kernel height, kernel width, input_dim, output_dim],
        dims (None, None, None, "in_channels", "out_channels")
      b: [output_dim], dims ("out_channels",); starts at 0
    Raises:
      ValueError: a size is below 1, or the last dim of x is not input_dim.
    """

    class Params(ConvTransposeBase.Params):
        """Params of ConvTranspose3D."""

        input_dim: int = param("Number of channels of the input.", default=REQUIRED)
        output_dim: int = param("Number of channels of the output.", default=REQUIRED)
        kernel_shape: tuple[int, int, int] = param(
            "Depth, height and width of the kernel.", default=(2, 2, 2)
        )
        strides: tuple[int, int, int] = param(
            "Factors on depth, height and width.", default=(2, 2, 2)
        )
        use_bias: bool = param("Whether to add a bias.", default=True)
        init: Initializer.Params = param("Initializer of w.", default=HeNormal.Params())
        activation: Activation = param("Applied to the output.", default="identity")
