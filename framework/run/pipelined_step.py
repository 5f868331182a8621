"""Estimates the memory and the time of a training step of a pipeline.

They are the figures of its stages and its simulated schedule: by the cost model, or on this
machine by `planning/pipeline_time.py` and `planning/pipeline_memory.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from tekso.framework.cores import num_cores
from tekso.framework.costs import this_machine
from tekso.framework.costs.device_types import DeviceType
from tekso.framework.costs.this_machine import THIS_MACHINE
from tekso.framework.counting import counted
from tekso.framework.execution.mesh.presets import DATA
from tekso.framework.execution.pipeline.staged_execution import StagedExecution
from tekso.framework.execution.pipelined import Pipelined
from tekso.framework.experiment import Tree
from tekso.framework.planning import layout_ranking, pipeline_memory
from tekso.framework.planning.collectives import Collective
from tekso.framework.planning.pipeline_time import measured_starts, pipeline_time
from tekso.framework.planning.rings import ring
from tekso.framework.planning.simulator import simulate
from tekso.framework.planning.stage_figures import (
    PipelineFigures,
    StageFigures,
    durations,
    recomputed_share,
)
from tekso.framework.planning.step_time import StepTime
from tekso.framework.run import pipeline_plan
from tekso.framework.run.step_parts import NO_STARTS, StepParts, StepPlan, measured_note
from tekso.framework.step import Step


def pipelined(parts: StepParts, tree: Tree.Params, *, simulates_memory: bool) -> StepPlan:
    """Returns a step of a pipeline.

    Args:
      parts: the parts of the experiment.
      tree: its Params with the pipeline as the execution.
      simulates_memory: whether the memory of stages on this machine is simulated op by op.

    Raises:
      ExecutionError: the step is impossible.
    """
    execution, device = tree.execution.instantiate(), parts.device
    is_measured = device.name == THIS_MACHINE and _runs_on_this_machine(execution)
    machine = this_machine.measured().side_by_side if is_measured else None
    figures = pipeline_plan.figures_of_parts(
        tree, parts.task, parts.learner, parts.batch, machine=machine
    )
    plan = figures.plan
    dtype = parts.dtype(execution)
    if machine is not None and simulates_memory:
        step = Step(parts.task, parts.learner, seed=0, dtype=dtype)
        figures = pipeline_memory.with_simulated_memory(figures, step, parts.batch, machine)
    itemsize = {"bfloat16": 2, "float16": 2}.get(dtype, 4)
    memory = max(
        (_stage_memory(figures, i, itemsize=itemsize) for i in range(plan.num_devices)),
        key=lambda one: math.fsum(one.values()),
    )
    devices = plan.num_devices * plan.num_replicas
    shares = device.name == THIS_MACHINE and not getattr(execution.params, "workers", None)
    flops = max(
        math.fsum(_flops(figures, stage) for stage in figures.on_device(i))
        for i in range(plan.num_devices)
    )
    time = None
    if machine is not None:
        time = pipeline_time(
            figures, measured_starts(), machine, update_s=parts.update_seconds, cores=num_cores()
        )
    name = "pipelined" if isinstance(execution, Pipelined) else "spmd_pipelined"
    stages = f"{len(figures.stages)} stages × {counted(plan.num_replicas, 'replica')}"
    notes = [*_pipeline_notes(figures, device, time, dtype, shares=shares)]
    if parts.task_batches:
        notes.insert(0, "a step trains one task: this plan is for the largest batch of all tasks")
    return StepPlan(
        f"{name}, {stages}, {plan.num_micro_batches} micro-batches",
        devices,
        memory,
        plan.num_micro_batches * plan.num_parts * flops,
        time.seconds if time else _modelled_seconds(figures, device, memory, itemsize=itemsize),
        figures.timeline.idle_share,
        tuple(notes),
        collectives=tuple(filter(None, [_exchange(figures)])),
        sent_bytes=_sent_bytes(figures),
        core_seconds=time.core_seconds if time else None,
        counted_bytes=figures.counted_bytes if time else None,
        sharing_devices=devices if shares else 1,
        shared_bytes=figures.shared_bytes if shares else None,
    )


def _runs_on_this_machine(execution: StagedExecution) -> bool:
    """Returns whether each stage of a pipeline runs on a device of this process."""
    return isinstance(execution, Pipelined) and not (
        execution.params.workers or execution.stages_on
    )


def _flops(figures: PipelineFigures, stage: StageFigures) -> float:
    """Returns the operations of a stage for a micro-batch, with those that are computed again."""
    again = recomputed_share(figures.plan) if stage.stage.outputs else 0.0
    return stage.flops_with_backward + again * stage.flops


def _modelled_seconds(
    figures: PipelineFigures, device: DeviceType, memory: Mapping[str, float], *, itemsize: int
) -> float:
    """Returns the time by the cost model.

    It is that of the schedule with the slowest stage and the handovers, of the exchange between
    replicas, and of the update. A handover takes the time of the stage that sends most; devices
    compute meanwhile, if the schedule has work for them. With stages on meshes, it is left out.
    """
    plan = figures.plan
    peak = device.flops_per_s["bfloat16" if itemsize == 2 else "float32"] * device.reached
    slowest = max(_flops(figures, stage) for stage in figures.stages) / peak
    bytes_per_s, latency_s = device.link(plan.num_devices * plan.num_replicas)
    handed = max(stage.handed_bytes for stage in figures.stages)
    handover = 0.0
    if figures.on_mesh is None or figures.on_mesh.is_program:
        handover = (handed / bytes_per_s + latency_s) / slowest
    timeline = simulate(
        plan.actions,
        num_devices=plan.num_devices,
        durations=durations(plan, [stage.forward_cost for stage in figures.stages]),
        handover=handover,
    )
    moved = 3 * memory["weights"] + 2 * memory["slots"]
    work = timeline.makespan * slowest * plan.num_parts
    return work + _exchange_seconds(figures, device) + moved / device.memory_bytes_per_s


def _exchange(figures: PipelineFigures) -> Collective | None:
    """Returns what a device exchanges with its copies in the other replicas in a step, if any.

    One program reduces the gradient of each weight in a ring. Otherwise the device of the first
    replica gets the gradients of all others, one after the other, and sends its weights to them:
    each weight by itself.
    """
    plan = figures.plan
    others = plan.num_replicas - 1
    if not others:
        return None
    on_devices = [figures.on_device(i) for i in range(plan.num_devices)]
    if figures.on_mesh is not None and figures.on_mesh.is_program:
        largest = max(sum(stage.gradient_bytes for stage in own) for own in on_devices)
        learned = {path for stage in figures.stages for path in stage.learned}
        return Collective("all-reduce", DATA, len(learned), largest)
    sent = [
        (
            sum(stage.gradient_bytes for stage in own),
            sum(len(stage.learned) for stage in own),
        )
        for own in on_devices
    ]
    largest, number = max(sent)
    return Collective("send", "replica", 2 * others * number, 2 * others * largest)


def _exchange_seconds(figures: PipelineFigures, device: DeviceType) -> float:
    """Returns the time in which replicas exchange gradients and weights."""
    found, plan = _exchange(figures), figures.plan
    if found is None:
        return 0.0
    bytes_per_s, latency_s = device.link(plan.num_devices * plan.num_replicas)
    if found.kind == "send":
        return found.bytes / bytes_per_s + found.count * latency_s
    sent, hops = ring("all-reduce", plan.num_replicas, found.bytes)
    return sent / bytes_per_s + found.count * hops * latency_s


def _pipeline_notes(
    figures: PipelineFigures, device: DeviceType, time: StepTime | None, dtype: str, *, shares: bool
) -> Iterator[str]:
    plan, seconds_text = figures.plan, layout_ranking.seconds_text
    sent = _sent_bytes(figures)
    sent_s = sent / device.link(plan.num_devices * plan.num_replicas)[0]
    idle = 100 * figures.timeline.idle_share
    in_time = "in the time, as far as the schedule waits for it"
    if time is not None:
        in_time = "not in the time: on one machine, they are passed on without a copy"
    elif figures.on_mesh is not None and not figures.on_mesh.is_program:
        in_time = "not in the time"
    yield (
        f"is idle for {idle:.0f}% of the time (the bubble of {figures.schedule}, and waiting for "
        "longer stages)"
    )
    yield (
        f"sends {layout_ranking.bytes_text(sent)} per device, {seconds_text(sent_s)} if nothing is "
        "computed meanwhile; " + in_time
    )
    exchange = _exchange(figures)
    if exchange is not None:
        what = "all-reduces" if exchange.kind == "all-reduce" else "sends and gets"
        in_time = ": " + seconds_text(_exchange_seconds(figures, device)) if time is None else ""
        yield (
            f"{what} {counted(exchange.count, 'tensor')} of gradients and weights of the replicas, "
            f"{layout_ranking.bytes_text(exchange.bytes)}{in_time}"
        )
    if figures.on_mesh is not None:
        yield "every stage is on a mesh: time and memory are those of a stage on one device"
    if shares:
        together = layout_ranking.bytes_text(figures.shared_bytes)
        yield f"the devices share the memory of the machine: {together} together"
    if time is not None:
        used, calls = map(seconds_text, (time.core_seconds, time.start_seconds))
        yield f"uses {used} of CPU time, {calls} of it to call stages from Python"
        yield measured_note(dtype)
    elif device.name == THIS_MACHINE:
        yield NO_STARTS


def _sent_bytes(figures: PipelineFigures) -> float:
    """Returns the bytes that the device that sends most sends to other stages in a step."""
    plan = figures.plan
    most = max(
        math.fsum(s.handed_bytes for s in figures.on_device(i)) for i in range(plan.num_devices)
    )
    return 2 * plan.num_micro_batches * plan.num_parts * most  # outputs, and their gradients


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
