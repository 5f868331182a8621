"""A pipeline as one program: all stages compute in every tick, and activations move on between.

    tick          0   1   2   3   4        3 micro-batches, 3 stages
    stage 0       0   1   2   ·   ·        weights [stage, layers of a stage, …], stages on an axis
    stage 1       ·   0   1   2   ·        state [stage, examples, …]: moves on by one stage a tick
    stage 2       ·   ·   0   1   2

What comes before the stack (embedding) and after it (softmax) is computed on all stages, for one
micro-batch after the other. Where a stage has nothing to do (·), it computes a micro-batch that it
has had, or will have, and the result is not used.

Source: Xu et al. 2021, "GSPMD" (arXiv 2105.04663), section 3.3: pipelining by a shifting buffer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework import loops
from tekso.framework.context import StepContext, isolated
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.mesh.context import MeshContext
from tekso.framework.execution.pipeline.piece_traces import tensors
from tekso.framework.execution.pipeline.spmd_pieces import StackPieces
from tekso.framework.pieces import LOSS_SUM, METRICS, Flow, run_all
from tekso.framework.task import LossSums
from tekso.framework.theta import Theta

STAGE = "stage"
_LETTERS = "abcdefgh"

Flat = Mapping[str, tf.Tensor]


@dataclasses.dataclass(frozen=True)
class SpmdLoop:
    """The forward pass of a task over a batch.

    Attributes:
      parts: the pieces before, in and after the stack.
      num_stages: devices along the axis of stages.
      num_micro_batches: equal parts of the batch.
      rematerialize: whether the backward pass computes each tick again.
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
        context_of: Callable[[int], MeshContext],
        plain: Callable[[Any], StepContext],
    ) -> LossSums:
        """Returns the sums over a batch; what is collected goes to `ctx`.

        Args:
          weights: as they are used, {path: tensor}.
          batch: of which every device has all.
          ctx: context of the batch.
          context_of: returns the context of a micro-batch, that knows the weights.
          plain: returns a context without a mesh for examples from a given one on.
        """
        count = self.num_micro_batches
        contexts = [context_of(m) for m in range(count)]
        flows = [
            run_all(self.parts.before, weights, self._part(batch, m, contexts[m]), contexts[m])
            for m in range(count)
        ]
        run = _Ticks(self, self._stacked(weights, ctx), flows, ctx, plain)
        ends = run.all()
        sums: list[LossSums] = []
        for m, end in enumerate(ends):
            flow = run_all(self.parts.after, weights, {**flows[m], **end}, contexts[m])
            sums.append(LossSums(flow[LOSS_SUM], flow[METRICS]))
            ctx.collected.merge(contexts[m].collected.sums)
        metrics = [one.metrics for one in sums]
        return LossSums(
            tf.add_n([one.loss_sum for one in sums]),
            tf.nest.map_structure(lambda *v: tf.add_n(v), *metrics),
        )

    def _part(self, batch: Flow, m: int, ctx: MeshContext) -> Flow:
        """Micro-batch m."""
        size = next(iter(batch.values())).shape[0] // self.num_micro_batches

        def part(x: tf.Tensor) -> tf.Tensor:
            dims = ("batch",) + (None,) * (x.shape.rank - 1)
            return ctx.constrain(tf.identity(x[m * size : (m + 1) * size]), dims)

        return {name: part(x) for name, x in batch.items()}

    def _stacked(self, weights: Flat, ctx: MeshContext) -> Flat:
        """The weights of the stack as [stage, layers of a stage, …]."""
        found = {}
        for path in self.parts.paths:
            w = weights[path]
            per_stage = w.shape[0] // self.num_stages
            w = tf.reshape(w, [self.num_stages, per_stage, *w.shape[1:]])
            found[path] = ctx.reshard(w, (STAGE,) + (None,) * (w.shape.rank - 1))
        return found


class _Ticks:
    """The loop, written out."""

    def __init__(
        self,
        loop: SpmdLoop,
        weights: Flat,
        flows: Sequence[Flow],
        ctx: MeshContext,
        plain: Callable[[Any], StepContext],
    ) -> None:
        self._loop, self._weights, self._flows, self._ctx, self._plain = (
            loop,
            weights,
            flows,
            ctx,
            plain,
        )
        self._stages = np.arange(loop.num_stages)
        self._size = tensors(self._values(0, loop.parts.writes))[0].shape[0]

    def _values(self, m: int, names: Sequence[str]) -> Flow:
        """Some values of the flow of a micro-batch as it enters the stack."""
        return {name: self._flows[m][name] for name in names}

    def all(self) -> list[Flow]:
        """Returns what leaves the stack, for every micro-batch."""
        loop, count = self._loop, self._loop.num_micro_batches
        state = self._of_stages([0] * loop.num_stages, loop.parts.writes)
        ends = []
        for tick in range(count + loop.num_stages - 1):
            which = tick - self._stages
            is_busy = (which >= 0) & (which < count)
            held = np.clip(which, 0, count - 1)
            entering = self._values(min(tick, count - 1), loop.parts.writes)
            state = tf.nest.map_structure(self._moved, state, entering)
            side = self._of_stages(held.tolist(), loop.parts.reads)
            state = self._tick(state, side, held * self._size, is_busy)
            if tick >= loop.num_stages - 1:
                ends.append(tf.nest.map_structure(self._last, state))
        return ends

    def _pin(self, x: tf.Tensor) -> tf.Tensor:
        inner = self._ctx.axes(("batch",) + (None,) * (x.shape.rank - 2), x.shape[1:])
        return self._ctx.reshard(x, (STAGE, *inner))

    def _of_stages(self, micro_batches: Sequence[int], names: Sequence[str]) -> Flow:
        """Values of a micro-batch for every stage, each on its devices."""
        which = sorted(set(micro_batches))
        chosen = [self._values(m, names) for m in which]

        def joined(*x: Any) -> Any:
            if x[0] is None:
                return None
            parts = []
            for m, value in zip(which, x, strict=True):  # stacking along a split dim fails
                has = np.equal(micro_batches, m).reshape((-1,) + (1,) * value.shape.rank)
                is_bool = value.dtype == tf.bool
                value = tf.expand_dims(tf.cast(value, tf.int32) if is_bool else value, 0)
                # Not a product with 0: masks can have infinite numbers.
                parts.append(tf.where(tf.constant(has), value, tf.zeros_like(value)))
            whole = self._pin(tf.add_n(parts))
            return tf.cast(whole, x[0].dtype)

        return tf.nest.map_structure(joined, *chosen)

    def _moved(self, state: Any, entering: Any) -> Any:
        """Every stage has what the one before it had, the first what enters."""
        if state is None:
            return None
        inner = _LETTERS[: state.shape.rank - 1]
        count = self._loop.num_stages
        shift = tf.constant(np.eye(count, k=-1), state.dtype)
        first = tf.constant(np.eye(count)[0].reshape([-1] + [1] * len(inner)), state.dtype)
        moved = tf.einsum(f"yz,z{inner}->y{inner}", shift, state)
        return self._pin(moved + first * tf.expand_dims(entering, 0))

    def _last(self, state: Any) -> Any:
        """What the last stage has, on the devices of all."""
        if state is None:
            return None
        inner = _LETTERS[: state.shape.rank - 1]
        last = tf.constant(np.eye(self._loop.num_stages)[-1], state.dtype)
        end = tf.einsum(f"z,z{inner}->{inner}", last, state)
        return self._ctx.constrain(end, ("batch",) + (None,) * (end.shape.rank - 1))

    def _tick(self, state: Flow, side: Flow, offsets: np.ndarray, is_busy: np.ndarray) -> Flow:
        """All stages compute what they have."""
        piece, run_rows = self._loop.parts.stack, self._loop.parts.run_rows
        per_stage = next(iter(self._weights.values())).shape[1]
        first = tf.constant(self._stages * per_stage, tf.int32)
        offset = tf.constant(offsets, tf.int32)

        def run(weights: Theta, state: Any, side: Any, _: Any) -> Any:
            def stage(given: Any) -> Any:
                weights, state, side, first, offset = given
                ctx = self._plain(offset)
                flow = run_rows(first, piece.theta(weights), {**side, **state}, ctx)
                return {name: flow[name] for name in state}, ctx.collected.sums

            try:
                return tf.vectorized_map(
                    stage, (dict(weights), state, side, first, offset), fallback_to_while_loop=False
                )
            except ValueError as error:
                raise ExecutionError(
                    f"the layers of this stack cannot be computed for all stages at once: {error}; "
                    "set execution.form='host'"
                ) from error

        args = Theta(self._weights), state, side
        if self._loop.rematerialize and self._ctx.is_training:
            state, sums = loops.rematerialize(isolated(self._ctx), run, *args)
        else:
            state, sums = run(*args, None)
        self._collect(sums, tf.constant(is_busy, tf.float32))
        return tf.nest.map_structure(lambda x: None if x is None else self._pin(x), state)

    def _collect(self, sums: Any, is_busy: tf.Tensor) -> None:
        if sums["statistic"]:
            raise ExecutionError(
                f"{', '.join(sums['statistic'])}: execution.form='spmd' does not take statistics "
                "of a batch; set execution.form='host'"
            )
        for kind, by_name in sums.items():
            for name, (value, weight) in by_name.items():
                of_busy = [tf.reduce_sum(v * is_busy) for v in (value, weight)]
                self._ctx.collected.add(kind, name, *of_busy)
