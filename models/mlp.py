"""A multilayer perceptron: maps features to class scores, or to any other numbers."""

from __future__ import annotations

import functools
import math
from typing import Any

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.initializers import HeNormal, Initializer
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.pieces import Flow, Piece
from tekso.framework.primitives.activations import Activation
from tekso.framework.theta import Theta
from tekso.models.layers.dropout import Dropout
from tekso.models.layers.linear import Linear
from tekso.models.layers.lora import Lora
from tekso.models.layers.projections import ADAPTER_DOC


class Mlp(Layer):
    """Linear layers with an activation and dropout between them.

    Shapes:
      x: [batch, ...], numbers of any type; the product of the other dims is input_dim
      returns: [batch, output_dim], dtype of the weights
    Weights:
      layers/0/w, …: [input size, output size], dims ("embed", "mlp") and ("mlp", "embed")
        alternately; the output dim of the last is "classes"
      layers/0/b, …: [output size]; starts at 0
    Raises:
      ValueError: a size is not positive; the number of features of x is not input_dim.
    Source:
      Init: He et al. 2015, eq. 10.
    """

    class Params(Layer.Params):
        """Params of Mlp."""

        input_dim: int = param("Number of features of an example.", default=REQUIRED)
        output_dim: int = param("Number of outputs.", default=REQUIRED)
        hidden_dims: list[int] = param(
            "Sizes of the hidden layers; empty: a linear model.", default=[128]
        )
        activation: Activation = param("Applied to the hidden layers.", default="relu")
        dropout_rate: float = param("Dropout of the hidden layers.", default=0.0)
        init: Initializer.Params = param("Initializer of all matrices.", default=HeNormal.Params())
        adapter: Lora.Params | None = param(ADAPTER_DOC, default=None)

    layers: list[Linear]
    dropouts: list[Dropout]

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        sizes = [p.input_dim, *p.hidden_dims, p.output_dim]
        if min(sizes) < 1:
            raise ValueError(f"Mlp: sizes {sizes} (input, hidden, output) must be at least 1")
        last = len(p.hidden_dims)
        names = [("embed", "mlp")[i % 2] for i in range(last + 1)] + ["classes"]
        layers = [
            Linear.Params(
                dtype=p.dtype,
                input_dim=sizes[i],
                output_dim=sizes[i + 1],
                init=p.init,
                activation=p.activation if i < last else "identity",
                dims=(names[i], names[i + 1]),
                adapter=p.adapter,
            )
            for i in range(last + 1)
        ]
        self.child_list("layers", layers)
        self.child_list("dropouts", [Dropout.Params(rate=p.dropout_rate)] * last)

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """See the class."""
        for i in range(len(self.layers)):
            x = self._fprop_layer(i, theta, x, ctx)
        return x

    def pieces(self) -> list[Piece]:
        """Returns one piece per layer; the last returns the output of `fprop` as "x"."""
        pieces = []
        for i, layer in enumerate(self.layers):
            layers: dict[str, Layer] = {f"layers/{i}": layer}
            if i < len(self.dropouts):
                layers[f"dropouts/{i}"] = self.dropouts[i]
            pieces.append(Piece(f"layers/{i}", layers, functools.partial(self._run_layer, i)))
        return pieces

    def _run_layer(self, i: int, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        return {**flow, "x": self._fprop_layer(i, theta, flow["x"], ctx)}

    def _fprop_layer(self, i: int, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        if i == 0:
            x = tf.cast(self._flat(x), theta.layers[0].w.dtype)
        layer = self.layers[i]
        x = layer.fprop(theta.layers[i], x, ctx)
        x = ctx.constrain(x, ("batch", layer.params.dims[1]))
        if i == len(self.dropouts):
            return x
        own = ctx.fold(i) if i else ctx  # layers of a list draw the same numbers in one context
        return self.dropouts[i].fprop(theta.dropouts[i], x, own)

    def _flat(self, x: tf.Tensor) -> tf.Tensor:
        x, p = tf.convert_to_tensor(x), self.params
        if math.prod(x.shape[1:]) != p.input_dim:
            raise ValueError(
                f"Mlp: x is {list(x.shape)}, so an example has {math.prod(x.shape[1:])} features, "
                f"but input_dim is {p.input_dim}"
            )
        if x.shape.rank != 2:
            x = tf.reshape(x, [-1, p.input_dim])
        return x
