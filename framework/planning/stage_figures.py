"""Computes memory and cost of the stages of a pipeline, and simulates its schedule, from specs.

    cost    of a stage: seconds of its pieces, on a device of type cpu or as measured;
            only ratios matter
    time    forward 1, backward 2 (1 for each gradient if the schedule separates them), plus 1 in a
            backward pass that recomputes the forward pass; a handover takes no time
    bytes   of saved activations: all that the backward pass needs (`saved_bytes`); with
            rematerialisation only the inputs of the stage, and the rest during the backward pass.
            If the schedule separates the gradients, the tensors that the weight gradients need
            stay saved between the two. See `stage_memory`.

Source of the ratio 1 : 2: the backward pass of a product has one product for each of its factors.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tekso.framework.costs.graph_memory import COUNTED_BYTES
from tekso.framework.costs.piece_costs import BACKWARD_COST
from tekso.framework.costs.piece_traces import rows_of
from tekso.framework.execution.pipeline.actions import (
    BACKWARD,
    FORWARD,
    WEIGHT_GRADIENT,
    Kind,
    device_of,
)
from tekso.framework.execution.pipeline.plan import PipelinePlan
from tekso.framework.execution.pipeline.stage_specs import StageSpecs
from tekso.framework.execution.pipeline.stages import Stage, StagePlan, Value
from tekso.framework.learning_step import LearnerBase
from tekso.framework.nests import has_gradient, tensors
from tekso.framework.optimizers.optimizer import state_dtype
from tekso.framework.planning.mesh_figures import MeshFigures
from tekso.framework.planning.pass_times import PassSeconds
from tekso.framework.planning.saved_bytes import SavedBytes, together, working
from tekso.framework.planning.simulator import Timeline, simulate
from tekso.framework.planning.stage_memory import StageBytes, peak_bytes
from tekso.framework.state import State
from tekso.framework.weight_spec import WeightSpec


@dataclasses.dataclass(frozen=True)
class StageFigures:
    """Memory of a stage, and its work for one micro-batch.

    Attributes:
      stage: the stage.
      device: index of the device that runs it, in every replica.
      weights: number of elements of the weights that it stores and updates.
      weight_bytes: bytes of these weights.
      copies: paths of weights that an earlier stage stores; this stage gets copies.
      copy_bytes: bytes of these copies.
      slot_bytes: bytes of the optimizer slots of its weights.
      gradient_bytes: bytes of the summed gradients of all learned weights that it reads.
      learned: paths of these weights.
      flops: floating-point operations of the forward pass.
      handed_bytes: bytes of its outputs to other stages, counted once for each reader.
      returned_bytes: bytes of the gradients of its inputs, for the stages that computed these.
      memory: memory for one micro-batch, with that of the backward pass.
      counted: the same without the tensors that TensorFlow's statistics leave out, see
        `graph_memory.COUNTED_BYTES`.
      counted_state: bytes of weights, copies, slots and gradients, without these tensors.
      forward_cost: cost of the forward pass; for the unit see the module docstring.
      seconds: time of the ops of its passes on a core of this machine; None: not computed.
    """

    stage: Stage
    device: int
    weights: int
    weight_bytes: int
    copies: tuple[str, ...]
    copy_bytes: int
    slot_bytes: int
    gradient_bytes: int
    learned: tuple[str, ...]
    flops: float
    handed_bytes: int
    returned_bytes: int
    memory: StageBytes
    counted: StageBytes
    counted_state: float
    forward_cost: float
    seconds: PassSeconds | None = None

    @property
    def saved_bytes(self) -> float:
        """Bytes that a micro-batch saves for the backward pass, including inputs."""
        return self.memory.saved

    @property
    def state_bytes(self) -> int:
        """Bytes of weights, copies, slots and gradients."""
        held = self.weight_bytes + self.copy_bytes
        return held + self.slot_bytes + self.gradient_bytes

    @property
    def flops_with_backward(self) -> float:
        """Operations of the forward and backward pass, without recomputation."""
        return (1.0 + BACKWARD_COST) * self.flops


@dataclasses.dataclass(frozen=True)
class PipelineFigures:
    """The figures of a pipeline that is not built yet.

    Attributes:
      schedule: name of the schedule.
      plan: plan of the pipeline.
      stages: figures of the stages in model order.
      timeline: the simulated schedule; the unit is the time of the slowest stage for one
        micro-batch.
      held_bytes: for each device, the peak bytes of saved activations.
      peak_bytes: for each device, the peak bytes of saved activations and of the backward pass.
      shared_bytes: memory of a step if all devices share it, as on one host: weights, copies,
        slots, gradients, and the peak of `peak_bytes` over all devices at the same time.
      counted_bytes: the part of it that TensorFlow's statistics count.
      on_mesh: memory of the devices of each stage, if stages are on meshes.
    """

    schedule: str
    plan: PipelinePlan
    stages: tuple[StageFigures, ...]
    timeline: Timeline
    held_bytes: tuple[float, ...]
    peak_bytes: tuple[float, ...]
    shared_bytes: float
    counted_bytes: float
    on_mesh: MeshFigures | None = None

    @property
    def slowest(self) -> int:
        """Index of the most expensive stage."""
        return max(self.stages, key=lambda each: each.forward_cost).stage.index

    @property
    def cost_shares(self) -> list[float]:
        """Share of each stage in the total cost."""
        total = math.fsum(each.forward_cost for each in self.stages)
        return [each.forward_cost / total if total else 0.0 for each in self.stages]

    @property
    def num_devices(self) -> int:
        """Number of devices of all replicas, with those of the meshes of stages."""
        alone = self.plan.num_devices * self.plan.num_replicas
        return alone * self.mesh_size

    @property
    def mesh_size(self) -> int:
        """Number of devices of each stage in a replica."""
        on_mesh = self.on_mesh
        return 1 if on_mesh is None or on_mesh.is_program else on_mesh.layout.mesh.size

    def cost_seconds(self, flops_per_s: float) -> float:
        """Returns the time of a unit of cost, so that the slowest stage computes at this speed."""
        flops = pass_costs(self.plan, [each.flops for each in self.stages])
        costs = pass_costs(self.plan, [each.forward_cost for each in self.stages])
        return (max(flops) or 1.0) / flops_per_s / (max(costs) or 1.0)

    def on_device(self, device: int) -> list[StageFigures]:
        """Returns the stages of a device."""
        return [each for each in self.stages if each.device == device]


def recomputed_share(plan: PipelinePlan) -> float:
    """Returns the share of the micro-batches whose forward pass is computed again."""
    count = plan.num_micro_batches
    return sum(not plan.saves(m) for m in range(count)) / count


def figures_of(
    schedule: str,
    plan: PipelinePlan,
    learner: LearnerBase,
    specs: dict[str, WeightSpec],
    saved: Sequence[SavedBytes],
) -> PipelineFigures:
    """Returns the figures of a pipeline; allocates nothing.

    Args:
      schedule: name of the schedule.
      plan: plan of the pipeline.
      learner: the learner; a stage stores the slots of its weights.
      specs: specs of all weights of the task.
      saved: saved tensors of every piece for one micro-batch.
    """
    owned = StageSpecs(plan.stage_plan, learner, State(specs, learner.slots(specs)))
    trained = learner.trainable(specs)
    of_pieces, costs = iter(saved), iter(plan.piece_costs)
    stages = tuple(
        _figures(
            plan,
            stage,
            owned.specs[stage.index],
            specs,
            trained,
            [next(of_pieces) for _ in stage.piece_names],
            [next(costs) for _ in stage.piece_names],
        )
        for stage in plan.stage_plan.stages
    )
    return of_stages(schedule, plan, stages)


def of_stages(
    schedule: str, plan: PipelinePlan, stages: tuple[StageFigures, ...]
) -> PipelineFigures:
    """Returns the figures of a pipeline with these stages, whose schedule is simulated.

    Args:
      schedule: name of the schedule.
      plan: plan of the pipeline.
      stages: figures of the stages in model order.
    """
    timeline = simulate(
        plan.actions,
        num_devices=plan.num_devices,
        durations=durations(plan, [each.forward_cost for each in stages]),
    )
    memory = [each.memory for each in stages]
    saved_only = [each.saved_only for each in memory]
    shared = peak_bytes(plan, memory, timeline)
    counted = peak_bytes(plan, [each.counted for each in stages], timeline)
    devices = range(plan.num_devices)
    return PipelineFigures(
        schedule,
        plan,
        stages,
        timeline,
        held_bytes=tuple(peak_bytes(plan, saved_only, timeline, device=i) for i in devices),
        peak_bytes=tuple(peak_bytes(plan, memory, timeline, device=i) for i in devices),
        shared_bytes=plan.num_replicas * (shared + sum(each.state_bytes for each in stages)),
        counted_bytes=plan.num_replicas * (counted + sum(each.counted_state for each in stages)),
    )


def pass_costs(plan: PipelinePlan, costs: Sequence[float]) -> list[float]:
    """Returns the cost of the forward and the backward pass of every stage for a micro-batch.

    Args:
      plan: plan of the pipeline.
      costs: cost of the forward pass of every stage.
    """
    again = recomputed_share(plan)
    repeated = [again if stage.outputs else 0.0 for stage in plan.stage_plan.stages]
    return [(1.0 + BACKWARD_COST + r) * c for r, c in zip(repeated, costs, strict=True)]


def durations(plan: PipelinePlan, costs: Sequence[float]) -> dict[tuple[int, Kind], float]:
    """Returns {(stage, kind): time}; the unit is the time of the slowest stage for one micro-batch.

    A stage without outputs (the last) computes nothing in the forward pass of a micro-batch that
    its backward pass recomputes.

    Args:
      plan: plan of the pipeline: whether gradients are separate, and which micro-batches are
        recomputed. All micro-batches get the mean time.
      costs: cost of the forward pass of every stage, in any unit.
    """
    again = recomputed_share(plan)
    repeated = [again if stage.outputs else 0.0 for stage in plan.stage_plan.stages]
    unit = max(pass_costs(plan, costs)) or 1.0
    of_inputs = BACKWARD_COST / 2 if plan.splits_backward else BACKWARD_COST
    found: dict[tuple[int, Kind], float] = {}
    for stage, cost in enumerate(costs):
        found[stage, FORWARD] = (1.0 + repeated[stage] - again) * cost / unit
        found[stage, BACKWARD] = (of_inputs + again) * cost / unit
        if of_inputs < BACKWARD_COST:
            found[stage, WEIGHT_GRADIENT] = (BACKWARD_COST - of_inputs) * cost / unit
    return found


def _figures(
    plan: PipelinePlan,
    stage: Stage,
    owned: State[WeightSpec],
    specs: dict[str, WeightSpec],
    trained: Any,
    saved: Sequence[SavedBytes],
    costs: Sequence[float],
) -> StageFigures:
    stage_plan = plan.stage_plan
    own = owned.weights
    read = {path: rows_of(specs[path], rows) for path, rows in stage.weights.items()}
    copies = {path: spec for path, spec in read.items() if path not in own}
    made = [Value(name, stage.index) for name in stage.outputs]
    shares = tuple(cost / (math.fsum(costs) or 1.0) for cost in costs)
    memory = _of_micro_batch(stage_plan, stage, saved, shares, least=0.0)
    gradients = [
        spec.size * tf.as_dtype(state_dtype(spec)).size
        for path, spec in read.items()
        if path in trained
    ]
    state = [
        *(spec.size_bytes for spec in (*own.values(), *copies.values(), *owned.slots.values())),
        *gradients,
    ]
    readers = {value: sum(value in other.inputs for other in stage_plan.stages) for value in made}
    return StageFigures(
        stage,
        device_of(stage.index, plan.num_devices),
        weights=sum(spec.size for spec in own.values()),
        weight_bytes=sum(spec.size_bytes for spec in own.values()),
        copies=tuple(copies),
        copy_bytes=sum(spec.size_bytes for spec in copies.values()),
        slot_bytes=sum(spec.size_bytes for spec in owned.slots.values()),
        gradient_bytes=sum(gradients),
        learned=tuple(path for path in read if path in trained),
        flops=math.fsum(trace.flops for trace in stage.traces),
        handed_bytes=sum(
            _bytes(stage_plan.values[value]) * count for value, count in readers.items()
        ),
        returned_bytes=sum(
            _bytes(stage_plan.values[value], of_floats=True)
            for value in stage.inputs
            if any(stage_plan.learned(value))
        ),
        memory=memory,
        counted=_of_micro_batch(stage_plan, stage, saved, shares, least=COUNTED_BYTES),
        counted_state=math.fsum(size for size in state if size >= COUNTED_BYTES),
        forward_cost=math.fsum(costs) / (1.0 + BACKWARD_COST),
        seconds=_summed([piece.seconds for piece in saved if piece.seconds is not None]),
    )


def _summed(passes: Sequence[PassSeconds]) -> PassSeconds | None:
    return PassSeconds(*map(math.fsum, zip(*passes, strict=True))) if passes else None


def _of_micro_batch(
    stage_plan: StagePlan,
    stage: Stage,
    saved: Sequence[SavedBytes],
    shares: tuple[float, ...],
    *,
    least: float,
) -> StageBytes:
    """Returns the memory of a stage without tensors of fewer bytes than `least`."""
    for_backward, for_weights = together(saved, least=least)
    inputs = sum(_bytes(stage_plan.values[value], least=least) for value in stage.inputs)
    if not stage_plan.learned_inputs(stage):
        # There are no gradients of inputs, so everything is saved for the gradients of weights.
        made = [stage_plan.values[Value(name, stage.index)] for name in stage.outputs]
        for_weights = for_backward + sum(_bytes(v, of_floats=True, least=least) for v in made)
    more = working(saved, counted=least > 0)
    return StageBytes(inputs, for_backward, for_weights, *more, shares)


def _bytes(nest: Any, *, of_floats: bool = False, least: float = 0.0) -> int:
    specs = [spec for spec in tensors(nest) if has_gradient(spec) or not of_floats]
    sizes = [math.prod(spec.shape.as_list()) * spec.dtype.size for spec in specs]
    return sum(size for size in sizes if size >= least)
