"""ResidualAdapter: a small bottleneck after a layer, with weights of one task or one language.

    x ──┬─ norm ─ down ─ activation ─ up ─ +
        └──────────────────────────────────┘

`up` starts at 0, so a model with new adapters begins with exactly the outputs of the model without.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.initializers import Zeros
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.primitives.activations import Activation
from tekso.framework.theta import Theta
from tekso.models.layers.feed_forward import FeedForward
from tekso.models.layers.masking import Array
from tekso.models.layers.normalization import LayerNorm, Norm
from tekso.models.layers.sizes import with_sizes
from tekso.models.layers.transformer import TransformerLayer


class ResidualAdapter(Layer):
    """x + up(activation(down(norm(x)))).

    Shapes:
      x: [batch, ..., dim]
      returns: shape and dtype of x
    Children:
      norm, bottleneck: the two projections; the second one starts at 0
    Source: Houlsby et al. 2019 (arXiv 1902.00751), figure 2; with a norm and after a whole layer:
      Bapna & Firat 2019 (arXiv 1909.08478), section 2.
    """

    class Params(Layer.Params):
        """Params of ResidualAdapter."""

        dim: int = param("Size of the last dim of input and output.", default=REQUIRED)
        hidden_dim: int = param("Size of the bottleneck.", default=64)
        activation: Activation = param("Activation of the bottleneck.", default="relu")
        norm: Norm.Params = param("Normalisation of the input.", default=LayerNorm.Params())

    norm: Norm
    bottleneck: FeedForward

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        self.child("norm", with_sizes(p.norm, dim=p.dim))
        self.child(
            "bottleneck",
            FeedForward.Params(
                input_dim=p.dim,
                hidden_dim=p.hidden_dim,
                activation=p.activation,
                output_init=Zeros.Params(),
            ),
        )

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """See the class."""
        y = self.norm.fprop(theta.norm, x, ctx)
        return x + self.bottleneck.fprop(theta.bottleneck, y, ctx)


class AdaptedTransformerLayer(TransformerLayer):
    """A TransformerLayer with an adapter after it.

    To give every task its own adapters in a stack that tasks share, exclude them from sharing:
    `MultiTask.Params(own=[".*/residual_adapter/.*"])`.

    Shapes:
      as in TransformerLayer
    Children: those of TransformerLayer, and residual_adapter
    """

    class Params(TransformerLayer.Params):
        """Params of AdaptedTransformerLayer."""

        residual_adapter: ResidualAdapter.Params = param(
            "The adapter.", default=ResidualAdapter.Params()
        )

    residual_adapter: ResidualAdapter

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        self.child("residual_adapter", with_sizes(p.residual_adapter, dim=p.dim))

    def _feed_forward(
        self, theta: Theta, x: tf.Tensor, ctx: StepContext, *, mask: Array | None = None
    ) -> tf.Tensor:
        x = super()._feed_forward(theta, x, ctx, mask=mask)
        x = self.residual_adapter.fprop(theta.residual_adapter, x, ctx)
        return ctx.constrain(x, ("batch", "length", "embed"))
