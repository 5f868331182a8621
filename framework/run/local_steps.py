"""Estimates the memory and the time of a training step on this machine, from its graphs.

one device       all cores compute parts of the batch
data-parallel    every logical device computes its part of the batch, and all-reduces the
                 gradients: step_graphs.py traces the graphs of both
a mesh           every logical device runs the program that DTensor compiles for its shards:
                 `planning/mesh_graphs.py`
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal

from tekso.framework.cores import num_cores
from tekso.framework.costs import graph_work, loop_overlap, this_machine
from tekso.framework.costs.graph_memory import COUNTED_BYTES
from tekso.framework.counting import counted
from tekso.framework.execution.mesh.layouts import MeshLayout
from tekso.framework.execution.mesh.mesh_devices import have_cores
from tekso.framework.execution.mesh.presets import DATA
from tekso.framework.planning import collectives, layout_ranking, mesh_time
from tekso.framework.planning.collectives import Collective
from tekso.framework.planning.compiled_step import compiled_step
from tekso.framework.planning.mesh_graphs import DeviceGraphs, device_graphs
from tekso.framework.primitives.fusion import MarkedFusion, no_fusion
from tekso.framework.run import step_graphs
from tekso.framework.run.step_parts import StepParts, StepPlan, measured_note
from tekso.framework.step import Step
from tekso.framework.units import bytes_text, seconds_text

_WORTH_SAYING = 0.15  # share of the memory of a step


def data_parallel(parts: StepParts, devices: int) -> StepPlan:
    """Returns the step of data-parallel execution, from the graphs that would run.

    Args:
      parts: the parts of the experiment; of another execution, the Params do not count.
      devices: number of logical devices; a single one uses all cores.
    """
    step = Step(parts.task, parts.learner, seed=0, dtype=parts.tree.run.activation_dtype)
    graphs = step_graphs.trace(step, parts.batch, parts.data_parallel, devices=devices)
    if devices == 1:
        return _with_notes(_one_device(step, graphs), graphs.tower, towers=graphs.towers)
    of_device = graphs.of_device()
    sums = of_device.collectives
    plan = _local_devices(
        f"data_parallel, {counted(devices, 'device')}",
        of_device,
        {"weights": _bytes(step.specs.weights), "slots": _bytes(step.specs.slots)},
        (Collective("all-reduce", DATA, len(sums), round(math.fsum(sums))),),
        devices,
        step.dtype,
    )
    return _with_notes(plan, graphs.tower, towers=1)


def _with_notes(plan: StepPlan, tower: Any, *, towers: int) -> StepPlan:
    """Returns a plan with notes on what it does not contain.

    Args:
      plan: the plan.
      tower: graph of a tower.
      towers: number of towers of a device.
    """
    notes = [*plan.notes, *_of_unknown_work(tower)]
    waiting = towers * loop_overlap.waiting_bytes(tower)
    if waiting > _WORTH_SAYING * plan.total_bytes:
        notes.append(
            "iterations of a loop overlap, by how many differs from run to run: the step may need "
            f"up to about {bytes_text(waiting)} more memory; with "
            "parallel_iterations=1, a tf.while_loop needs none of it"
        )
    return dataclasses.replace(plan, notes=tuple(notes))


def _of_unknown_work(graph: Any) -> list[str]:
    """Returns notes if the length of a loop or the size of a tensor is unknown."""
    found = []
    if loops := graph_work.uncounted_loops(graph):
        found.append(
            f"{counted(len(loops), 'loop')} of the step, with those of gradients, run until values "
            "meet a condition, and count as one iteration each: set maximum_iterations of "
            "tf.while_loop"
        )
    if ops := graph_work.unsized_ops(graph):
        found.append(layout_ranking.unknown_sizes_text([op.name for op in ops]))
    return found


def _one_device(step: Step, graphs: step_graphs.StepGraphs) -> StepPlan:
    machine = this_machine.measured()
    seconds, of_cores, _ = graphs.step_time(machine)
    weights, slots = _bytes(step.specs.weights), _bytes(step.specs.slots)
    memory = {
        "weights": math.fsum(weights),
        "slots": math.fsum(slots),
        "tensors of a step": graphs.peak_bytes(weights + slots, machine),
    }
    counted_step = graphs.peak_bytes(weights + slots, machine, least=COUNTED_BYTES)
    cores = counted(graphs.cores, "core")
    notes = (
        f"uses {seconds_text(of_cores)} of CPU time, on {cores}",
        measured_note(step.dtype),
    )
    return StepPlan(
        f"data_parallel, 1 device, {cores}", 1, memory, graphs.flops(), seconds, notes=notes,
        core_seconds=of_cores,
        counted_bytes=_counted(weights + slots) + counted_step,
    )  # fmt: skip


def on_mesh(
    parts: StepParts, layout: MeshLayout, dtype: str, xla: Literal["auto", "none", "clusters"]
) -> StepPlan:
    """Returns the step on a mesh of logical devices, from the program that every device runs.

    Args:
      parts: the parts of the experiment.
      layout: mesh and rules.
      dtype: type in which layers compute.
      xla: as in `MeshSharded.Params`.

    Raises:
      ExecutionError: DTensor cannot compile the step for this layout.
    """
    step = Step(parts.task, parts.learner, seed=0, dtype=dtype)
    devices = layout.mesh.size
    marks = xla == "clusters" or (xla == "auto" and have_cores(None, devices))
    compiled = compiled_step(step, layout, parts.batch, fuse=MarkedFusion() if marks else no_fusion)
    weights, slots = step.specs
    shard = layout.shard_bytes
    state = {
        "weights": [float(shard(s, layout.of_stored_weight(s))) for s in weights.values()],
        "slots": [float(shard(s, layout.of_slot(s))) for s in slots.values()],
    }
    graphs = device_graphs(compiled, variables=len(weights) + len(slots), arrays=len(parts.batch))
    found = _local_devices(
        f"mesh_sharded, {layout_ranking.layout_text(layout)}",
        graphs,
        state,
        collectives.of_compiled(compiled, layout.mesh).collectives,
        devices,
        dtype,
    )
    threads = num_cores() // devices  # of an op, as in `mesh_devices.setup`
    if threads < 2:
        return found
    note = (
        f"an op of a device uses {threads} cores, but is planned on one: the step may be planned "
        "too long"
    )
    return dataclasses.replace(found, notes=(*found.notes, note))


def _local_devices(
    name: str,
    graphs: DeviceGraphs,
    state: dict[str, list[float]],
    exchanged: tuple[Collective, ...],
    devices: int,
    dtype: str,
) -> StepPlan:
    """Returns the step of several logical devices that share the cores and the memory."""
    starts = mesh_time.starts_of(mesh_time.measured_starts(), devices)
    machine = this_machine.measured().side_by_side
    time = mesh_time.mesh_time(graphs, starts, machine, devices=devices, cores=num_cores())
    memory = {name: math.fsum(sizes) for name, sizes in state.items()}
    peak_bytes = functools.partial(graphs.peak_bytes, machine, devices=devices, cores=num_cores())
    memory["tensors of a step"] = peak_bytes()
    counted_bytes = math.fsum(map(_counted, state.values()))
    counted_bytes += peak_bytes(least=COUNTED_BYTES)
    used, started = map(seconds_text, (time.core_seconds, time.start_seconds))
    notes = (
        f"uses {used} of CPU time on {counted(num_cores(), 'core')}, {started} of it to start ops "
        "and for collectives",
        f"all-reduces {counted(len(graphs.collectives), 'tensor')} per step, "
        f"{bytes_text(math.fsum(graphs.collectives))} on each device",
        f"the devices share the memory of the machine: "
        f"{bytes_text(devices * math.fsum(memory.values()))} together",
        measured_note(dtype),
    )
    return StepPlan(
        name, devices, memory, graphs.flops(), time.seconds, notes=notes,
        core_seconds=time.core_seconds, counted_bytes=devices * counted_bytes,
        sharing_devices=devices, collectives=exchanged,
    )  # fmt: skip


def _bytes(specs: Any) -> list[float]:
    return [float(spec.size_bytes) for spec in specs.values()]


def _counted(sizes: list[float]) -> float:
    return math.fsum(size for size in sizes if size >= COUNTED_BYTES)
