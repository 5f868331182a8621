"""RecurrentDecoder: the recurrent layers of a decoder with attention to a source.

    "context" (GNMT)                              "attentional" (Luong)

    layer 2   [·, context] ─► y                              ┌───────────── fed at t + 1
    layer 1   [·, context] ─► ·                   layer 2    · ─► · ─► attention ─► y
    layer 0   [x, fed] ─► · ─► attention          layer 1    · ─► ·
                 ▲               │                layer 0    [x, fed] ─► ·
                 └─ fed at t + 1 ┴─ context

With "context", the first layer is the query of the attention, and all layers get the context. Only
the first layer and the attention are one loop. Every further layer is a separate loop, with its
input products computed before the loop, and may run on another device. With "attentional", the
attentional vector of the last layer is fed to the first layer, so all layers are one loop.

Legend: B sources, K hypotheses per source, N = B * K, T target length, S source length,
D input_dim, M memory_dim.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.theta import Theta
from tekso.models.layers.attentive_recurrent import Attended, AttentiveRecurrent
from tekso.models.layers.dropout import Dropout
from tekso.models.layers.recurrent import Recurrent, side_by_side, with_residual
from tekso.models.layers.recurrent_cells import LstmCell, RecurrentCell
from tekso.models.layers.sizes import with_sizes
from tekso.models.layers.source_attention import AdditiveAttention, Memory, SourceAttention


class RecurrentDecoder(Layer):
    """Recurrent layers over a target with attention to a source; see the module docstring.

    With residual "add", a layer above the first adds the output of the layer below to its own
    output if their sizes agree.

    Shapes:
      decode: x [B, T, D], encoded [B, S, M], mask bool [B, T, S], reset bool [B, T]
        returns Attended: output [B, T, output_dim], context [B, T, M], probabilities [B, T, S]
      step, one time step: x [N, D], mask bool [B, S]; the fields are [N, …]
    Children:
      attentive: the layers that are one loop with the attention
      layers: the other layers, in order; none with input_feeding "attentional"
    Raises:
      ValueError: there are no layers; or there is one layer with input_feeding "context" and output
        "state", so that the output would not depend on the context of its time step.
    Source:
      "context": Wu et al. 2016 (GNMT), section 3; with output "state_and_context" Chen et al. 2018
      (RNMT+), section 3. "attentional": Luong et al. 2015, section 3.3.
    """

    class Params(Layer.Params):
        """Params of RecurrentDecoder."""

        input_dim: int = param("Size of the last dim of the input.", default=REQUIRED)
        memory_dim: int = param("Size of the last dim of the source.", default=REQUIRED)
        num_layers: int = param("Number of layers.", default=REQUIRED)
        cell: RecurrentCell.Params = param(
            "The cell of every layer; the decoder sets its input_dim.", default=LstmCell.Params()
        )
        attention: SourceAttention.Params = param(
            "The attention; the decoder sets its sizes.", default=AdditiveAttention.Params()
        )
        input_feeding: Literal["context", "attentional"] = param(
            "What is fed back: the context, which all layers get, or the attentional vector.",
            default="context",
        )
        output: Literal["state", "state_and_context"] = param(
            "The last layer's output, or its concatenation with the context.", default="state"
        )
        residual: Literal["none", "add"] = param(
            "Whether to add a layer's input to its output.", default="none"
        )
        dropout_rate: float = param(
            "Dropout of the fed vector and of the input of every layer above the first.",
            default=0.0,
        )

    attentive: AttentiveRecurrent
    layers: list[Recurrent]
    dropout: Dropout

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        feeds_context = p.input_feeding == "context"
        if p.num_layers < 1:
            raise ValueError(f"RecurrentDecoder: num_layers is {p.num_layers}, must be at least 1")
        if p.num_layers == 1 and feeds_context and p.output == "state":
            raise ValueError(
                "RecurrentDecoder: with one layer, input_feeding='context' and output='state', the "
                "output does not depend on the context of its time step; set num_layers to at "
                "least 2, output='state_and_context', or input_feeding='attentional'"
            )
        self.child(
            "attentive",
            AttentiveRecurrent.Params(
                input_dim=p.input_dim,
                memory_dim=p.memory_dim,
                num_layers=1 if feeds_context else p.num_layers,
                cell=p.cell,
                attention=p.attention,
                feed=p.input_feeding,
                residual=p.residual,
                dropout_rate=p.dropout_rate,
            ),
        )
        above = p.num_layers - 1 if feeds_context else 0
        size = self.attentive.output_dim
        cell = with_sizes(p.cell, input_dim=size + p.memory_dim)
        self.child_list("layers", [Recurrent.Params(cell=cell)] * above)
        self.child("dropout", Dropout.Params(rate=p.dropout_rate))

    @property
    def output_dim(self) -> int:
        """Size of the last dim of the output."""
        size = self.attentive.output_dim
        return size + self.params.memory_dim if self._shows_context else size

    @property
    def _shows_context(self) -> bool:
        return bool(self.params.output == "state_and_context")

    def decode(
        self,
        theta: Theta,
        x: tf.Tensor,
        ctx: StepContext,
        *,
        encoded: tf.Tensor,
        mask: tf.Tensor | None = None,
        reset: tf.Tensor | None = None,
    ) -> Attended:
        """Runs over all time steps of x; for the arguments see `AttentiveRecurrent.decode`.

        Shapes:
          x: [B, T, D], encoded: [B, S, M], mask: bool [B, T, S], reset: bool [B, T]
        """
        found = self.attentive.decode(
            theta.attentive, x, ctx, encoded=encoded, mask=mask, reset=reset
        )
        y = found.output
        for i in range(len(self.layers)):
            y = self.fprop_layer(i, theta, y, found.context, ctx, reset=reset)
        return dataclasses.replace(found, output=self.fprop_output(y, found.context, ctx))

    def fprop_layer(
        self,
        index: int,
        theta: Theta,
        x: tf.Tensor,
        context: tf.Tensor,
        ctx: StepContext,
        *,
        reset: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Returns the output of one of `layers`, whose weights must be in theta.

        Shapes:
          x: [B, T, output of the layer below], context: [B, T, M], reset: bool [B, T]
          returns: shape of x
        """
        given = self._given(index, x, context, ctx)
        y = self.layers[index].fprop(theta.layers[str(index)], given, ctx, reset=reset)
        return with_residual(x, y, self.params.residual)

    def fprop_output(self, x: tf.Tensor, context: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """Returns the decoder's output for the output x of its last layer: [..., output_dim]."""
        return side_by_side(x, context, ctx) if self._shows_context else x

    def _given(self, index: int, x: tf.Tensor, context: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """Returns the input of a layer: x and context, concatenated, with dropout."""
        return self.dropout.fprop(Theta(), side_by_side(x, context, ctx), ctx.fold(index))

    def zero_state(
        self, batch_size: int, dtype: tf.DType | None = None, *, source_length: int | None = None
    ) -> dict[str, Any]:
        """Returns the state before the first step; see `AttentiveRecurrent.zero_state`."""
        layers = [layer.zero_state(batch_size, dtype) for layer in self.layers]
        attentive = self.attentive.zero_state(batch_size, dtype, source_length=source_length)
        return {"attentive": attentive, "layers": layers}

    def constrained(self, state: dict[str, Any], ctx: StepContext) -> dict[str, Any]:
        """Returns a state with sharding constraints, as a loop over `step` begins with it."""
        layers = [
            {name: ctx.constrain(v, layer.cell.state_dims[name]) for name, v in own.items()}
            for layer, own in zip(self.layers, state["layers"], strict=True)
        ]
        attentive = self.attentive.constrained(state["attentive"], ctx)
        return {"attentive": attentive, "layers": layers}

    def memory(self, theta: Theta, encoded: tf.Tensor, ctx: StepContext) -> Memory:
        """Returns keys and values of the sources [B, S, M], for `step`."""
        return self.attentive.attention.memory(theta.attentive.attention, encoded, ctx)

    def step(
        self,
        theta: Theta,
        x: tf.Tensor,
        state: dict[str, Any],
        ctx: StepContext,
        *,
        memory: Memory,
        mask: tf.Tensor | None = None,
    ) -> tuple[Attended, dict[str, Any]]:
        """Computes one time step; all steps together equal `decode`.

        Shapes:
          x: [N, D], state: [N, …], memory: [B, …], mask: bool [B, S]
          returns: the outputs of one time step, and the next state
        """
        own = theta.attentive
        gates = self.attentive.project_inputs(own, x, ctx)
        gates = ctx.constrain(gates, ("batch", None, "mlp"))
        found, attentive = self.attentive.step(
            own, gates, state["attentive"], ctx, memory=memory, mask=mask
        )
        y, states = found.output, []
        for i, layer in enumerate(self.layers):
            given = self._given(i, y, found.context, ctx)
            z, after = layer.step(theta.layers[str(i)], given, state["layers"][i], ctx)
            y = with_residual(y, z, self.params.residual)
            states.append(after)
        output = self.fprop_output(y, found.context, ctx)
        return dataclasses.replace(found, output=output), {"attentive": attentive, "layers": states}
