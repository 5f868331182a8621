"""Linear: projects the last dim."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tekso.framework import ops
from tekso.framework.context import StepContext
from tekso.framework.initializers import GlorotUniform, Initializer, Zeros
from tekso.framework.params import REQUIRED, param
from tekso.framework.primitives.activations import Activation
from tekso.framework.theta import Theta
from tekso.models.layers.projections import ProjectionLayer


class Linear(ProjectionLayer):
    """Projects the last dim of the input: y = activation(x @ w + b).

    Shapes:
      x: [..., input_dim]
      returns: [..., output_dim], dtype of x
    Weights:
      w: [input_dim, output_dim], dims `dims`
      b: [output_dim], the last of `dims`
      w_lora_a, w_lora_b: with an adapter (see Lora)
    Raises:
      ValueError: the last dim of x is not input_dim.
    Source:
      Init: Glorot & Bengio 2010, eq. 16.
    """

    class Params(ProjectionLayer.Params):
        """Params of Linear."""

        input_dim: int = param("Size of the last dim of the input.", default=REQUIRED)
        output_dim: int = param("Size of the last dim of the output.", default=REQUIRED)
        use_bias: bool = param("Whether to add a bias.", default=True)
        init: Initializer.Params = param("Initializer of w.", default=GlorotUniform.Params())
        bias_init: Initializer.Params = param("Initializer of b.", default=Zeros.Params())
        activation: Activation = param("Applied to the output.", default="identity")
        dims: tuple[str | None, str | None] = param(
            "Dim names of w: input, output.", default=("embed", "mlp")
        )

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        self.matrix("w", [p.input_dim, p.output_dim], dims=p.dims, init=p.init)
        if p.use_bias:
            self.weight("b", [p.output_dim], dims=p.dims[1:], init=p.bias_init)

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """See the class."""
        y = self.project(theta, "w", x, ctx, theta.b if self.params.use_bias else None)
        return ops.activate(ctx, self.params.activation, y)
