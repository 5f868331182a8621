"""Cells of recurrent layers: LSTM, with or without projection, and GRU.

A cell splits its work: `project_inputs` processes the inputs of all time steps at once, before the
loop, and `step` computes the rest, which needs the state. Gates have a separate dim, so that no
sharded dim has to be split into gates.

Legend: T length, B batch, G gates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import tensorflow as tf

from tekso.framework import ops
from tekso.framework.context import StepContext
from tekso.framework.initializers import GlorotUniform, Initializer, Zeros
from tekso.framework.loops import compiles_loops
from tekso.framework.params import REQUIRED, param
from tekso.framework.primitives.recurrence import lstm
from tekso.framework.theta import Theta
from tekso.models.layers.projections import ProjectionLayer

State = dict[str, tf.Tensor]


class RecurrentCell(ProjectionLayer):
    """Base of the cells.

    The state is a dict of [B, size] tensors; "output" is the output of the last step.

    Shapes:
      project_inputs: x [..., input_dim]; returns gates [..., G, hidden_dim]
      step: gates [B, G, hidden_dim] and the state; returns [B, output_dim] and the next state
    Weights:
      w_input: [input_dim, G, hidden_dim], b: [G, hidden_dim]; used by `project_inputs`
    """

    class Params(ProjectionLayer.Params):
        """Params of a recurrent cell."""

        input_dim: int = param("Size of the last dim of the input.", default=REQUIRED)
        hidden_dim: int = param("Number of units.", default=REQUIRED)
        init: Initializer.Params = param(
            "Initializer of the matrices, with the fans of one gate.",
            default=GlorotUniform.Params(),
        )

    num_gates: int

    @property
    def output_dim(self) -> int:
        """Size of the last dim of the output."""
        return int(self.params.hidden_dim)

    @property
    def state_sizes(self) -> dict[str, int]:
        """Size of the last dim of every tensor of the state."""
        return {"output": self.output_dim}

    @property
    def state_dims(self) -> dict[str, tuple[str, str]]:
        """Names of the two dims of every tensor of the state."""
        return {"output": ("batch", "embed")}

    def zero_state(self, batch_size: int, dtype: tf.DType | None = None) -> State:
        """Returns the state before the first step."""
        dtype = dtype or tf.as_dtype(self.params.dtype)
        return {name: tf.zeros([batch_size, n], dtype) for name, n in self.state_sizes.items()}

    def project_inputs(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """Returns the part of the gates that does not need the state.

        Shapes:
          x: [..., input_dim]
          returns: [..., G, hidden_dim]
        """
        return self.project(theta, "w_input", x, ctx, theta.b)

    def step(
        self, theta: Theta, gates: tf.Tensor, state: State, ctx: StepContext
    ) -> tuple[tf.Tensor, State]:
        """Takes one step.

        Shapes:
          gates: [B, G, hidden_dim], of `project_inputs`
          returns: [B, output_dim], the next state
        """
        raise NotImplementedError(f"{type(self).__name__} has no step()")

    def scan(
        self, theta: Theta, state: State, xs: dict[str, tf.Tensor], ctx: StepContext
    ) -> tuple[State, tf.Tensor]:
        """Runs over time.

        Shapes:
          state: before the first step
          xs: "gates" [T, B, G, hidden_dim], of `project_inputs`; optional bool "mask" and "reset"
            [T, B], as in Recurrent
          returns: the state after the last step, outputs [T, B, output_dim]
        """
        return ops.scan(ctx, self._iteration, theta, state, xs)

    def _iteration(
        self, theta: Theta, state: State, xs: dict[str, tf.Tensor], ctx: StepContext
    ) -> tuple[State, tf.Tensor]:
        if "reset" in xs:
            fresh = tf.expand_dims(xs["reset"], 1)
            state = {name: tf.where(fresh, tf.zeros_like(v), v) for name, v in state.items()}
        y, after = self.step(theta, xs["gates"], state, ctx)
        if "mask" in xs:
            there = tf.expand_dims(xs["mask"], 1)
            y = tf.where(there, y, tf.zeros_like(y))
            after = {name: tf.where(there, after[name], state[name]) for name in state}
        return after, y

    def _unstacked(self, gates: tf.Tensor, ctx: StepContext) -> list[tf.Tensor]:
        """Returns the gates one by one, [B, hidden_dim] each."""
        # Without the constraint, the other operand would determine the sharding of the gates.
        return [ctx.constrain(gate, ("batch", "mlp")) for gate in tf.unstack(gates, axis=1)]

    def _gate_weights(self, name: str, input_dim: int, num_gates: int) -> None:
        p = self.params
        self.matrix(
            name,
            [input_dim, num_gates, p.hidden_dim],
            dims=("embed", None, "mlp"),
            init=p.init,
            fan_in=input_dim,
            fan_out=p.hidden_dim,
        )

    def _biases(self) -> None:
        shape: Sequence[int] = [self.num_gates, self.params.hidden_dim]
        self.weight("b", shape, dims=(None, "mlp"), init=Zeros.Params())


class LstmCell(RecurrentCell):
    """Long short-term memory, optionally with a projected output.

        i, f, g, o = gates of x @ w_input + output @ w_recurrent + b
        memory     = sigmoid(f + forget_bias) * memory + sigmoid(i) * tanh(g)
        output     = (sigmoid(o) * tanh(memory)) @ w_projection

    Shapes:
      x: [..., input_dim], gates: [B, 4, hidden_dim], as in RecurrentCell
      state: {"memory": [B, hidden_dim], "output": [B, output_dim]}
      output: [B, output_dim]; output_dim is projection_dim, or hidden_dim without a projection
    Weights (gates in the order i, f, g, o):
      w_input: [input_dim, 4, hidden_dim], dims ("embed", None, "mlp")
      w_recurrent: [output_dim, 4, hidden_dim], dims ("embed", None, "mlp")
      b: [4, hidden_dim], dims (None, "mlp"); starts at 0
      w_projection: [hidden_dim, projection_dim], dims ("mlp", "embed")
    Source:
      Hochreiter & Schmidhuber 1997; forget gate Gers et al. 2000; projection Sak et al. 2014;
      bias of the forget gate Jozefowicz et al. 2015.
    """

    class Params(RecurrentCell.Params):
        """Params of LstmCell."""

        projection_dim: int | None = param(
            "Size of the output, projected from the units without a bias; None: no projection.",
            default=None,
        )
        forget_bias: float = param("Added to the forget gate.", default=1.0)

    num_gates = 4

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        self._gate_weights("w_input", p.input_dim, self.num_gates)
        self._gate_weights("w_recurrent", self.output_dim, self.num_gates)
        self._biases()
        if p.projection_dim is not None:
            self.matrix(
                "w_projection", [p.hidden_dim, p.projection_dim], dims=("mlp", "embed"), init=p.init
            )

    @property
    def output_dim(self) -> int:
        """Size of the last dim of the output."""
        p = self.params
        return int(p.hidden_dim if p.projection_dim is None else p.projection_dim)

    @property
    def state_sizes(self) -> dict[str, int]:
        """Size of the last dim of every tensor of the state."""
        return {"memory": self.params.hidden_dim, "output": self.output_dim}

    @property
    def state_dims(self) -> dict[str, tuple[str, str]]:
        """Names of the two dims of every tensor of the state."""
        return {"memory": ("batch", "mlp"), "output": ("batch", "embed")}

    def step(
        self, theta: Theta, gates: tf.Tensor, state: State, ctx: StepContext
    ) -> tuple[tf.Tensor, State]:
        """See the class."""
        recurrent = self.project(theta, "w_recurrent", state["output"], ctx)
        output, memory = ops.lstm_update(
            ctx, gates, recurrent, state["memory"], forget_bias=self.params.forget_bias
        )
        if self.params.projection_dim is not None:
            output = self.project(theta, "w_projection", output, ctx)
        return output, {"memory": memory, "output": output}

    def scan(
        self, theta: Theta, state: State, xs: dict[str, tf.Tensor], ctx: StepContext
    ) -> tuple[State, tf.Tensor]:
        """See RecurrentCell."""
        cell = type(self)  # a subclass may change a step
        is_plain = cell.step is LstmCell.step and cell.project is LstmCell.project
        if self.params.adapter is not None or not is_plain or not compiles_loops(ctx, xs["gates"]):
            return super().scan(theta, state, xs, ctx)
        y, memory, output = lstm(
            xs["gates"],
            theta.w_recurrent,
            theta.w_projection if self.params.projection_dim is not None else None,
            state["memory"],
            state["output"],
            flags={name: flag for name, flag in xs.items() if name != "gates"},
            forget_bias=self.params.forget_bias,
            fuse=ctx.fuse,
        )
        return {"memory": memory, "output": output}, y


class GruCell(RecurrentCell):
    """Gated recurrent unit.

        r, z   = sigmoid of the gates of x @ w_input + output @ w_recurrent + b
        new    = tanh(x @ w_input + (r * output) @ w_candidate + b)
        output = z * output + (1 - z) * new

    The formula above applies the reset gate before the candidate's recurrent product ("before").
    With "after", as in cuDNN, it applies to the product:
    tanh(… + r * (output @ w_candidate + b_candidate)).

    Shapes:
      x: [..., input_dim], gates: [B, 3, hidden_dim], as in RecurrentCell
      state: {"output": [B, hidden_dim]}
      output: [B, hidden_dim]
    Weights (gates in the order r, z, new):
      w_input: [input_dim, 3, hidden_dim], dims ("embed", None, "mlp")
      w_recurrent: [hidden_dim, 2, hidden_dim], dims ("embed", None, "mlp")
      w_candidate: [hidden_dim, hidden_dim], dims ("embed", "mlp")
      b: [3, hidden_dim], dims (None, "mlp"); starts at 0
      b_candidate: [hidden_dim], dims ("mlp",); with reset "after" only
    Source: Cho et al. 2014, eqs. 5 to 8.
    """

    class Params(RecurrentCell.Params):
        """Params of GruCell."""

        reset: Literal["before", "after"] = param(
            "Whether the reset gate applies before or after the candidate's recurrent product.",
            default="before",
        )

    num_gates = 3

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        self._gate_weights("w_input", p.input_dim, 3)
        self._gate_weights("w_recurrent", p.hidden_dim, 2)
        self.matrix("w_candidate", [p.hidden_dim, p.hidden_dim], dims=("embed", "mlp"), init=p.init)
        self._biases()
        if p.reset == "after":
            self.weight("b_candidate", [p.hidden_dim], dims=("mlp",), init=Zeros.Params())

    def step(
        self, theta: Theta, gates: tf.Tensor, state: State, ctx: StepContext
    ) -> tuple[tf.Tensor, State]:
        """See the class."""
        before = state["output"]
        x_r, x_z, x_new = self._unstacked(gates, ctx)
        r, z = self._unstacked(self.project(theta, "w_recurrent", before, ctx), ctx)
        r, z = tf.sigmoid(x_r + r), tf.sigmoid(x_z + z)
        if self.params.reset == "before":
            new = tf.tanh(x_new + self.project(theta, "w_candidate", r * before, ctx))
        else:
            new = tf.tanh(
                x_new + r * self.project(theta, "w_candidate", before, ctx, theta.b_candidate)
            )
        output = z * before + (1 - z) * new
        return output, {"output": output}
