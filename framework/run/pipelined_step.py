"""Estimates the memory and the time of a training step of a pipeline.

    stages on devices    the figures of the stages, and their simulated schedule
    stages on meshes     the same with the share of a device (planning/mesh_stages.py)

On this machine, `planning/pipeline_time.py` sums up the ops of stages, and
`planning/pipeline_memory.py` simulates their memory; the time of stages on meshes is that of their
programs (`planning/mesh_stage_graphs.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tekso.framework.cores import num_cores
from tekso.framework.costs import this_machine
from tekso.framework.costs.device_types import DeviceType
from tekso.framework.costs.this_machine import THIS_MACHINE
from tekso.framework.counting import counted
from tekso.framework.execution.mesh import activations
from tekso.framework.execution.mesh.layouts import MeshLayout
from tekso.framework.execution.pipeline.staged_execution import StagedExecution
from tekso.framework.execution.pipelined import Pipelined
from tekso.framework.experiment import Tree
from tekso.framework.planning import (
    collectives,
    layout_ranking,
    mesh_time,
    pipeline_memory,
)
from tekso.framework.planning.mesh_stage_graphs import mesh_stage_graphs
from tekso.framework.planning.mesh_stages import MeshStages
from tekso.framework.planning.pipeline_time import (
    measured_starts,
    pipeline_time,
)
from tekso.framework.planning.rings import WEIGHTS
from tekso.framework.planning.simulator import simulate
from tekso.framework.planning.stage_figures import PipelineFigures, durations, pass_costs
from tekso.framework.planning.step_time import StepTime
from tekso.framework.run import batch_kinds, pipeline_exchange, pipeline_plan
from tekso.framework.run.batch_kinds import ONE_KIND
from tekso.framework.run.step_parts import NO_STARTS, StepParts, StepPlan, measured_note
from tekso.framework.step import Step
from tekso.framework.units import bytes_text, seconds_text


def pipelined(
    parts: StepParts,
    tree: Tree.Params,
    *,
    simulates_memory: bool,
    layouts: Sequence[MeshLayout] = (),
) -> StepPlan:
    """Returns a step of a pipeline.

    Args:
      parts: the parts of the experiment.
      tree: its Params with the pipeline as the execution.
      simulates_memory: whether the memory of stages on this machine is simulated op by op.
      layouts: meshes of one size for the stages, from which the fastest that fits is chosen; empty:
        the stages are where the Params say.

    Raises:
      ExecutionError: the step is impossible.
    """
    if parts.kinds.are_buckets:
        if len(layouts) > 1:  # a run has one layout
            layouts = [_layout_of_largest(parts, tree, layouts)]
        plan = functools.partial(
            pipelined, tree=tree, simulates_memory=simulates_memory, layouts=layouts
        )
        return parts.of_each_kind(plan)
    execution, device = batch_kinds.execution_of(tree), parts.device
    own = pipeline_plan.stage_layout(execution, parts.task, parts.batch, parts.learner)
    if own is not None:
        learned = parts.learner.trainable(parts.task.specs()).keys()
        micro = execution.micro_batch(parts.batch, parts=parts.learner.params.accumulation_steps)
        activations.of_task(parts.task, micro, trained=learned)  # an error, if there is one
    layouts = layouts or ([own] if own is not None else [])
    is_local = isinstance(execution, Pipelined) and not execution.params.workers
    is_here = device.name == THIS_MACHINE and is_local
    machine = this_machine.measured().side_by_side if is_here and not layouts else None
    base = pipeline_plan.figures_of_parts(
        tree, parts.task, parts.learner, parts.batch, machine=machine
    )
    dtype = parts.dtype(execution)
    if layouts:
        return _on_meshes(parts, execution, base, layouts, is_here=is_here)
    figures = base
    if machine is not None and simulates_memory:
        step = Step(parts.task, parts.learner, seed=0, dtype=dtype)
        figures = pipeline_memory.with_simulated_memory(base, step, parts.batch, machine)
    time = None
    if machine is not None:
        time = pipeline_time(
            figures,
            measured_starts(),
            machine,
            update_s=parts.update_seconds,
            cores=num_cores(),
        )
    return _pipelined_step(parts, execution, base, figures, time)


class _OnMesh(NamedTuple):
    """A step with all stages on meshes of one layout, by the cost model.

    Attributes:
      step: the step.
      layout: the layout.
      figures: figures of the devices of the meshes.
    """

    step: StepPlan
    layout: MeshLayout
    figures: PipelineFigures


def _fastest(
    parts: StepParts, execution: Pipelined, base: PipelineFigures, layouts: Sequence[MeshLayout]
) -> _OnMesh:
    """Returns the step with the layout that the cost model chooses.

    Args:
      parts: the parts of the experiment.
      execution: the pipeline.
      base: figures with a device for each stage.
      layouts: the layouts.
    """
    device, dtype = parts.device, parts.dtype(execution)
    stages = MeshStages(
        base, parts.learner, parts.task.specs(), device,
        cost_s=base.cost_seconds(_flops_per_s(device, dtype)), dtype=dtype,
    )  # fmt: skip
    found = [
        _OnMesh(_pipelined_step(parts, execution, base, figures, None), layout, figures)
        for layout in layouts
        for figures in [stages.on(layout)]
    ]
    return min(
        found, key=lambda one: (one.step.bytes_together > device.memory_bytes, one.step.seconds)
    )


def _layout_of_largest(
    parts: StepParts, tree: Tree.Params, layouts: Sequence[MeshLayout]
) -> MeshLayout:
    """Returns the layout that the cost model chooses for the largest batch."""
    largest = dataclasses.replace(parts, kinds=ONE_KIND)
    base = pipeline_plan.figures_of_parts(
        tree, parts.task, parts.learner, parts.batch, machine=None
    )
    return _fastest(largest, batch_kinds.execution_of(tree), base, layouts).layout


def _on_meshes(
    parts: StepParts,
    execution: Pipelined,
    base: PipelineFigures,
    layouts: Sequence[MeshLayout],
    *,
    is_here: bool,
) -> StepPlan:
    """Returns the step with the layout that the cost model chooses.

    Args:
      parts: the parts of the experiment.
      execution: the pipeline.
      base: figures with a device for each stage.
      layouts: the layouts.
      is_here: whether the time is that of the programs of the meshes, on this machine.
    """
    chosen, layout, figures = _fastest(parts, execution, base, layouts)
    if not is_here:
        return chosen
    step = Step(parts.task, parts.learner, seed=0, dtype=parts.dtype(execution))
    graphs = mesh_stage_graphs(step, base.plan, layout, parts.batch)
    time = mesh_time.mesh_time(
        graphs,
        mesh_time.starts_of(mesh_time.measured_starts(), layout.mesh.size),
        this_machine.measured().side_by_side,
        devices=layout.mesh.size,
        cores=num_cores(),
    )
    return _pipelined_step(parts, execution, base, figures, time)


def _flops_per_s(device: DeviceType, dtype: str) -> float:
    return device.flops_per_s["bfloat16" if _itemsize(dtype) == 2 else "float32"] * device.reached


def _itemsize(dtype: str) -> int:
    return {"bfloat16": 2, "float16": 2}.get(dtype, 4)


def _pipelined_step(
    parts: StepParts,
    execution: StagedExecution,
    base: PipelineFigures,
    figures: PipelineFigures,
    time: StepTime | None,
) -> StepPlan:
    """Returns a step of a pipeline.

    Args:
      parts: the parts of the experiment.
      execution: the pipeline.
      base: figures with a device for each stage.
      figures: figures of the devices that the stages are on.
      time: time of a step on this machine; None: that of the cost model.
    """
    plan, device, dtype = figures.plan, parts.device, parts.dtype(execution)
    memory = max(
        (_stage_memory(figures, i, itemsize=_itemsize(dtype)) for i in range(plan.num_devices)),
        key=lambda one: math.fsum(one.values()),
    )
    devices = figures.num_devices
    shares = device.name == THIS_MACHINE and not getattr(execution.params, "workers", None)
    costs = pass_costs(plan, [stage.flops for stage in figures.stages])
    flops = max(
        math.fsum(costs[stage.stage.index] for stage in figures.on_device(i))
        for i in range(plan.num_devices)
    )
    cost_s = base.cost_seconds(_flops_per_s(device, dtype))
    idle_share = figures.timeline.idle_share
    if time is not None and figures.mesh_size > 1:
        idle_share = 1.0 - 1.0 / (plan.num_devices * plan.num_replicas)
    name = "pipelined" if isinstance(execution, Pipelined) else "spmd_pipelined"
    of_stages = f"{len(figures.stages)} stages × {counted(plan.num_replicas, 'replica')}"
    if figures.mesh_size > 1:
        of_stages += f" × {figures.mesh_size} devices"
    count = str(plan.num_micro_batches)
    if execution.batches_differ and plan.num_micro_batches < execution.params.num_micro_batches:
        count = f"at most {execution.params.num_micro_batches}"
    where = f"{name}, {of_stages}, {count} micro-batches"
    if plan.rematerialize != "none":
        where += f", rematerialize={plan.rematerialize}"
    if figures.on_mesh is not None and figures.mesh_size > 1:
        where += f", {layout_ranking.layout_text(figures.on_mesh.layout)}"
    notes = [*_pipeline_notes(figures, device, time, dtype, shares=shares)]
    if parts.kinds.note:
        notes.insert(0, parts.kinds.note)
    if parts.kinds.kinds:
        notes.insert(0, "a step trains one task: this plan is for the largest batch of all tasks")
    return StepPlan(
        where,
        devices,
        memory,
        plan.num_micro_batches * plan.num_parts * flops,
        time.seconds if time else _modelled_seconds(figures, device, memory, cost_s=cost_s),
        idle_share,
        tuple(notes),
        collectives=(
            *collectives.of_costs(pipeline_exchange.of_meshes(figures)),
            *filter(None, [pipeline_exchange.exchange(figures)]),
        ),
        sent_bytes=pipeline_exchange.sent_bytes(figures),
        core_seconds=time.core_seconds if time else None,
        counted_bytes=figures.counted_bytes if time and figures.mesh_size == 1 else None,
        sharing_devices=devices if shares else 1,
        shared_bytes=figures.shared_bytes if shares else None,
    )


def _modelled_seconds(
    figures: PipelineFigures, device: DeviceType, memory: Mapping[str, float], *, cost_s: float
) -> float:
    """Returns the time by the cost model.

    It is that of the schedule with the slowest stage and the handovers, of the exchange between
    replicas, of gathers of weights on meshes, and of the update. A handover takes the time of the
    stage that sends most; devices compute meanwhile, if the schedule has work for them.

    Args:
      figures: figures of the pipeline.
      device: type of the devices.
      memory: bytes of a device.
      cost_s: seconds of a unit of the costs of stages.
    """
    plan = figures.plan
    costs = [stage.forward_cost for stage in figures.stages]
    slowest = cost_s * max(pass_costs(plan, costs))
    bytes_per_s, latency_s = device.link(figures.num_devices)
    handed = max(stage.handed_bytes for stage in figures.stages)
    timeline = simulate(
        plan.actions,
        num_devices=plan.num_devices,
        durations=durations(plan, costs),
        handover=(handed / bytes_per_s + latency_s) / slowest,
    )
    moved = 3 * memory["weights"] + 2 * memory["slots"]
    work = timeline.makespan * slowest * plan.num_parts
    gathers = math.fsum(
        one.seconds for one in pipeline_exchange.of_meshes(figures) if one.of == WEIGHTS
    )
    exchange = pipeline_exchange.exchange_seconds(figures, device)
    return work + exchange + gathers + moved / device.memory_bytes_per_s


def _pipeline_notes(
    figures: PipelineFigures, device: DeviceType, time: StepTime | None, dtype: str, *, shares: bool
) -> Iterator[str]:
    on_meshes = figures.mesh_size > 1
    sent = pipeline_exchange.sent_bytes(figures)
    sent_s = sent / device.link(figures.num_devices)[0]
    if on_meshes and time is not None:
        yield "its stages compute one after the other, as meshes of one process do"
    else:
        idle = 100 * figures.timeline.idle_share
        yield (
            f"is idle for {idle:.0f}% of the time (the bubble of {figures.schedule}, and waiting "
            "for longer stages)"
        )
    in_time = "in the time, as far as the schedule waits for it"
    if time is not None:
        in_time = "not in the time: on one machine, they are passed on without a copy"
    yield (
        f"sends {bytes_text(sent)} per device, {seconds_text(sent_s)} if nothing is "
        "computed meanwhile; " + in_time
    )
    for one in pipeline_exchange.of_meshes(figures):
        in_time = ", " + seconds_text(one.seconds) if time is None else ""
        yield layout_ranking.collective_text(one) + in_time
    exchange = pipeline_exchange.exchange(figures)
    if exchange is not None:
        what = "all-reduces" if exchange.kind == "all-reduce" else "sends and gets"
        in_time = (
            ": " + seconds_text(pipeline_exchange.exchange_seconds(figures, device))
            if time is None
            else ""
        )
        yield (
            f"{what} {counted(exchange.count, 'tensor')} of gradients and weights of the replicas, "
            f"{bytes_text(exchange.bytes)}{in_time}"
        )
    if shares:
        together = bytes_text(figures.shared_bytes)
        yield f"the devices share the memory of the machine: {together} together"
    if time is not None:
        used, calls = map(seconds_text, (time.core_seconds, time.start_seconds))
        started = "to start and exchange" if on_meshes else "to call stages from Python"
        yield f"uses {used} of CPU time, {calls} of it {started}"
        yield measured_note(dtype)
        if on_meshes:
            yield (
                "operations and memory of a device come from the cost model of layouts, and the "
                "time from the programs of the meshes"
            )
    elif device.name == THIS_MACHINE:
        yield NO_STARTS


def _stage_memory(figures: PipelineFigures, device: int, *, itemsize: int) -> dict[str, float]:
    own = figures.on_device(device)
    weights = math.fsum(stage.weight_bytes for stage in own)
    used = math.fsum(stage.copy_bytes for stage in own)
    if itemsize == 2:  # all weights are cast once per step; nearly all of them are float32
        used = (weights + used) / 2
    return {
        "weights": weights,
        "used_weights": used,
        "slots": math.fsum(stage.slot_bytes for stage in own),
        "gradients": math.fsum(stage.gradient_bytes for stage in own),
        "activations": figures.held_bytes[device],
        "workspace": figures.peak_bytes[device] - figures.held_bytes[device],
    }
