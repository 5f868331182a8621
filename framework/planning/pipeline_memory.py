"""Simulates the memory of a pipeline whose stages are logical devices of this process.

The program of the pipeline runs its steps, but on devices that compute nothing. A call of a
function allocates and frees what its ops would, from the start of the action to its end:

    program        the real one: its references say how long a tensor lives
    schedule       simulated, with the times of the actions
    ops            `graph_memory.py`; those of actions at the same time take turns
    allocator      `best_fit.py`; the devices share it, and hand tensors over without a copy

So all that the program holds counts: saved tensors of every micro-batch, values on their way, sums
of gradients, and what is new in the update before it replaces the old.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework.costs.best_fit import BestFit
from tekso.framework.costs.graph_memory import COUNTED_BYTES
from tekso.framework.costs.graph_run import HeldMemory
from tekso.framework.costs.graph_walks import needed
from tekso.framework.costs.this_machine import MachineSpeed
from tekso.framework.execution.pipeline.actions import Action, Event, Kind
from tekso.framework.execution.pipeline.graph_cut import Subgraph
from tekso.framework.execution.pipeline.plan import PipelinePlan
from tekso.framework.execution.pipeline.program import PipelineProgram
from tekso.framework.execution.pipeline.stage_backend import DeviceBackend, Part
from tekso.framework.execution.pipeline.stage_backend import Kind as VariableKind
from tekso.framework.execution.pipeline.workers import Worker, Workers
from tekso.framework.planning.pipeline_time import ops_seconds
from tekso.framework.planning.simulated_calls import (
    CallGraph,
    CallParts,
    HeldArray,
    SimulatedCall,
    Span,
    graph_of,
    run_calls,
)
from tekso.framework.planning.simulator import simulate
from tekso.framework.planning.stage_figures import PipelineFigures
from tekso.framework.signature import Signature
from tekso.framework.step import Step
from tekso.framework.symbolic import spec_of
from tekso.framework.weight_spec import WeightSpec

Durations = Mapping[tuple[int, Kind], float]
"""{(stage, kind): seconds of an action}."""

_STEPS = 8
_FIRST_STEPS = 2  # memory that nothing has divided into pieces yet
_VARIATION = 0.1  # of the time of an action, from step to step


def with_simulated_memory(
    figures: PipelineFigures, step: Step, batch: Signature, machine: MachineSpeed
) -> PipelineFigures:
    """Returns figures whose memory of all devices together is simulated.

    Args:
      figures: the figures, with the times of the stages.
      step: steps of the task and the learner.
      batch: signature of the global batch.
      machine: speed of a core, for the times of ops.
    """
    memory = PipelineMemory(step, figures.plan, batch, machine)
    times = {
        (stage.stage.index, kind): seconds
        for stage in figures.stages
        for kind, seconds in ops_seconds(figures, stage, machine).items()
    }
    return dataclasses.replace(
        figures,
        shared_bytes=memory.peak_bytes(times),
        counted_bytes=memory.peak_bytes(times, least=COUNTED_BYTES),
    )


class PipelineMemory:
    """The memory of a pipeline; traces its functions once.

    Args:
      step: steps of the task and the learner.
      plan: plan of the pipeline.
      batch: signature of the global batch.
      machine: speed of a core, for the times of ops.
    """

    def __init__(
        self, step: Step, plan: PipelinePlan, batch: Signature, machine: MachineSpeed
    ) -> None:
        self._devices = _Devices(plan, machine)
        self._batch = {name: np.zeros(shape, dtype) for name, (shape, dtype) in batch.items()}
        compiles = plan.xla == "clusters"
        backends = [
            [_Backend(self._devices, compiles=compiles) for _ in plan.stage_plan.stages]
            for _ in range(plan.num_replicas)
        ]
        self._program = _Program(step, plan, backends, self._devices, batch)

    def peak_bytes(self, durations: Durations, *, least: float = 0.0) -> float:
        """Returns the largest number of bytes in use during a few steps.

        Args:
          durations: times of actions; only ratios matter.
          least: tensors of fewer bytes do not count.
        """
        self._devices.start(durations, least)
        for step in range(_STEPS):
            if step == _FIRST_STEPS:
                self._devices.arrays.forget_peak()
            self._program.train_step(self._batch, step)
        return self._devices.arrays.peak


class _Variable:
    """A variable of the simulation."""

    def __init__(self, name: str, spec: WeightSpec) -> None:
        self.name, self.shape = name, tf.TensorShape(spec.shape)
        self.dtype = tf.as_dtype(spec.dtype)

    def _handle(self) -> Any:
        return tf.raw_ops.VarHandleOp(dtype=self.dtype, shape=self.shape, shared_name=self.name)

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> tf.Tensor:
        return self.read_value()

    def read_value(self) -> tf.Tensor:
        """See tf.Variable; in a graph."""
        return tf.raw_ops.ReadVariableOp(resource=self._handle(), dtype=self.dtype)

    def assign(self, value: Any, read_value: bool = False) -> Any:
        """See tf.Variable; in a graph."""
        value = tf.convert_to_tensor(value, self.dtype)
        return tf.raw_ops.AssignVariableOp(resource=self._handle(), value=value)

    def assign_add(self, value: Any, read_value: bool = False) -> Any:
        """See tf.Variable; in a graph."""
        return tf.raw_ops.AssignAddVariableOp(resource=self._handle(), value=value)


class _Backend(DeviceBackend):
    """A device that computes nothing."""

    def __init__(self, devices: _Devices, *, compiles: bool) -> None:
        super().__init__("CPU:0", compiles=compiles)
        self.fuse_update = self.fuse  # what shares a trace is inlined when it runs
        self._devices = devices

    def put(self, array: Any) -> Any:
        """See `StageBackend`."""
        memory = HeldMemory(self._devices.arrays)
        if array.nbytes >= max(self._devices.least, 1):
            memory.take(array.nbytes)
        return HeldArray(spec_of(array), memory)

    def scalar(self, value: Any, dtype: tf.DType) -> Any:
        """See `StageBackend`."""
        return tf.cast(value, dtype)

    def take(self, sent: Any) -> Any:
        """See `StageBackend`."""
        return sent

    def local(self, x: Any) -> Any:
        """See `StageBackend`; the sums of a micro-batch are zeros."""
        return tf.zeros(x.spec.shape, x.spec.dtype) if isinstance(x, HeldArray) else x

    def variable(self, part: Part, spec: WeightSpec, kind: VariableKind) -> Any:
        """See `StageBackend`."""
        return self._devices.variable(spec)

    def read(self, variable: Any) -> Any:
        """See `StageBackend`."""
        return HeldArray(spec_of(variable), None)

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """See `StageBackend`."""
        compiled: Callable[..., Any] = tf.function(function, autograph=False)
        return compiled

    def trace(self, function: Callable[..., Any], *args: Any) -> None:
        """See `StageBackend`; a call traces it."""

    def call(self, function: Any, *args: Any) -> Any:
        """See `StageBackend`."""
        if isinstance(function, Subgraph):
            (known,) = args
            given = [known[name] for name in function.feeds]
            parts = CallParts(function.ops, function.feeds, function.outputs)
            call = self._devices.called(function, parts, given)
            return function.arranged(call.outputs)
        if function is tf.add_n:
            function = self._devices.add_n
        specs = tf.nest.map_structure(lambda x: x.spec if isinstance(x, HeldArray) else x, args)
        concrete = function.get_concrete_function(*specs)
        names = [tensor.name for tensor in concrete.inputs]
        parts = CallParts(needed(concrete.graph), names, concrete.outputs)
        call = self._devices.called(concrete, parts, tf.nest.flatten(args))
        structure = concrete.structured_outputs
        return tf.nest.pack_sequence_as(structure, call.outputs) if call.outputs else structure


class _Devices:
    """The devices, which share their memory, and the calls that they run.

    Attributes:
      arrays: the allocator.
      variables: memory of each variable that has some, by name.
      least: tensors of fewer bytes do not count.
      add_n: tf.add_n as a function that can be traced.
    """

    def __init__(self, plan: PipelinePlan, machine: MachineSpeed) -> None:
        self._plan, self._machine = plan, machine
        self.arrays, self.least = BestFit(), 0.0
        self.variables: dict[str, HeldMemory] = {}
        self.add_n = tf.function(tf.add_n, autograph=False)
        self._sizes: dict[str, float] = {}
        self._graphs: dict[tuple[Any, float], CallGraph] = {}  # by function and `least`
        self._random = random.Random(0)
        self._calls: list[SimulatedCall] = []
        self._durations: Durations = {}

    def start(self, durations: Durations, least: float) -> None:
        """Begins a simulation, with the variables in memory."""
        self.variables = {}
        self.arrays, self.least, self._random = BestFit(), least, random.Random(0)
        self._durations = durations
        for name in self._sizes:
            self._place(name)

    def variable(self, spec: WeightSpec) -> _Variable:
        """Creates a variable."""
        name = f"variable{len(self._sizes)}"
        self._sizes[name] = float(spec.size_bytes)
        self._place(name)
        return _Variable(name, spec)

    def _place(self, name: str) -> None:
        if self._sizes[name] >= max(self.least, 1):
            self.variables[name] = HeldMemory(self.arrays, self._sizes[name])

    def called(self, function: Any, parts: CallParts, given: Sequence[Any]) -> SimulatedCall:
        """Begins a call of a function that consists of these parts."""
        key = function, self.least
        if key not in self._graphs:
            self._graphs[key] = graph_of(parts, self._machine, self.least)
        call = SimulatedCall(self.arrays, self.variables, self._graphs[key], given)
        self._calls.append(call)
        return call

    def new_calls(self) -> list[SimulatedCall]:
        """Returns the calls that have begun since the last time."""
        found, self._calls = self._calls, []
        return found

    def events(self) -> Iterator[tuple[Worker, Event]]:
        """Yields the actions of a schedule; times vary a little, as they do in steps."""
        plan = self._plan
        for replica in range(plan.num_replicas):
            times = {
                key: max(time, 1e-9) * self._random.uniform(1.0 - _VARIATION, 1.0 + _VARIATION)
                for key, time in self._durations.items()
            }
            timeline = simulate(plan.actions, num_devices=plan.num_devices, durations=times)
            for event in timeline.events:
                yield (replica, event.action.device), event


class _Workers(Workers):
    """Runs calls at the same time, in simulated time."""

    def __init__(self, devices: _Devices) -> None:
        self._devices = devices

    def map(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """See `Workers`."""
        found = [function(item) for item in items]
        calls = self._devices.new_calls()
        run_calls(Span(0.0, 1.0, functools.partial(list, [call])) for call in calls)
        return found

    def run(
        self, orders: Any, perform: Callable[[Worker, Action], None], **others: Any
    ) -> dict[Worker, list[Event]]:
        """See `Workers`."""
        found: dict[Worker, list[Event]] = {worker: [] for worker in orders}

        def begin(worker: Worker, action: Action) -> list[SimulatedCall]:
            perform(worker, action)
            return self._devices.new_calls()

        spans = []
        for worker, event in self._devices.events():
            found[worker].append(event)
            of_action = functools.partial(begin, worker, event.action)
            spans.append(Span(event.start, event.end, of_action))
        run_calls(spans)
        return found


class _Program(PipelineProgram):
    """The program on devices that compute nothing."""

    def __init__(
        self, step: Step, plan: PipelinePlan, backends: Any, devices: _Devices, batch: Signature
    ) -> None:
        super().__init__(step, plan, backends, batch=batch, replan=lambda _: plan)
        self._workers = _Workers(devices)
        self._devices = devices
        self.assign(lambda key, where: np.zeros((), np.int64))
