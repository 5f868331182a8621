"""Traces the graphs of a data-parallel training step without allocating its weights.

gradients of one tower ─┬─► graph_time: seconds of a core, graph_memory: bytes
update of the weights  ─┘
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tekso.framework.cores import num_cores
from tekso.framework.costs import graph_memory, graph_time, graph_work, step_memory
from tekso.framework.costs.this_machine import MachineSpeed, ThisMachine
from tekso.framework.coupling import coupling
from tekso.framework.execution.accumulation import part_of
from tekso.framework.execution.data_parallel import DataParallel, num_towers
from tekso.framework.execution.data_parallel_program import DataParallelProgram
from tekso.framework.planning.mesh_graphs import DeviceGraphs
from tekso.framework.planning.step_time import StepTime
from tekso.framework.primitives.custom_gradient import custom_gradient
from tekso.framework.signature import Signature, num_examples
from tekso.framework.state import State
from tekso.framework.step import Step
from tekso.framework.symbolic import spec_of


@dataclasses.dataclass(frozen=True)
class StepGraphs:
    """The graphs of a step.

    Attributes:
      towers: number of parts of the batch that are computed at the same time, each on one core.
      parts: number of accumulation steps.
      tower: graph of the gradients of one part.
      update: graph of the update.
      gradient_sizes: bytes of each gradient of one tower.
      variables: number of weights and slots.
      arrays: number of arrays of a batch.
      uses_all_threads: whether one op at a time runs, on all cores.
      sums: bytes of each tensor that a tower sums over all devices, as for batch statistics, and of
        each gradient of such a sum, which is summed too.
    """

    towers: int
    parts: int
    tower: Any
    update: Any
    gradient_sizes: Sequence[float]
    variables: int
    arrays: int
    uses_all_threads: bool
    sums: Sequence[float] = ()

    def of_device(self) -> DeviceGraphs:
        """Returns what one of several devices runs, with a tower each.

        tf.distribute concatenates the gradients of a type and the sums for one all-reduce.
        """
        gradients = math.fsum(self.gradient_sizes)
        of_loss = 4.0  # its weight is summed first
        sums = [of_loss, *(self.parts * tuple(self.sums)), gradients]
        return DeviceGraphs(
            self.runs, sums, variables=self.variables, arrays=self.arrays, calls=1,
            between=self.gradient_sizes, packed=gradients,
        )  # fmt: skip

    @property
    def runs(self) -> list[tuple[int, Any]]:
        """[(number of runs in a step, graph)] of a tower."""
        return [(self.parts, self.tower), (1, self.update)]

    @property
    def cores(self) -> int:
        """Number of cores that compute at the same time."""
        return num_cores() if self.uses_all_threads else self.towers

    def step_time(self, machine: ThisMachine) -> StepTime:
        """Returns the time of a step on a single device."""
        elapsed, cpu = (
            (machine.alone, machine.alone_cpu)
            if self.uses_all_threads
            else (machine.side_by_side, machine.side_by_side)
        )
        of_update, of_tower = graph_time.moved_by_others(self.runs)

        def of_parts(price: Callable[..., float], speed: MachineSpeed) -> float:
            return graph_time.of_runs(price, self.tower, speed, runs=self.parts, between=of_update)

        tower = of_parts(graph_time.seconds, elapsed)
        short = of_parts(graph_time.short_seconds, elapsed)
        fixed = machine.call_s + self.arrays * machine.array_s
        fixed += self.variables * machine.variable_s
        update = graph_time.elapsed_seconds(
            self.update, elapsed, cores=self.towers, between=of_tower
        )
        step = tower + (self.towers - 1) * short + update
        of_cores = self.towers * of_parts(graph_time.seconds, cpu)
        of_cores += graph_time.seconds(self.update, cpu, between=of_tower)
        return StepTime(step + fixed, of_cores + fixed, fixed)

    def flops(self) -> float:
        """Returns the floating-point operations of a step, forward, backward and update."""
        tower = graph_work.count(self.tower).flops
        return self.towers * self.parts * tower + graph_work.count(self.update).flops

    def peak_bytes(
        self, state: Sequence[float], machine: ThisMachine, *, least: float = 0.0
    ) -> float:
        """Returns the bytes that a step needs beyond weights and slots, as they are allocated.

        Args:
          state: bytes of each weight and slot.
          machine: its speed decides which ops run at the same time.
          least: tensors of fewer bytes do not count.
        """
        held = [size for size in state if size >= least]
        found = self.update.inputs[self.variables :][: self.towers * len(self.gradient_sizes)]
        sizes = {t.name: graph_work.size_bytes(t) for t in found}
        gradients = {name: size for name, size in sizes.items() if size >= least}
        speed = machine.alone if self.uses_all_threads else machine.side_by_side

        tower = graph_memory.tensors_of(self.tower, least=least)
        update = graph_memory.tensors_of(self.update, least=least, given=gradients)
        peak = step_memory.peak_bytes(
            held,
            step_memory.timed(tower, speed),
            step_memory.timed(update, speed),
            gradients,
            towers=self.towers,
            parts=self.parts,
            threads=num_cores(),
        )
        return peak - math.fsum(held)


def trace(
    step: Step, batch: Signature, execution: DataParallel.Params, *, devices: int = 1
) -> StepGraphs:
    """Returns the graphs of a step on the cores of this machine.

    Args:
      step: the task, the learner and the type of activations.
      batch: signature of the global batch.
      execution: Params of `DataParallel`.
      devices: number of logical devices; several compute a tower each.

    Raises:
      ExecutionError: the batch does not divide evenly over accumulation steps and towers, or the
        task cannot have this number of towers.
    """
    parts = step.learner.params.accumulation_steps
    part = part_of(batch, parts)
    is_single = devices == 1
    towers = num_towers(
        execution.towers, step.task, num_examples(part) // devices,
        cores=num_cores() if is_single else 1, sums=is_single and execution.xla != "step",
    )  # fmt: skip
    xla = "clusters" if execution.xla == "auto" else execution.xla
    device = _Device(step, devices, xla)
    size = num_examples(part) // devices // towers
    arrays = {n: tf.TensorSpec([size, *shape[1:]], dtype) for n, (shape, dtype) in part.items()}
    tower = device.traced_tower(arrays, examples=num_examples(batch))
    gradients, sums = tf.nest.map_structure(spec_of, tower.structured_outputs)
    update = device.traced_update([gradients] * towers, sums)
    # As in `DataParallel.setup_devices`: a default of one tower for other reasons does not count.
    has_one_tower = (execution.towers or (1 if coupling(step.task) else None)) == 1
    return StepGraphs(
        towers=towers,
        parts=parts,
        tower=tower.graph,
        update=update.graph,
        gradient_sizes=[_bytes(spec) for spec in tf.nest.flatten(gradients)],
        variables=len(step.specs.weights) + len(step.specs.slots),
        arrays=len(batch),
        uses_all_threads=is_single and has_one_tower,
        sums=tuple(device.sums),
    )


class _Device(DataParallelProgram):
    """One of several devices, or the only one; it notes what it would sum over all of them."""

    def __init__(self, step: Step, devices: int, xla: str) -> None:
        strategy = tf.distribute.get_strategy()
        super().__init__(step, strategy, towers=1, xla=xla, accumulation=1)
        self.num_replicas = devices
        self.sums: list[float] = []

    def traced_tower(self, arrays: Mapping[str, tf.TensorSpec], *, examples: int) -> Any:
        """Returns the function that computes the gradients and the sums of a tower.

        Args:
          arrays: the part of the batch of the tower.
          examples: number of examples of the global batch.
        """

        def tower(weights: Any, slots: Any, arrays: Any, number: Any) -> Any:
            gradients, sums = self.part_gradients(
                weights, self._step.loss_scale(slots), arrays, start=0, num_examples=examples,
                step=number, total_weight=tf.constant(1.0),
            )  # fmt: skip
            return gradients[0], sums

        return tf.function(tower, autograph=False).get_concrete_function(
            *_specs_of_state(self._step), arrays, tf.TensorSpec([], tf.int64)
        )

    def traced_update(self, gradients: Sequence[Any], sums: Any) -> Any:
        """Returns the function that computes the new weights and slots.

        Args:
          gradients: specs of the gradients of each tower.
          sums: specs of the sums over all towers.
        """

        def update(weights: Any, slots: Any, gradients: Any, sums: Any, number: Any) -> Any:
            return self.updated(State(weights, slots), gradients, sums, number)

        return tf.function(update, autograph=False).get_concrete_function(
            *_specs_of_state(self._step), list(gradients), sums, tf.TensorSpec([], tf.int64)
        )

    def _all_reduce(self, nest: Any) -> Any:
        @custom_gradient
        def summed(*tensors: tf.Tensor) -> Any:
            self.sums += [_bytes(x) for x in tensors]
            return list(tensors), lambda *gradients: self._all_reduce(list(gradients))

        return tf.nest.pack_sequence_as(nest, summed(*tf.nest.flatten(nest)))


def _specs_of_state(step: Step) -> list[dict[str, tf.TensorSpec]]:
    """Returns [{path: spec of a weight}, {path: spec of a slot}]."""
    return [
        {path: tf.TensorSpec(spec.shape, spec.dtype, path) for path, spec in specs.items()}
        for specs in (step.specs.weights, step.specs.slots)
    ]


def _bytes(tensor: Any) -> float:
    return float(tensor.shape.num_elements() * tensor.dtype.size)
