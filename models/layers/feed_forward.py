"""Feed-forward layers of a Transformer: standard and gated."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.initializers import GlorotUniform, Initializer
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.primitives.activations import Activation
from tekso.framework.theta import Theta
from tekso.models.layers.dropout import Dropout
from tekso.models.layers.linear import Linear
from tekso.models.layers.lora import Lora
from tekso.models.layers.projections import ADAPTER_DOC


class FeedForwardBase(Layer):
    """Base of the feed-forward layers: [batch, ..., input_dim] to the same shape.

    Shapes:
      x: [batch, ..., input_dim]
      is_token: bool [batch, ...], only if `takes_padding`; False for padding
      returns: shape and dtype of x
    """

    class Params(Layer.Params):
        """Params of a feed-forward layer."""

        input_dim: int = param("Size of the last dim of input and output.", default=REQUIRED)
        hidden_dim: int = param("Size of the hidden layer.", default=REQUIRED)
        dropout_rate: float = param("Dropout of the hidden layer.", default=0.0)
        init: Initializer.Params = param(
            "Initializer of all matrices.", default=GlorotUniform.Params()
        )
        output_init: Initializer.Params | None = param(
            "Initializer of the output matrix; None: `init`.", default=None
        )

    takes_padding = False
    """Whether fprop takes `is_token`, because the output depends on which elements are padding."""


class FeedForward(FeedForwardBase):
    """y = dropout(activation(x @ w1 + b1)) @ w2 + b2.

    Shapes:
      x: [batch, ..., input_dim]
      returns: shape and dtype of x
    Weights:
      hidden/w: [input_dim, hidden_dim], dims ("embed", "mlp"); hidden/b: [hidden_dim]
      output/w: [hidden_dim, input_dim], dims ("mlp", "embed"); output/b: [input_dim]
    Source: Vaswani et al. 2017, eq. 2.
    """

    class Params(FeedForwardBase.Params):
        """Params of FeedForward."""

        activation: Activation = param("Applied to the hidden layer.", default="relu")
        use_bias: bool = param("Whether to add biases.", default=True)
        adapter: Lora.Params | None = param(ADAPTER_DOC, default=None)

    hidden: Linear
    dropout: Dropout
    output: Linear

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        self.child("hidden", _expand(p, p.activation))
        self.child("dropout", Dropout.Params(rate=p.dropout_rate))
        self.child("output", _contract(p))

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """See the class."""
        h = _constrained(self.hidden.fprop(theta.hidden, x, ctx), ctx)
        h = self.dropout.fprop(theta.dropout, h, ctx)
        return self.output.fprop(theta.output, h, ctx)


class GatedFeedForward(FeedForwardBase):
    """y = dropout(activation(x @ w_gate + b_gate) * (x @ w1 + b1)) @ w2 + b2.

    With activation "sigmoid" it is GLU, "identity" Bilinear, "relu" ReGLU, "gelu" GEGLU and
    "swish" SwiGLU. It has three matrices: for the same number of weights as FeedForward, set
    hidden_dim to 2/3 of FeedForward's.

    Shapes:
      x: [batch, ..., input_dim]
      returns: shape and dtype of x
    Weights:
      gate/w, hidden/w: [input_dim, hidden_dim], dims ("embed", "mlp")
      gate/b, hidden/b: [hidden_dim]
      output/w: [hidden_dim, input_dim], dims ("mlp", "embed"); output/b: [input_dim]
    Source: Shazeer 2020, "GLU variants improve Transformer", eqs. 5 and 6.
    """

    class Params(FeedForwardBase.Params):
        """Params of GatedFeedForward."""

        activation: Activation = param("Applied to the gate.", default="swish")
        use_bias: bool = param("Whether to add biases.", default=False)
        adapter: Lora.Params | None = param(ADAPTER_DOC, default=None)

    gate: Linear
    hidden: Linear
    dropout: Dropout
    output: Linear

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        self.child("gate", _expand(p, p.activation))
        self.child("hidden", _expand(p, "identity"))
        self.child("dropout", Dropout.Params(rate=p.dropout_rate))
        self.child("output", _contract(p))

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """See the class."""
        gate = self.gate.fprop(theta.gate, x, ctx)
        h = _constrained(gate * self.hidden.fprop(theta.hidden, x, ctx), ctx)
        h = self.dropout.fprop(theta.dropout, h, ctx)
        return self.output.fprop(theta.output, h, ctx)


def _constrained(h: tf.Tensor, ctx: StepContext) -> tf.Tensor:
    """Adds a sharding constraint to a hidden layer, [batch, length, mlp] or [batch, ..., mlp]."""
    between = h.shape.rank - 2
    return ctx.constrain(h, ("batch", *(("length",) if between == 1 else [None] * between), "mlp"))


def _expand(p: Any, activation: Activation) -> Linear.Params:
    return Linear.Params(
        dtype=p.dtype,
        input_dim=p.input_dim,
        output_dim=p.hidden_dim,
        use_bias=p.use_bias,
        init=p.init,
        activation=activation,
        dims=("embed", "mlp"),
        adapter=p.adapter,
    )


def _contract(p: Any) -> Linear.Params:
    return Linear.Params(
        dtype=p.dtype,
        input_dim=p.hidden_dim,
        output_dim=p.input_dim,
        use_bias=p.use_bias,
        init=p.output_init or p.init,
        dims=("mlp", "embed"),
        adapter=p.adapter,
    )
