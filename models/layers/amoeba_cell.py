"""Cells of AmoebaNet: five pairwise sums of operations on the outputs of the two cells before.

    previous output ─ ReLU, 1x1, norm ──────────── state 0 ─┐
                                                            ├─ states 2 … 6 ─ concatenation
    output before it ─ identity, or to the same size ─ 1 ───┘

State 2 + i is the sum of two operations, each on an earlier state. In a reduction cell, operations
on states 0 and 1 have stride 2.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import tensorflow as tf

from tekso.framework import ops, window_ops
from tekso.framework.context import StepContext
from tekso.framework.initializers import HeNormal, Initializer
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.primitives.windows import Window
from tekso.framework.theta import Theta
from tekso.models.layers.conv_norm import ConvNorm
from tekso.models.layers.convolution import SeparableConv2D
from tekso.models.layers.drop_path import DropPath
from tekso.models.layers.normalization import BatchNorm, Norm
from tekso.models.layers.pooling import AveragePool, MaxPool
from tekso.models.layers.sizes import with_sizes
from tekso.models.layers.stack import Stack

BATCH_NORM = BatchNorm.Params(epsilon=1e-3, decay=0.9997)
"""The normalisation of the public code."""

INIT = HeNormal.Params()


Kind = Literal["normal", "reduction"]
"""Whether a cell keeps height and width, or halves them."""


class CellTable(NamedTuple):
    """The operations of a cell.

    Attributes:
      operations: names of ten operations, two for each sum.
      inputs: the state that each operation reads.
      outputs: the states that are concatenated.
    """

    operations: tuple[str, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


CELLS = {
    ("B", "normal"): CellTable(
        ("1x1", "max3", "none", "sep3", "1x1", "sep3", "1x1", "none", "avg3", "1x1"),
        (1, 1, 1, 0, 1, 0, 2, 2, 1, 5),
        (0, 3, 4, 6),
    ),
    ("B", "reduction"): CellTable(
        ("max2", "max3", "none", "3x3", "dil2_sep5", "max3", "none", "sep3", "avg3", "1x1"),
        (0, 0, 2, 1, 2, 2, 3, 1, 4, 3),
        (5, 6),
    ),
    ("D", "normal"): CellTable(
        ("1x1", "max3", "none", "1x7_7x1", "1x1", "1x7_7x1", "max3", "none", "avg3", "1x1"),
        (1, 1, 1, 0, 0, 0, 2, 2, 1, 5),
        (0, 3, 4, 6),
    ),
    ("D", "reduction"): CellTable(
        ("max2", "max3", "none", "3x3", "1x7_7x1", "max3", "none", "max2", "avg3", "1x1"),
        (0, 0, 2, 1, 2, 2, 3, 1, 2, 3),
        (4, 5, 6),
    ),
}
"""{(variant, kind): table}. Source: Real et al. 2019, in the form of the public TensorFlow code,
whose normal cell of D concatenates other states than the paper's figure."""


class AmoebaCell(Layer):
    """A cell of AmoebaNet; see the module.

    Shapes:
      x: [batch, height, width, previous_dim]
      before: [batch, height or 2 * height, width or 2 * width, before_dim]
      returns: [batch, height, width, output_dim]; half of height and width with a reduction
    Children:
      first, second: preparation of states 0 and 1; operations/0 … 9
    Source: Real et al. 2019, "Regularized evolution for image classifier architecture search".
    """

    class Params(Layer.Params):
        """Params of AmoebaCell."""

        variant: Literal["B", "D"] = param("Which table of CELLS.", default=REQUIRED)
        kind: Kind = param("Which table of CELLS.", default="normal")
        dim: int = param("Number of channels of every state.", default=REQUIRED)
        previous_dim: int = param("Channels of the previous cell's output.", default=REQUIRED)
        before_dim: int = param("Channels of the output before it.", default=REQUIRED)
        previous_reduced: bool = param(
            "Whether `before` is twice as high and wide as the previous cell's output.",
            default=False,
        )
        prepare_before: Literal["fit", "none"] = param(
            "fit: `before` is brought to the size and channels of state 0; none: it is state 1 as "
            "it is, as in the first cell of the public code.",
            default="fit",
        )
        norm: Norm.Params = param("Normalisation of the convolutions.", default=BATCH_NORM)
        drop_path_rate: float = param(
            "Probability of dropping an operation, except for identities.", default=0.0
        )

    first: Layer
    second: Layer
    operations: list[Layer]
    drop_path: DropPath

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        self.table = CELLS[p.variant, p.kind]
        self.child("first", _relu_conv(p, p.previous_dim, p.dim))
        self.child("second", _second(p))
        dims = [p.dim] * 7
        if p.prepare_before == "none":
            dims[1] = p.before_dim
        operations = [
            _operation(p, name, dims[state], 2 if p.kind == "reduction" and state < 2 else 1)
            for name, state in zip(self.table.operations, self.table.inputs, strict=True)
        ]
        self.child_list("operations", operations)
        self.child("drop_path", DropPath.Params(rate=p.drop_path_rate))

    @property
    def output_dim(self) -> int:
        """Number of channels of the output."""
        return len(self.table.outputs) * int(self.params.dim)

    def fprop(
        self, theta: Theta, x: tf.Tensor, ctx: StepContext, *, before: tf.Tensor | None = None
    ) -> tf.Tensor:
        """See the class; without `before`, x takes its place."""
        states = [
            self.first.fprop(theta.first, x, ctx),
            self.second.fprop(theta.second, x if before is None else before, ctx),
        ]
        for i in range(0, len(self.operations), 2):
            left, right = (self._computed(j, theta, states, ctx.fold(j)) for j in (i, i + 1))
            states.append(left + right)
        return window_ops.concat_channels(ctx, [states[i] for i in self.table.outputs])

    def _computed(
        self, j: int, theta: Theta, states: list[tf.Tensor], ctx: StepContext
    ) -> tf.Tensor:
        operation = self.operations[j]
        y = operation.fprop(theta.operations[j], states[self.table.inputs[j]], ctx)
        if isinstance(operation, Identity):
            return y
        return self.drop_path.fprop(theta.drop_path, y, ctx)


class Identity(Layer):
    """Returns its input.

    Shapes:
      x: any
      returns: x
    """

    class Params(Layer.Params):
        """Params of Identity."""

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """See the class."""
        return x


class ReluConvNorm(ConvNorm):
    """y = norm(conv(relu(x))).

    Shapes:
      x: [batch, height, width, input_dim]
      returns: [batch, new height, new width, output_dim]
    """

    class Params(ConvNorm.Params):
        """Params of ReluConvNorm."""

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """See the class."""
        return super().fprop(theta, ops.activate(ctx, "relu", x), ctx)


class ReluSeparableNorm(Layer):
    """y = norm(pointwise(depthwise(relu(x)))).

    Shapes:
      x: [batch, height, width, input_dim]
      returns: [batch, ceil(height / stride), ceil(width / stride), output_dim]
    Children:
      conv: SeparableConv2D; norm
    """

    class Params(Layer.Params):
        """Params of ReluSeparableNorm."""

        input_dim: int = param("Number of channels of the input.", default=REQUIRED)
        output_dim: int = param("Number of channels of the output.", default=REQUIRED)
        kernel: int = param("Height and width of the kernel.", default=3)
        stride: int = param("Steps of the window in both dims.", default=1)
        dilation: int = param("Distance of the kernel's elements in both dims.", default=1)
        norm: Norm.Params = param("Normalisation.", default=BATCH_NORM)

    conv: SeparableConv2D
    norm: Norm

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        conv = SeparableConv2D.Params(
            dtype=p.dtype,
            input_dim=p.input_dim,
            output_dim=p.output_dim,
            kernel_shape=(p.kernel, p.kernel),
            strides=(p.stride, p.stride),
            dilations=(p.dilation, p.dilation),
            use_bias=False,
        )
        self.child("conv", conv)
        self.child("norm", with_sizes(p.norm, dim=p.output_dim).set(dtype=p.dtype))

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """See the class."""
        x = self.conv.fprop(theta.conv, ops.activate(ctx, "relu", x), ctx)
        return self.norm.fprop(theta.norm, x, ctx)


class FactorizedReduction(Layer):
    """Halves an image: a 1x1 convolution of its even and one of its odd pixels, side by side.

        y = norm(concat(relu(x)[:, 0::2, 0::2] even, relu(x)[:, 1::2, 1::2] odd))

    Pixels outside of the image are 0. Both are computed as one 2x2 convolution of stride 2 whose
    other elements are 0, which also works on a mesh that shards height or width.

    Shapes:
      x: [batch, height, width, input_dim]
      returns: [batch, ceil(height / 2), ceil(width / 2), output_dim]
    Weights:
      even: [1, 1, input_dim, output_dim / 2], rounded down; odd: the rest; dims
        (None, None, "in_channels", "out_channels")
    Children:
      norm
    Source: Zoph et al. 2018, NASNet, appendix A.
    """

    class Params(Layer.Params):
        """Params of FactorizedReduction."""

        input_dim: int = param("Number of channels of the input.", default=REQUIRED)
        output_dim: int = param("Number of channels of the output.", default=REQUIRED)
        norm: Norm.Params = param("Normalisation.", default=BATCH_NORM)
        init: Initializer.Params = param("Initializer of the weights.", default=INIT)

    norm: Norm

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        half = p.output_dim // 2
        for name, size in (("even", half), ("odd", p.output_dim - half)):
            dims = (None, None, "in_channels", "out_channels")
            self.weight(name, [1, 1, p.input_dim, size], dims=dims, init=p.init)
        self.child("norm", with_sizes(p.norm, dim=p.output_dim).set(dtype=p.dtype))

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """See the class."""
        even = tf.pad(theta.even, [(0, 1), (0, 1), (0, 0), (0, 0)])
        odd = tf.pad(theta.odd, [(1, 0), (1, 0), (0, 0), (0, 0)])
        x = ops.activate(ctx, "relu", tf.cast(x, theta.even.dtype))
        window = Window((2, 2), (2, 2), (1, 1), "SAME")
        parts = [window_ops.convolution(ctx, x, w, window=window) for w in (even, odd)]
        return self.norm.fprop(theta.norm, window_ops.concat_channels(ctx, parts), ctx)


def _relu_conv(
    p: Any, input_dim: int, output_dim: int, shape: tuple[int, int] = (1, 1), stride: int = 1
) -> ReluConvNorm.Params:
    """Returns Params of ReLU, convolution and norm; a stride applies to dims that the kernel has.

    Args:
      p: Params of the cell.
      input_dim: channels of the input.
      output_dim: channels of the output.
      shape: of the kernel.
      stride: applies to both dims of a square kernel, and to the long dim of another.
    """
    square = shape[0] == shape[1]
    steps = [stride if square or n > 1 else 1 for n in shape]
    return ReluConvNorm.Params(
        dtype=p.dtype,
        input_dim=input_dim,
        output_dim=output_dim,
        kernel_shape=shape,
        strides=(steps[0], steps[1]),
        norm=p.norm,
    )


def _second(p: Any) -> Layer.Params:
    """Returns Params of the layer that makes state 1 of `before`."""
    if p.prepare_before == "fit" and p.previous_reduced:
        return FactorizedReduction.Params(
            input_dim=p.before_dim, output_dim=p.dim, norm=p.norm, dtype=p.dtype
        )
    if p.prepare_before == "fit" and p.before_dim != p.dim:
        return _relu_conv(p, p.before_dim, p.dim)
    return Identity.Params()


def _operation(p: Any, name: str, input_dim: int, stride: int) -> Layer.Params:
    """Returns Params of an operation from a state with `input_dim` channels to one with p.dim."""
    c, q = p.dim, max(p.dim // 4, 1)
    if name == "none" and stride == 1 and input_dim == c:
        return Identity.Params()
    if name in ("none", "1x1"):
        return _relu_conv(p, input_dim, c, stride=stride)
    if name in ("max2", "max3", "avg3"):
        kind, size = (MaxPool if name[:3] == "max" else AveragePool), int(name[3])
        pool: Layer.Params = kind.Params(window_shape=(size, size), strides=(stride, stride))
        if input_dim == c:
            return pool
        fit = ConvNorm.Params(
            dtype=p.dtype, input_dim=input_dim, output_dim=c, kernel_shape=(1, 1), norm=p.norm
        )
        return Stack.Params(num_layers=2, layers=[pool, fit])
    if name in ("sep3", "dil2_sep5"):
        last = ReluSeparableNorm.Params(
            dtype=p.dtype,
            input_dim=c,
            output_dim=c,
            kernel=int(name[-1]),
            dilation=2 if name.startswith("dil2") else 1,
            norm=p.norm,
        )
        first = last.copy().set(input_dim=input_dim, stride=stride)
        return Stack.Params(num_layers=2, layers=[first, last])
    if name == "3x3":
        units: list[Layer.Params] = [_relu_conv(p, q, q, (3, 3), stride)]
    else:  # "1x7_7x1"
        units = [_relu_conv(p, q, q, (1, 7), stride), _relu_conv(p, q, q, (7, 1), stride)]
    units = [_relu_conv(p, input_dim, q), *units, _relu_conv(p, q, c)]
    return Stack.Params(num_layers=len(units), layers=units)
