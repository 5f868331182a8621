"""A pipeline as one program: in every tick all stages compute, then pass on their activations.

    tick          0   1   2   3   4        3 micro-batches, 3 stages
    stage 0       0   1   2   ·   ·        weights [stage, layers of a stage, …], sharded by stage
    stage 1       ·   0   1   2   ·        state [stage, examples, …]: shifts by one stage per tick
    stage 2       ·   ·   0   1   2

All stages compute the pieces before the stack (embedding) and after it (softmax), for one
micro-batch after the other. In an idle tick (·), a stage computes its first or last micro-batch,
and the result is discarded.

The ticks are a loop of the program, and so are the pieces before and after the stack. The compile
time therefore does not depend on the number of micro-batches.

Source: Xu et al. 2021, "GSPMD" (arXiv 2105.04663), section 3.3: pipelining by a shifting buffer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework import nests
from tekso.framework.context import StepContext
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.mesh import control_flow
from tekso.framework.execution.mesh.context import MeshContext
from tekso.framework.execution.pipeline.saving_loop import SavingLoop
from tekso.framework.execution.pipeline.spmd_pieces import StackPieces
from tekso.framework.pieces import LOSS_SUM, METRICS, Flow, Piece, run_all
from tekso.framework.task import LossSums

STAGE = "stage"
_LETTERS = "abcdefgh"

Flat = Mapping[str, tf.Tensor]


@dataclasses.dataclass(frozen=True)
class SpmdLoop:
    """The forward pass of a task over a batch.

    Attributes:
      parts: the pieces before, in and after the stack.
      num_stages: number of devices along the axis of stages.
      num_micro_batches: number of equal parts of the batch.
      rematerialize: whether the backward pass recomputes each tick.
    """

    parts: StackPieces
    num_stages: int
    num_micro_batches: int
    rematerialize: bool

    def loss(
        self,
        weights: Flat,
        batch: Flow,
        ctx: MeshContext,
        *,
        context_of: Callable[[Any], MeshContext],
        plain: Callable[[Any], StepContext],
    ) -> LossSums:
        """Returns the sums over a batch; `ctx` collects the other outputs of layers.

        Args:
          weights: weights as the layers use them, {path: tensor}; `ctx` knows their layouts.
          batch: the batch, replicated on every device.
          ctx: context of the batch.
          context_of: returns the context of the micro-batch that starts at a given example.
          plain: returns a context without a mesh for examples that start at a given one.
        """
        return _Pass(self, weights, ctx, context_of, plain).loss(batch)


class _Pass:
    """One forward pass, as three loops: before the stack, the ticks, after the stack."""

    def __init__(
        self,
        loop: SpmdLoop,
        weights: Flat,
        ctx: MeshContext,
        context_of: Callable[[Any], MeshContext],
        plain: Callable[[Any], StepContext],
    ) -> None:
        self._loop, self._parts, self._weights, self._ctx = loop, loop.parts, weights, ctx
        self._context_of, self._plain = context_of, plain
        kind = None if loop.rematerialize else SavingLoop
        self._scan = functools.partial(control_flow.scan, kind=kind)

    def loss(self, batch: Flow) -> LossSums:
        """Returns the sums over a batch."""
        count = self._loop.num_micro_batches
        size = next(iter(batch.values())).shape[0] // count
        flow = {name: tf.reshape(x, [count, size, *x.shape[1:]]) for name, x in batch.items()}
        first = tf.range(count) * size
        flow = {**flow, **self._before(flow, first)}
        flow = {**flow, **self._ticks(flow, size)}
        loss_sums, metrics = self._after(flow, first)
        return LossSums(tf.reduce_sum(loss_sums), tf.nest.map_structure(tf.reduce_sum, metrics))

    # --- before and after the stack: one micro-batch after the other ---

    def _before(self, batch: Flow, first: tf.Tensor) -> Flow:
        """Returns the values that the pieces before the stack add, [micro-batches, …]."""
        parts = self._parts
        used = {*parts.writes, *parts.reads, *parts.after_reads}

        def run(given: Flow, weights: Flat, ctx: MeshContext) -> Flow:
            flow = run_all(parts.before, weights, given, ctx)
            return {n: x for n, x in flow.items() if n in used and x is not given.get(n)}

        return dict(self._of_micro_batches(parts.before, run, batch, first))

    def _after(self, flow: Flow, first: tf.Tensor) -> Any:
        """Returns the sums of losses and the sums of metrics, each [micro-batches]."""
        used = {*self._parts.writes, *self._parts.after_reads}

        def run(given: Flow, weights: Flat, ctx: MeshContext) -> Any:
            end = run_all(self._parts.after, weights, given, ctx)
            return end[LOSS_SUM], tf.nest.map_structure(tf.convert_to_tensor, end[METRICS])

        flow = {name: x for name, x in flow.items() if name in used}
        return self._of_micro_batches(self._parts.after, run, flow, first)

    def _of_micro_batches(
        self,
        pieces: Sequence[Piece],
        run: Callable[[Flow, Flat, MeshContext], Any],
        flow: Flow,
        first: tf.Tensor,
    ) -> Any:
        """Runs pieces for one micro-batch after the other; returns [micro-batches, …]."""
        paths = {path for piece in pieces for path in piece.weights(sorted(self._weights))}
        weights = {path: self._weights[path] for path in sorted(paths)}
        given, made = _Packed(flow), _Packed(())

        def body(theta: Any, state: Any, x: Any, inner: MeshContext) -> Any:
            *tensors, first = x
            ctx = self._context_of(first)
            ctx.collected, ctx.is_iteration = inner.collected, inner.is_iteration
            ctx.register_layouts(theta, inner.layouts_of(theta))
            sharded = [ctx.constrain(t, _batch_dims(t.shape.rank)) for t in tensors]
            return state, made.pack(run(given.unpack(sharded), theta, ctx))

        _, ys = self._scan(self._ctx, body, weights, (), [*given.pack(flow), first], 0)
        return made.unpack([_replicated(y, self._ctx) for y in ys])

    # --- the stack: one tick after the other ---

    def _ticks(self, flow: Flow, size: int) -> Flow:
        """Returns the outputs of the stack, [micro-batches, …]."""
        stages, count = self._loop.num_stages, self._loop.num_micro_batches
        ticks = np.arange(count + stages - 1)
        which = ticks[:, None] - np.arange(stages)  # [ticks, stages]: micro-batch of the stage
        held, is_busy = np.clip(which, 0, count - 1), (which >= 0) & (which < count)
        written, read = (
            {n: flow[n] for n in names} for names in (self._parts.writes, self._parts.reads)
        )
        state_of, side_of = _Packed(written), _Packed(read)

        def body(theta: Any, state: Any, x: Any, inner: MeshContext) -> Any:
            entering, side, offsets, busy = x
            pairs = zip(state, entering, strict=True)
            state = [_on_stages(self._moved(was, new), inner) for was, new in pairs]
            side = [_on_stages(x, inner) for x in side]
            state, side = state_of.unpack(state), side_of.unpack(side)
            flow, sums = run_tick(self._loop, theta, state, side, offsets, self._plain)
            _collect(inner, sums, busy)
            state = [_on_stages(x, inner) for x in state_of.pack(flow)]
            return state, [self._last(x, inner) for x in state]

        xs = (
            [
                _replicated(tf.gather(x, np.minimum(ticks, count - 1)), self._ctx)
                for x in state_of.pack(written)
            ],
            [_on_stages(tf.gather(x, held), self._ctx, None) for x in side_of.pack(read)],
            self._ctx.reshard(tf.constant(held * size, tf.int32), (None, STAGE)),
            self._ctx.reshard(tf.constant(is_busy, tf.float32), (None, STAGE)),
        )
        # Not tf.stack: on a mesh, it cannot stack along a dim that is sharded afterwards. Not x[0]:
        # DTensor would shard the dim after that of examples.
        begin = [
            _on_stages(
                x[:1] * tf.ones([stages] + [1] * (x.shape.rank - 1), x.dtype),
                self._ctx,
            )
            for x in state_of.pack(written)
        ]
        _, ends = self._scan(self._ctx, body, self._stacked(), begin, xs, 0)
        ends = [_replicated(x[stages - 1 :], self._ctx) for x in ends]
        return dict(state_of.unpack(ends))

    def _stacked(self) -> Flat:
        """Returns the weights of the stack, [stages, layers of a stage, …], sharded by stage."""
        found = {}
        for path in sorted(self._parts.paths):
            w = self._weights[path]
            # Explicit, since on a mesh -1 becomes the size of a shard.
            per_stage = w.shape[0] // self._loop.num_stages
            w = tf.reshape(w, [self._loop.num_stages, per_stage, *w.shape[1:]])
            axes = (STAGE,) + (None,) * (w.shape.rank - 1)
            found[path] = self._ctx.reshard(w, axes)
            self._ctx.register_layouts(found[path], [axes])
        return found

    def _moved(self, state: tf.Tensor, entering: tf.Tensor) -> tf.Tensor:
        """Shifts the state by one stage; the first stage gets `entering`."""
        inner = _LETTERS[: state.shape.rank - 1]
        count = self._loop.num_stages
        shift = tf.constant(np.eye(count, k=-1), state.dtype)
        first = tf.constant(np.eye(count)[0].reshape([-1] + [1] * len(inner)), state.dtype)
        moved = tf.einsum(f"yz,z{inner}->y{inner}", shift, state)
        return moved + first * tf.expand_dims(entering, 0)

    def _last(self, state: tf.Tensor, ctx: MeshContext) -> tf.Tensor:
        """Returns the state of the last stage, replicated over the stages."""
        inner = _LETTERS[: state.shape.rank - 1]
        last = tf.constant(np.eye(self._loop.num_stages)[-1], state.dtype)
        end = tf.einsum(f"z,z{inner}->{inner}", last, state)
        return ctx.constrain(end, _batch_dims(end.shape.rank))


def run_tick(
    loop: SpmdLoop,
    weights: Flat,
    state: Flow,
    side: Flow,
    offsets: tf.Tensor,
    plain: Callable[[Any], StepContext],
) -> tuple[Flow, Any]:
    """Computes a tick; returns the outputs of all stages, and what they collect, [stages].

    Args:
      loop: the pipeline.
      weights: weights of the stack, {path: [stages, layers of a stage, …]}.
      state: the values that a layer passes to the next one, [stages, examples, …].
      side: the other values that the layers read, [stages, examples, …].
      offsets: position of the first example of every stage, [stages].
      plain: see `SpmdLoop.loss`.

    Raises:
      ExecutionError: TensorFlow cannot vectorize the layers.
      MistakeError: a layer builds a context, draws the same random numbers twice, or creates a
        variable.
    """
    piece, run_rows = loop.parts.stack, loop.parts.run_rows
    per_stage = next(iter(weights.values())).shape[1]
    first = tf.constant(np.arange(loop.num_stages) * per_stage, tf.int32)

    def stage(given: Any) -> Any:
        weights, state, side, first, offset = given
        ctx = plain(offset)
        flow = run_rows(first, piece.theta(weights), {**side, **state}, ctx)
        return {name: flow[name] for name in state}, ctx.collected.sums

    try:
        outputs, sums = tf.vectorized_map(
            stage, (dict(weights), state, side, first, offsets), fallback_to_while_loop=False
        )
        return outputs, sums
    except ValueError as error:
        raise ExecutionError(
            f"the layers of {piece.name} cannot be computed for all stages at once, as "
            f"--execution=spmd_pipelined does: {str(error).rstrip('.')}; use --execution=pipelined"
        ) from error


class _Packed:
    """Converts a nest to a list of tensors without None and bool, which a loop cannot carry."""

    def __init__(self, nest: Any) -> None:
        self._nest = nest

    def pack(self, nest: Any) -> list[tf.Tensor]:
        """Returns the tensors of a nest; sets the structure that `unpack` returns."""
        self._nest = nest
        leaves = nests.tensors(nest)
        return [tf.cast(x, tf.int32) if x.dtype == tf.bool else x for x in leaves]

    def unpack(self, tensors: Sequence[tf.Tensor]) -> Any:
        """Returns tensors, also when stacked by a loop, in the structure of the nest."""
        given = iter(tensors)
        return nests.mapped(lambda x: tf.cast(next(given), x.dtype), self._nest)


def _batch_dims(rank: int) -> tuple[str | None, ...]:
    return ("batch",) + (None,) * (rank - 1)


def _on_stages(x: tf.Tensor, ctx: MeshContext, *before: None) -> tf.Tensor:
    """Returns x, [stages, examples, …], with every stage on its own devices."""
    first = len(before) + 1
    inner = ctx.axes(_batch_dims(x.shape.rank - first), x.shape[first:])
    return ctx.reshard(x, (*before, STAGE, *inner))


def _replicated(x: tf.Tensor, ctx: MeshContext) -> tf.Tensor:
    """Returns x, [micro-batches, examples, …], replicated over the stages."""
    if x.shape.rank == 1:
        return ctx.reshard(x, (None,))
    return ctx.reshard(x, (None, *ctx.axes(_batch_dims(x.shape.rank - 1), x.shape[1:])))


def _collect(ctx: MeshContext, sums: Any, is_busy: tf.Tensor) -> None:
    """Adds to `ctx` what the stages collected, without stages that are idle in this tick."""
    if sums["statistic"]:
        raise ExecutionError(
            f"{', '.join(sums['statistic'])}: --execution=spmd_pipelined does not support batch "
            "statistics; use --execution=pipelined"
        )
    for kind, by_name in sums.items():
        for name, (value, weight) in by_name.items():
            of_busy = [tf.reduce_sum(v * is_busy) for v in (value, weight)]
            ctx.collected.add(kind, name, *of_busy)
