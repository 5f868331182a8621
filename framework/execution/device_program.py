"""What one device computes of a step: the sums of its part of a batch, and the update."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tekso.framework.batch_sums import Sums, added
from tekso.framework.context import Mode, StepContext
from tekso.framework.coupling import coupling, refuse_unsummed, too_few
from tekso.framework.execution.base import ExecutionProgram, parts_of
from tekso.framework.execution.batch_parts import (
    Gradients,
    one_after_the_other,
    side_by_side,
    size_of,
)
from tekso.framework.execution.replica_context import ReplicaContext
from tekso.framework.execution.tower_sums import sum_over_towers
from tekso.framework.primitives.fusion import XlaFusion, no_fusion
from tekso.framework.state import State
from tekso.framework.step import Flat, Step
from tekso.framework.task import LossSums


class DeviceProgram(ExecutionProgram):
    """Base of programs in which every device computes a part of the batch with all weights.

        part of the batch ── accumulation: one after the other ── towers: side by side ── a tower
                                                                                     │
        the new state ◄── updated ◄── sums over the devices ◄── gradients and sums ◄─┘

    A subclass has the state, and defines what the devices are.

    Args:
      step: what a step computes.
      num_replicas: number of devices.
      towers: number of parts that a device computes side by side.
      xla: what XLA compiles: "step", "clusters" or nothing.
      accumulation: number of parts that a device computes one after the other; None: as the learner
        says.
    """

    def __init__(
        self,
        step: Step,
        *,
        num_replicas: int,
        towers: int,
        xla: str,
        accumulation: int | None = None,
    ) -> None:
        super().__init__(step)
        self.num_replicas = num_replicas
        self._towers, self._xla = towers, xla
        self._accumulation = accumulation or step.learner.params.accumulation_steps
        self._couples = bool(coupling(step.task))
        self._fusions: dict[Any, XlaFusion] = {}
        self._compiled_functions: dict[Any, Callable[..., Any]] = {}

    @abc.abstractmethod
    def _all_reduce(self, nest: Any) -> Any:
        """Returns a nest of tensors, summed over all devices."""

    @abc.abstractmethod
    def _own_variables(self) -> list[Any]:
        """Returns the variables of every device."""

    def part_gradients(
        self,
        weights: Flat,
        scale: tf.Tensor | None,
        batch: Flat,
        *,
        start: Any,
        num_examples: int,
        step: tf.Tensor,
        total_weight: tf.Tensor,
        replica: int = 0,
    ) -> tuple[Gradients, Sums]:
        """Computes a part of a batch, from its example `start` on; returns gradients and sums."""

        def tower(part: Any, start: Any, number: int) -> tuple[Gradients, Sums]:
            offset = tf.convert_to_tensor(start, tf.int32)
            compute = self._tower((replica, number), num_examples)
            gradients, sums = compute(weights, part, offset, step, total_weight, scale)
            return [gradients], sums

        def towers(part: Any, start: Any, _: int) -> tuple[Gradients, Sums]:
            count = parts_of(size_of(part), self._towers)
            return side_by_side(part, start, count, tower, in_turns=self._couples)

        # A later batch of another size may have fewer parts.
        return one_after_the_other(
            batch, start, parts_of(size_of(batch), self._accumulation), towers
        )

    def _tower(self, key: tuple[int, int], num_examples: int) -> Callable[..., Any]:
        def compute(
            weights: Flat,
            part: Flat,
            offset: tf.Tensor,
            step: tf.Tensor,
            total_weight: tf.Tensor,
            scale: tf.Tensor | None,
        ) -> tuple[Flat, Sums]:
            ctx = self._context("train", key, step, offset, num_examples)

            def forward() -> tuple[LossSums, StepContext]:
                sums = self._step.loss(weights, part, ctx, own=self._own_variables())
                if self.num_replicas * self._towers > 1:
                    refuse_unsummed(self._step.task, ctx)
                return sums, ctx

            trained = {path: weights[path] for path in self._step.trained}
            return self._step.part_gradients(forward, total_weight, trained, scale)

        return self._compiled(("train", *key, num_examples), compute)

    def _eval_tower(self, key: tuple[int, int], whole: int) -> Callable[..., Any]:
        def compute(weights: Flat, part: Flat, offset: tf.Tensor) -> Any:
            ctx = self._context("eval", ("eval", *key), 0, offset, whole)
            end = self._step.loss(weights, part, ctx, own=self._own_variables())
            if whole < self.num_replicas and (by := getattr(ctx, "summed", None)):
                raise too_few(whole, min(by) or "the task", "sums over", self.num_replicas)
            return self._step.evaluation_sums(end, part, ctx)

        return self._compiled(("eval", *key, whole), compute)

    def _compiled(self, key: tuple[Any, ...], compute: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `compute` as one XLA program for all traces with this key, if `xla` is step."""
        if self._xla != "step":
            return compute
        whole = tf.function(compute, jit_compile=True, autograph=False)
        return self._compiled_functions.setdefault(key, whole)

    def _fusion(self, key: Any) -> Any:
        """Returns what compiles the elementwise clusters of a tower or of an update."""
        is_used = self._xla == "clusters"
        return self._fusions.setdefault(key, XlaFusion()) if is_used else no_fusion

    def _context(
        self, mode: Mode, key: Any, step: tf.Tensor | int, offset: Any, num_examples: int | None
    ) -> StepContext:
        kind: Callable[..., StepContext] = StepContext
        if self.num_replicas > 1:
            kind = functools.partial(ReplicaContext, all_reduce=self._all_reduce)
        elif self._couples:
            kind = functools.partial(ReplicaContext, all_reduce=sum_over_towers)
        return kind(
            mode=mode,
            seed=self._step.seed,
            step=step,
            example_offset=offset,
            num_examples=num_examples,
            fuse=self._fusion(key),
        )

    def updated(
        self,
        state: State[Any],
        gradients: Gradients,
        sums: Sums,
        step: tf.Tensor,
        *,
        replica: int = 0,
    ) -> Any:
        """Returns the result of `Step.update`, compiled once for batches of all shapes."""
        fuse = self._fusion(("update", replica))

        def compute(
            state: State[Any], gradients: Gradients, sums: Sums, step: tf.Tensor
        ) -> tuple[State[tf.Tensor], Flat]:
            # A compiled update has the decision among its inputs. A mesh does not wait: with
            # control dependencies, a step of image.digits.Cnn takes 13 to 17 % more CPU time.
            waits = self._xla == "none"
            return self._step.update(state, added(gradients), sums, step, fuse=fuse, waits=waits)

        return self._compiled(("update",), compute)(state, gradients, sums, step)
