"""AttentiveRecurrent: recurrent layers with attention to a source and input feeding.

    time t:   x_t ──────► cell 0 ─► cell 1 ─ … ─► y_t ─► attention ─► context_t ─► fed at t + 1
              fed_t-1 ──►

The layers and the attention depend on each other at every time step, so they are one loop. Products
that do not need the state (of the inputs, and the keys of the source) are computed before the loop,
for all time steps at once. A search runs one iteration of the loop per token.

Legend: B sources, K hypotheses per source, N = B * K, T target length, S source length,
D input_dim, M memory_dim.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import tensorflow as tf

from tekso.framework import ops
from tekso.framework.context import StepContext
from tekso.framework.params import REQUIRED, param
from tekso.framework.theta import Theta
from tekso.models.layers.dropout import Dropout
from tekso.models.layers.projections import ProjectionLayer
from tekso.models.layers.recurrent import with_residual
from tekso.models.layers.recurrent_cells import LstmCell, RecurrentCell
from tekso.models.layers.sizes import with_sizes
from tekso.models.layers.source_attention import AdditiveAttention, Memory, SourceAttention


@dataclasses.dataclass(frozen=True)
class Attended:
    """Outputs of layers with attention to a source.

    Attributes:
      output: [B, T, output_dim], or [N, output_dim] for one time step.
      context: mean of the source weighted by attention, [B, T, M] or [N, M].
      probabilities: attention weights, [B, T, S] or [N, S], float32.
    """

    output: tf.Tensor
    context: tf.Tensor
    probabilities: tf.Tensor


class AttentiveRecurrent(ProjectionLayer):
    """Runs stacked cells and an attention over time.

    At every time step, the last cell's output y is the query of the attention, which returns a
    context. With feed "context", the output is y, and the context is fed to the first cell at the
    next time step. With "attentional", the output is the attentional vector
    tanh(y @ w_output + context @ w_context), and this vector is fed. States and the fed vector
    start at 0.

    With residual "add", a cell above the first with equal input and output sizes returns
    x + cell(x). In training, dropout applies to the fed vector and to the input of every cell above
    the first.

    Shapes:
      decode: x [B, T, D], encoded [B, S, M], mask bool [B, T, S], reset bool [B, T]
        returns Attended: output [B, T, output_dim], context [B, T, M], probabilities [B, T, S]
      step, one time step: gates [N, G, hidden_dim], mask bool [B, S]; the fields are [N, …]
    Weights:
      w_feed: [size of the fed vector, G, hidden_dim], dims ("embed", None, "mlp"); G gates
      w_output: [output of the cell, output_dim], w_context: [M, output_dim], dims ("embed", "mlp");
        only with feed "attentional"; output_dim is then the size of the cell's output
      cells/0/…, attention/…: those of the cells and of the attention
    Source:
      "context": Bahdanau et al. 2015; Wu et al. 2016 (GNMT), section 3.
      "attentional": Luong et al. 2015, sections 3 and 3.3 (input feeding).
    """

    class Params(ProjectionLayer.Params):
        """Params of AttentiveRecurrent."""

        input_dim: int = param("Size of the last dim of the input.", default=REQUIRED)
        memory_dim: int = param("Size of the last dim of the source.", default=REQUIRED)
        num_layers: int = param("Number of cells.", default=1)
        cell: RecurrentCell.Params = param(
            "Every cell; the layer sets its input_dim.", default=LstmCell.Params()
        )
        attention: SourceAttention.Params = param(
            "The attention; the layer sets its sizes.", default=AdditiveAttention.Params()
        )
        feed: Literal["context", "attentional"] = param(
            "Vector of the previous time step that the first cell gets as input.",
            default="context",
        )
        residual: Literal["none", "add"] = param(
            "Whether to add a cell's input to its output.", default="none"
        )
        dropout_rate: float = param(
            "Dropout of the fed vector and of the input of every cell above the first.",
            default=0.0,
        )

    cells: list[RecurrentCell]
    attention: SourceAttention
    dropout: Dropout

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        if p.num_layers < 1:
            raise ValueError(
                f"AttentiveRecurrent: num_layers is {p.num_layers}, must be at least 1"
            )
        cells, input_dim = [], p.input_dim
        for _ in range(p.num_layers):
            cells.append(with_sizes(p.cell, input_dim=input_dim))
            input_dim = cells[-1].instantiate().output_dim
        self.child_list("cells", cells)
        sizes = {"query_dim": self.output_dim, "memory_dim": p.memory_dim}
        self.child("attention", with_sizes(p.attention, **sizes))
        self.child("dropout", Dropout.Params(rate=p.dropout_rate))
        first, init = self.cells[0], p.cell.init
        hidden_dim = first.params.hidden_dim
        self.matrix(
            "w_feed",
            [self._feed_dim, first.num_gates, hidden_dim],
            dims=("embed", None, "mlp"),
            init=init,
            fan_in=self._feed_dim,
            fan_out=hidden_dim,
        )
        if p.feed == "attentional":
            size = self.output_dim
            self.matrix("w_output", [size, size], dims=("embed", "mlp"), init=init)
            self.matrix("w_context", [p.memory_dim, size], dims=("embed", "mlp"), init=init)

    @property
    def output_dim(self) -> int:
        """Size of the last dim of the output."""
        return int(self.cells[-1].output_dim)

    @property
    def _feed_dim(self) -> int:
        return int(self.params.memory_dim if self.params.feed == "context" else self.output_dim)

    def zero_state(
        self, batch_size: int, dtype: tf.DType | None = None, *, source_length: int | None = None
    ) -> dict[str, Any]:
        """Returns the state before the first time step.

        Raises:
          ValueError: the attention uses its previous weights, and source_length is None.
        """
        dtype = dtype or tf.as_dtype(self.params.dtype)
        cells = [cell.zero_state(batch_size, dtype) for cell in self.cells]
        state = {"cells": cells, "fed": tf.zeros([batch_size, self._feed_dim], dtype)}
        if self.attention.uses_previous:
            if source_length is None:
                raise ValueError(
                    f"AttentiveRecurrent.zero_state: {type(self.attention).__name__} needs "
                    "source_length, because the state has the last attention weights"
                )
            state["attended"] = tf.zeros([batch_size, source_length])
        return state

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
        """Runs over all time steps of x.

        Args:
          theta: weights.
          x: the inputs.
          ctx: step context.
          encoded: the source.
          mask: False hides a source element from a time step.
          reset: where True, state and fed vector are set to 0 before the step (a new segment).

        Shapes:
          x: [B, T, D], encoded: [B, S, M], mask: bool [B, T, S], reset: bool [B, T]
        """
        memory = self.attention.memory(theta.attention, encoded, ctx)
        xs = {"gates": self.project_inputs(theta, tf.transpose(x, [1, 0, 2]), ctx)}
        if mask is not None:
            xs["mask"] = tf.transpose(mask, [1, 0, 2])
        if reset is not None:
            xs["reset"] = tf.transpose(reset)
        # The memory is passed like weights: every iteration reads it, and it gets gradients.
        shared = Theta(own=theta, memory=Theta(memory))
        state = self.zero_state(x.shape[0], x.dtype, source_length=encoded.shape[1])
        state = self.constrained(state, ctx)
        _, ys = ops.scan(ctx, self._iteration, shared, state, xs)
        dims = {"output": "embed", "context": "embed", "probabilities": None}
        return Attended(
            **{
                name: ctx.constrain(tf.transpose(ys[name], [1, 0, 2]), ("batch", "length", dim))
                for name, dim in dims.items()
            }
        )

    def project_inputs(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """Returns the part of the first cell's gates that needs no state.

        Shapes:
          x: [..., D]
          returns: [..., G, hidden_dim]
        """
        return self.cells[0].project_inputs(theta.cells["0"], x, ctx)

    def _iteration(
        self, theta: Theta, state: Any, xs: dict[str, tf.Tensor], ctx: StepContext
    ) -> tuple[Any, dict[str, tf.Tensor]]:
        if "reset" in xs:
            fresh = tf.expand_dims(xs["reset"], 1)
            state = tf.nest.map_structure(lambda v: tf.where(fresh, tf.zeros_like(v), v), state)
        found, after = self.step(
            theta.own, xs["gates"], state, ctx, memory=theta.memory, mask=xs.get("mask")
        )
        ys = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
        return after, ys

    def step(
        self,
        theta: Theta,
        gates: tf.Tensor,
        state: Any,
        ctx: StepContext,
        *,
        memory: Memory,
        mask: tf.Tensor | None = None,
    ) -> tuple[Attended, Any]:
        """Computes one time step.

        Args:
          theta: weights.
          gates: result of `project_inputs`.
          state: state from `zero_state` or the previous step.
          ctx: step context of this time step.
          memory: keys and values of the sources, from `attention.memory`.
          mask: False hides a source element.

        Shapes:
          gates: [N, G, hidden_dim], state: [N, …], memory: [B, …], mask: bool [B, S]
          returns: the outputs of one time step, and the next state
        """
        fed = ctx.constrain(state["fed"], ("batch", "embed"))
        fed = self.dropout.fprop(Theta(), fed, ctx)
        gates += self.project(theta, "w_feed", fed, ctx)
        y, after = self.cells[0].step(theta.cells["0"], gates, state["cells"][0], ctx)
        cells = [after]
        for i, cell in enumerate(self.cells[1:], start=1):
            x, weights = ctx.constrain(y, ("batch", "embed")), theta.cells[str(i)]
            given = self.dropout.fprop(Theta(), x, ctx.fold(i))
            gates = cell.project_inputs(weights, given, ctx)
            y, after = cell.step(weights, gates, state["cells"][i], ctx)
            cells.append(after)
            y = with_residual(x, y, self.params.residual)
        context, probabilities = self._attend(theta, y, state.get("attended"), memory, mask, ctx)
        if self.params.feed == "attentional":
            y = tf.tanh(
                self.project(theta, "w_output", y, ctx)
                + self.project(theta, "w_context", context, ctx)
            )
            y = ctx.constrain(y, ("batch", "embed"))
            fed = y
        else:
            fed = context
        next_ = {"cells": cells, "fed": fed}
        if "attended" in state:
            next_["attended"] = ctx.constrain(probabilities, ("batch", None))
        return Attended(y, context, probabilities), next_

    def constrained(self, state: Any, ctx: StepContext) -> Any:
        """Returns a state with sharding constraints, as a loop begins with it."""
        cells = [
            {name: ctx.constrain(v, cell.state_dims[name]) for name, v in own.items()}
            for cell, own in zip(self.cells, state["cells"], strict=True)
        ]
        constrained = {"cells": cells, "fed": ctx.constrain(state["fed"], ("batch", "embed"))}
        if "attended" in state:
            constrained["attended"] = ctx.constrain(state["attended"], ("batch", None))
        return constrained

    def _attend(
        self,
        theta: Theta,
        y: tf.Tensor,
        previous: tf.Tensor | None,
        memory: Memory,
        mask: tf.Tensor | None,
        ctx: StepContext,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Attends with all hypotheses of a source as its queries: [N, …] -> [B, K, …] and back."""
        sources = memory["values"].shape[0]
        k = y.shape[0] // sources
        queries = ctx.constrain(tf.reshape(y, [sources, k, y.shape[-1]]), ("batch", None, None))
        if previous is not None:
            previous = tf.reshape(previous, [sources, k, previous.shape[-1]])
        context, probabilities = self.attention.attend(
            theta.attention, queries, ctx, memory=memory, mask=mask, previous=previous
        )
        context, probabilities = (
            tf.reshape(t, [sources * k, t.shape[-1]]) for t in (context, probabilities)
        )
        return ctx.constrain(context, ("batch", "embed")), probabilities
