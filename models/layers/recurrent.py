"""Recurrent layers: a cell over time, bidirectional layers, and stacks.

Legend: B batch, T length, D input_dim.
"""

from __future__ import annotations

from typing import Any, Literal

import tensorflow as tf

from tekso.framework import ops, workarounds
from tekso.framework.context import StepContext
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.theta import Theta
from tekso.models.layers.dropout import Dropout
from tekso.models.layers.recurrent_cells import LstmCell, RecurrentCell, State
from tekso.models.layers.sizes import with_sizes

_OUTPUT_DIMS = ("batch", "length", "embed")


class Recurrent(Layer):
    """Runs a cell over the length of its input.

    The input products of all time steps are computed at once, before the loop.

    Shapes:
      x: [B, T, D]
      mask: bool [B, T]; where False (padding), the state does not change and the output is 0
      reset: bool [B, T]; where True, the state is set to 0 before the step (a new segment)
      returns: [B, T, output_dim], dtype of x
    Weights: cell/…, those of the cell.
    """

    class Params(Layer.Params):
        """Params of Recurrent."""

        cell: RecurrentCell.Params = param("The cell.", default=LstmCell.Params())
        direction: Literal["forward", "backward"] = param("Direction in time.", default="forward")

    cell: RecurrentCell

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child("cell", self.params.cell)

    @property
    def output_dim(self) -> int:
        """Size of the last dim of the output."""
        return int(self.cell.output_dim)

    def zero_state(self, batch_size: int, dtype: tf.DType | None = None) -> State:
        """Returns the state before the first step."""
        return self.cell.zero_state(batch_size, dtype)

    def fprop(
        self,
        theta: Theta,
        x: tf.Tensor,
        ctx: StepContext,
        *,
        mask: tf.Tensor | None = None,
        reset: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Runs over x from the zero state; see the class."""
        state = self.zero_state(x.shape[0], x.dtype)
        return self.extend_step(theta, x, state, ctx, mask=mask, reset=reset)[0]

    def extend_step(
        self,
        theta: Theta,
        x: tf.Tensor,
        state: State,
        ctx: StepContext,
        *,
        mask: tf.Tensor | None = None,
        reset: tf.Tensor | None = None,
    ) -> tuple[tf.Tensor, State]:
        """Runs over x, one or more steps, from a given state; returns outputs and next state."""
        gates = self.cell.project_inputs(theta.cell, tf.transpose(x, [1, 0, 2]), ctx)
        return self._run(theta, gates, state, ctx, mask=mask, reset=reset)

    def fprop_rows(
        self,
        theta: Theta,
        table: tf.Tensor,
        ids: tf.Tensor,
        ctx: StepContext,
        *,
        mask: tf.Tensor | None = None,
        reset: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Returns fprop of table[ids]; the input products are of the table, before the lookup.

        This takes less time if the table has fewer rows than there are ids, also in the backward
        pass, which sums the gradients of equal ids first.

        Shapes:
          table: [V, D], ids: int [B, T]
        """
        gates = self.cell.project_inputs(theta.cell, table, ctx)
        state = self.zero_state(ids.shape[0], table.dtype)
        rows = ops.lookup(ctx, tf.reshape(gates, [gates.shape[0], -1]), tf.transpose(ids))
        rows = tf.reshape(rows, [*rows.shape[:2], *gates.shape[1:]])
        return self._run(theta, rows, state, ctx, mask=mask, reset=reset)[0]

    def _run(
        self,
        theta: Theta,
        gates: tf.Tensor,
        state: State,
        ctx: StepContext,
        *,
        mask: tf.Tensor | None,
        reset: tf.Tensor | None,
    ) -> tuple[tf.Tensor, State]:
        dims, dtype = self.cell.state_dims, gates.dtype
        state = {k: ctx.constrain(tf.cast(v, dtype), dims[k]) for k, v in state.items()}
        flags = {"mask": mask, "reset": reset}
        xs = {name: tf.transpose(flag) for name, flag in flags.items() if flag is not None}
        xs["gates"] = gates
        if self.params.direction == "backward":
            xs = {name: _reversed(value) for name, value in xs.items()}
        state, y = self.cell.scan(theta.cell, state, xs, ctx)
        y = tf.transpose(y, [1, 0, 2])
        if self.params.direction == "backward":
            y = workarounds.reverse(ctx, y, 1)
        return ctx.constrain(y, _OUTPUT_DIMS), state

    def step(
        self, theta: Theta, x: tf.Tensor, state: State, ctx: StepContext
    ) -> tuple[tf.Tensor, State]:
        """Computes one time step without a loop.

        Shapes:
          x: [B, D]
          returns: [B, output_dim], the next state
        """
        gates = self.cell.project_inputs(theta.cell, x, ctx)
        return self.cell.step(theta.cell, gates, state, ctx)


def _reversed(x: tf.Tensor) -> tf.Tensor:
    """Reverses the first dim with a gather, which every execution supports."""
    return tf.gather(x, tf.range(x.shape[0] - 1, -1, -1))


def segment_flags(segment_ids: tf.Tensor | None) -> dict[str, tf.Tensor]:
    """Returns `mask` and `reset` of a batch: positions of tokens, and first positions of segments.

    Shapes:
      segment_ids: [B, T] int, 0 is padding; None (no segments) returns {}
      returns: {"mask": bool [B, T], "reset": bool [B, T]}
    """
    if segment_ids is None:
        return {}
    mask = tf.not_equal(segment_ids, 0)
    changed = tf.not_equal(segment_ids[:, 1:], segment_ids[:, :-1])
    return {"mask": mask, "reset": tf.concat([tf.zeros_like(mask[:, :1]), changed], 1)}


class Bidirectional(Layer):
    """Runs one cell forward and another backward in time, and concatenates their outputs.

    Padding at the end has no effect: the backward state stays 0 until the last token.

    Shapes:
      x: [B, T, D]; mask: bool [B, T]; reset: bool [B, T], True on the first input of a segment
      returns: [B, T, 2 * output_dim of the cell]
    Weights: forward/cell/…, backward/cell/…, those of the cells.
    Source: Schuster & Paliwal 1997.
    """

    class Params(Layer.Params):
        """Params of Bidirectional."""

        cell: RecurrentCell.Params = param(
            "The cell of both directions.", default=LstmCell.Params()
        )

    forward: Recurrent
    backward: Recurrent

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        cell = self.params.cell
        self.child("forward", Recurrent.Params(cell=cell))
        self.child("backward", Recurrent.Params(cell=cell, direction="backward"))

    @property
    def output_dim(self) -> int:
        """Size of the last dim of the output."""
        return int(2 * self.forward.output_dim)

    def fprop(
        self,
        theta: Theta,
        x: tf.Tensor,
        ctx: StepContext,
        *,
        mask: tf.Tensor | None = None,
        reset: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """See the class."""
        ahead = self.forward.fprop(theta.forward, x, ctx, mask=mask, reset=reset)
        if reset is not None:  # backward, a segment begins with its last input
            reset = tf.concat([reset[:, 1:], tf.zeros_like(reset[:, :1])], 1)
        back = self.backward.fprop(theta.backward, x, ctx, mask=mask, reset=reset)
        return side_by_side(ahead, back, ctx)


def side_by_side(x: tf.Tensor, y: tf.Tensor, ctx: StepContext) -> tf.Tensor:
    """Concatenates x and y along the last dim.

    Shapes:
      x: [B, T, …] or [B, …], y: the same except for the last dim
    """
    dims = ("batch", "embed") if x.shape.rank == 2 else _OUTPUT_DIMS
    return workarounds.concat(ctx, [x, y], -1, dims=dims)


def with_residual(x: tf.Tensor, y: tf.Tensor, residual: Literal["none", "add"]) -> tf.Tensor:
    """Returns a layer's output y, plus its input x if residual is "add" and their sizes agree."""
    return x + y if residual == "add" and x.shape[-1] == y.shape[-1] else y


class RecurrentStack(Layer):
    """Stacked recurrent layers, with dropout on the input of every layer except the first.

    With residual "add", a layer with equal input and output sizes returns x + layer(x).

    Shapes:
      x: [B, T, D]; mask, reset: bool [B, T], as in Recurrent
      returns: [B, T, output_dim]
    Weights: layers/0/…, layers/1/…, …, those of the layers.
    Source: direction "bidirectional_first": Wu et al. 2016 (GNMT), section 3.2.
    """

    class Params(Layer.Params):
        """Params of RecurrentStack."""

        input_dim: int = param("Size of the last dim of the input.", default=REQUIRED)
        num_layers: int = param("Number of layers.", default=REQUIRED)
        cell: RecurrentCell.Params = param(
            "The cell of every layer; the stack sets its input_dim.", default=LstmCell.Params()
        )
        direction: Literal["forward", "bidirectional", "bidirectional_first"] = param(
            "Direction of the layers; bidirectional_first: the first layer bidirectional, the "
            "others forward.",
            default="forward",
        )
        residual: Literal["none", "add"] = param(
            "Whether to add a layer's input to its output.", default="none"
        )
        dropout_rate: float = param("Dropout between the layers.", default=0.0)

    layers: list[Recurrent | Bidirectional]
    dropout: Dropout

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        if p.num_layers < 1:
            raise ValueError(f"RecurrentStack: num_layers is {p.num_layers}, must be at least 1")
        layers: list[Any] = []
        input_dim = p.input_dim
        for i in range(p.num_layers):
            sees_all = p.direction == "bidirectional" or (p.direction != "forward" and i == 0)
            make = Bidirectional.Params if sees_all else Recurrent.Params
            layer = make(cell=with_sizes(p.cell, input_dim=input_dim))
            layers.append(layer)
            input_dim = layer.instantiate().output_dim
        self.child_list("layers", layers)
        self.child("dropout", Dropout.Params(rate=p.dropout_rate))

    @property
    def output_dim(self) -> int:
        """Size of the last dim of the output."""
        return int(self.layers[-1].output_dim)

    def zero_state(self, batch_size: int, dtype: tf.DType | None = None) -> list[State]:
        """Returns the state of every layer before the first step.

        Raises:
          ValueError: the stack is bidirectional.
        """
        return [layer.zero_state(batch_size, dtype) for layer in self._steppable()]

    def fprop(
        self,
        theta: Theta,
        x: tf.Tensor,
        ctx: StepContext,
        *,
        mask: tf.Tensor | None = None,
        reset: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Runs over x from the zero state; see the class."""
        for i in range(len(self.layers)):
            x = self.fprop_layer(i, theta, x, ctx, mask=mask, reset=reset)
        return x

    def takes_rows(self) -> bool:
        """Returns whether `fprop_rows` is fprop of the rows: not if a subclass changes a part."""
        p, stack = self.params, type(self)
        if p.direction != "forward" or p.residual != "none" or p.cell.adapter is not None:
            return False
        cell = type(self._steppable()[0].cell)
        return (
            stack.fprop is RecurrentStack.fprop
            and stack.fprop_layer is RecurrentStack.fprop_layer
            and cell.project_inputs is RecurrentCell.project_inputs
            and cell.project is RecurrentCell.project
        )

    def fprop_rows(
        self,
        theta: Theta,
        table: tf.Tensor,
        ids: tf.Tensor,
        ctx: StepContext,
        *,
        mask: tf.Tensor | None = None,
        reset: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Returns fprop of table[ids]; see `Recurrent.fprop_rows`."""
        first, own = self._steppable()[0], theta.layers["0"]
        x = first.fprop_rows(own, table, ids, ctx.fold(0), mask=mask, reset=reset)
        for i in range(1, len(self.layers)):
            x = self.fprop_layer(i, theta, x, ctx, mask=mask, reset=reset)
        return x

    def fprop_layer(
        self,
        index: int,
        theta: Theta,
        x: tf.Tensor,
        ctx: StepContext,
        *,
        mask: tf.Tensor | None = None,
        reset: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Returns the output of one layer, whose weights must be in theta."""
        ctx = ctx.fold(index)
        given = self._dropped(index, x, ctx)
        y = self.layers[index].fprop(theta.layers[str(index)], given, ctx, mask=mask, reset=reset)
        return with_residual(x, y, self.params.residual)

    def extend_step(
        self,
        theta: Theta,
        x: tf.Tensor,
        states: list[State],
        ctx: StepContext,
        *,
        mask: tf.Tensor | None = None,
        reset: tf.Tensor | None = None,
    ) -> tuple[tf.Tensor, list[State]]:
        """Runs over x, one or more steps, from given states; returns outputs and next states.

        Raises:
          ValueError: the stack is bidirectional.
        """
        after = []
        for i, (layer, state) in enumerate(zip(self._steppable(), states, strict=True)):
            own = ctx.fold(i)
            y, state = layer.extend_step(
                theta.layers[str(i)], self._dropped(i, x, own), state, own, mask=mask, reset=reset
            )
            after.append(state)
            x = with_residual(x, y, self.params.residual)
        return x, after

    def _dropped(self, i: int, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        return self.dropout.fprop(Theta(), x, ctx) if i else x

    def _steppable(self) -> list[Recurrent]:
        layers = [layer for layer in self.layers if isinstance(layer, Recurrent)]
        if len(layers) < len(self.layers):
            raise ValueError(
                "a bidirectional stack cannot run step by step: its outputs depend on later inputs"
            )
        return layers
