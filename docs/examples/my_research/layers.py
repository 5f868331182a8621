"""A layer that Tekso does not have."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.initializers import Zeros
from tekso.framework.theta import Theta
from tekso.models.layers.feed_forward import FeedForwardBase
from tekso.models.layers.linear import Linear


class BlendedFeedForward(FeedForwardBase):
    """A feed-forward layer whose units learn how they are activated.

    y = (s * relu(h)**2 + (1 - s) * tanh(h)) @ w2,  h = x @ w1,  s = sigmoid(blend)

    Shapes:
      x: [batch, length, input_dim]
      returns: shape and dtype of x
    Weights:
      blend: [hidden_dim], dims ("mlp",); starts at 0, half of each
      hidden/w: [input_dim, hidden_dim], output/w: [hidden_dim, input_dim]
    """

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        self.weight("blend", [p.hidden_dim], dims=("mlp",), init=Zeros.Params())
        into = Linear.Params(input_dim=p.input_dim, output_dim=p.hidden_dim, dims=("embed", "mlp"))
        back = Linear.Params(input_dim=p.hidden_dim, output_dim=p.input_dim, dims=("mlp", "embed"))
        self.child("hidden", into.set(use_bias=False, init=p.init))
        self.child("output", back.set(use_bias=False, init=p.init))

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """See the class."""
        h = self.hidden.fprop(theta.hidden, x, ctx)
        share = tf.sigmoid(theta.blend)
        h = share * tf.square(tf.nn.relu(h)) + (1 - share) * tf.tanh(h)
        return self.output.fprop(theta.output, h, ctx)
