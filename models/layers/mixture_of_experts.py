"""MixtureOfExperts: a feed-forward layer with many experts, one or a few of them per element.

    x [B, T, D] ─ router ─ dispatch ─► [E, B, C, D] ─ experts ─► [E, B, C, D] ─ combine ─► [B, T, D]

If a mesh shards "experts" over an axis, every expert is computed on the device of its weights. The
slots have sharding constraints before and after the all-to-all, with dim names that never compete
for one axis:

    token side   [token_experts, batch, -, embed]   sharded like the batch
    expert side  [experts, expert_batch, -, embed]  sharded like the weights

Legend: B batch, T length, D input_dim, E experts, C slots of an expert in an example.
"""

from __future__ import annotations

from typing import Any, Literal

import tensorflow as tf

from tekso.framework import ops
from tekso.framework.context import StepContext
from tekso.framework.initializers import GlorotUniform, Initializer, Zeros
from tekso.framework.params import REQUIRED, param
from tekso.framework.primitives.activations import Activation
from tekso.framework.theta import Theta
from tekso.models.layers.dropout import Dropout
from tekso.models.layers.expert_routing import Router, SwitchRouter
from tekso.models.layers.feed_forward import FeedForwardBase
from tekso.models.layers.lora import Lora
from tekso.models.layers.projections import ADAPTER_DOC, AdaptedLayer
from tekso.models.layers.sizes import with_sizes


class MixtureOfExperts(FeedForwardBase):
    """Routes every element to the experts that the router chooses, and sums their outputs.

    It can replace FeedForward. If the chosen experts have no slot left (see `capacity_factor` of
    the router), the output is 0, so a Transformer layer passes the element through. Slots and
    losses are computed per example, so the result does not depend on how a batch is divided.

    Decoding: a block of one element is never dropped. In longer blocks, slots are counted from the
    start of each block. With `router.eval_capacity_factor=None`, the result does not depend on how
    a text is divided into blocks.

    Shapes:
      x: [batch, ..., input_dim]
      is_token: bool [batch, ...]; False for padding, which takes no slot and gets 0
      returns: shape and dtype of x
    Weights:
      router/w: [input_dim, num_experts] float32, dims ("embed", None)
      hidden/w, and gate/w of gated experts: [num_experts, input_dim, hidden_dim],
        dims ("experts", "embed", "mlp")
      hidden/b, gate/b: [num_experts, hidden_dim], dims ("experts", "mlp")
      output/w: [num_experts, hidden_dim, input_dim], dims ("experts", "mlp", "embed")
      output/b: [num_experts, input_dim], dims ("experts", "embed")
    Raises:
      ValueError: x has less than two dims.
    Source:
      Fedus et al. 2021 (SwitchRouter); Lepikhin et al. 2020 (TopKRouter); Shazeer 2020 (gated).
    """

    class Params(FeedForwardBase.Params):
        """Params of MixtureOfExperts."""

        num_experts: int = param("Number of experts.", default=REQUIRED)
        router: Router.Params = param(
            "Chooses the experts; the layer sets its sizes.", default=SwitchRouter.Params()
        )
        experts: Literal["plain", "gated"] = param(
            "What an expert computes: plain as FeedForward, gated as GatedFeedForward.",
            default="plain",
        )
        activation: Activation = param(
            "Applied to the hidden layer of plain experts, or to the gate of gated experts.",
            default="relu",
        )
        use_bias: bool = param("Whether to add biases.", default=True)
        expert_adapter: Lora.Params | None = param(
            "Low-rank update of the matrices of every expert, for fine-tuning; None: none.",
            default=None,
        )

    takes_padding = True

    router: Router
    gate: ExpertLinear
    hidden: ExpertLinear
    dropout: Dropout
    output: ExpertLinear

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        sizes = {"input_dim": p.input_dim, "num_experts": p.num_experts}
        self.child("router", with_sizes(p.router, **sizes))
        is_gated = p.experts == "gated"
        expand = ExpertLinear.Params(
            dtype=p.dtype,
            output_dim=p.hidden_dim,
            use_bias=p.use_bias,
            init=p.init,
            expert_adapter=p.expert_adapter,
        )
        expand = with_sizes(expand, **sizes)
        if is_gated:
            self.child("gate", expand.copy().set(activation=p.activation))
        self.child("hidden", expand.copy().set(activation="identity" if is_gated else p.activation))
        self.child("dropout", Dropout.Params(rate=p.dropout_rate))
        self.child(
            "output",
            ExpertLinear.Params(
                dtype=p.dtype,
                num_experts=p.num_experts,
                input_dim=p.hidden_dim,
                output_dim=p.input_dim,
                use_bias=p.use_bias,
                init=p.output_init or p.init,
                dims=("mlp", "embed"),
                expert_adapter=p.expert_adapter,
            ),
        )

    def fprop(
        self, theta: Theta, x: tf.Tensor, ctx: StepContext, *, is_token: tf.Tensor | None = None
    ) -> tf.Tensor:
        """See the class."""
        shape = x.shape.as_list()
        if len(shape) < 2:
            raise ValueError(
                f"{self.path or type(self).__name__}: x is {shape}, must be [batch, ..., input_dim]"
            )
        if len(shape) == 3:
            x = ctx.constrain(x, ("batch", "length", "embed"))
        else:
            x = tf.reshape(x, [shape[0], -1, shape[-1]])
            is_token = None if is_token is None else tf.reshape(is_token, [is_token.shape[0], -1])
        routing = self.router.fprop(theta.router, x, ctx, is_token=is_token)
        dispatch = tf.cast(routing.dispatch, x.dtype)
        slots = self._by_token(tf.einsum("btec,btd->ebcd", dispatch, x), ctx)
        slots = self._by_expert(slots, "embed", ctx)
        slots = self._by_expert(self._compute(theta, slots, ctx), "embed", ctx)
        slots = self._by_token(slots, ctx)
        slots *= tf.cast(tf.expand_dims(routing.weights, -1), x.dtype)
        y = tf.einsum("btec,ebcd->btd", dispatch, slots)
        if len(shape) == 3:
            return ctx.constrain(y, ("batch", "length", "embed"))
        return tf.reshape(y, shape)

    def _compute(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """Returns the experts' outputs for their slots, [E, B, C, D] to the same shape."""
        h = self.hidden.fprop(theta.hidden, x, ctx)
        if self.params.experts == "gated":
            h = self.gate.fprop(theta.gate, x, ctx) * h
        h = self._by_expert(h, "mlp", ctx)
        if ctx.is_training and self.params.dropout_rate:
            # Dropout needs examples on dim 0, because random numbers depend on the example.
            h = tf.transpose(h, [1, 0, 2, 3])
            h = self.dropout.fprop(theta.dropout, h, ctx)
            h = self._by_expert(tf.transpose(h, [1, 0, 2, 3]), "mlp", ctx)
        return self.output.fprop(theta.output, h, ctx)

    def _by_token(self, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        return ctx.constrain(x, ("token_experts", "batch", None, "embed"))

    def _by_expert(self, x: tf.Tensor, last: str, ctx: StepContext) -> tf.Tensor:
        return ctx.constrain(x, ("experts", "expert_batch", None, last))


class ExpertLinear(AdaptedLayer):
    """Projects the last dim with a matrix per expert: y_e = activation(x_e @ w_e + b_e).

    Shapes:
      x: [num_experts, batch, slots, input_dim]
      returns: [num_experts, batch, slots, output_dim], dtype of x
    Weights:
      w: [num_experts, input_dim, output_dim], dims "experts" and `dims`
      b: [num_experts, output_dim], dims "experts" and the last of `dims`; starts at 0
      w_lora_a, w_lora_b: with an adapter, [num_experts, input_dim, rank] and [num_experts, rank,
        output_dim]
    """

    class Params(AdaptedLayer.Params):
        """Params of ExpertLinear."""

        num_experts: int = param("Number of experts.", default=REQUIRED)
        input_dim: int = param("Size of the last dim of the input.", default=REQUIRED)
        output_dim: int = param("Size of the last dim of the output.", default=REQUIRED)
        use_bias: bool = param("Whether to add a bias.", default=True)
        init: Initializer.Params = param(
            "Initializer of w, with the fans of one expert.", default=GlorotUniform.Params()
        )
        activation: Activation = param("Applied to the output.", default="identity")
        dims: tuple[str | None, str | None] = param(
            "Dim names of an expert's matrix: input, output.", default=("embed", "mlp")
        )
        expert_adapter: Lora.Params | None = param(ADAPTER_DOC, default=None)

    adapter_field = "expert_adapter"
    num_separate = 1

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        self.weight(
            "w",
            [p.num_experts, p.input_dim, p.output_dim],
            dims=("experts", *p.dims),
            init=p.init,
            fan_in=p.input_dim,
            fan_out=p.output_dim,
        )
        sizes = [p.num_experts, p.input_dim, p.output_dim]
        self.adapt("w", sizes, dims=("experts", *p.dims))
        if p.use_bias:
            shape = [p.num_experts, p.output_dim]
            self.weight("b", shape, dims=("experts", p.dims[1]), init=Zeros.Params())

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """See the class."""
        y = tf.einsum("ebci,eio->ebco", x, theta.w)
        if self.params.use_bias:
            y += tf.expand_dims(tf.expand_dims(theta.b, 1), 1)
        if (lora := self.lora("w")) is not None:
            if lora.params.dropout_rate and ctx.is_training:
                # Dropout needs examples on dim 0; see MixtureOfExperts.
                x = tf.transpose(x, [1, 0, 2, 3])
                x = ops.dropout(ctx, x, lora.params.dropout_rate, self, "w_lora")
                x = tf.transpose(x, [1, 0, 2, 3])
                x = ctx.constrain(x, ("experts", "expert_batch", None, self.params.dims[0]))
            low = tf.einsum("ebci,eir->ebcr", x, theta.w_lora_a)
            low = ctx.constrain(low, ("experts", "expert_batch", None, None))
            y += lora.scale * tf.einsum("ebcr,ero->ebco", low, theta.w_lora_b)
        return ops.activate(ctx, self.params.activation, y)
