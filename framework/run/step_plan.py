"""Estimates the memory and the time of a training step under each execution.

    data_parallel   the cost model, given the work of one replica
    mesh_sharded    the cost model of its mesh and rules
    pipelined       see `pipelined_step.py`

On this machine, local_steps.py sums up the ops of graphs instead of using the cost model. All
figures are estimates; see `planning/cost_model.py` for what the cost model leaves out.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tekso.framework.costs.this_machine import THIS_MACHINE
from tekso.framework.counting import counted
from tekso.framework.execution.accumulation import part_of
from tekso.framework.execution.data_parallel import (
    DataParallel,
    check_size,
    check_statistics,
    num_towers,
)
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.mesh.layouts import MeshLayout
from tekso.framework.execution.mesh_sharded import MeshSharded
from tekso.framework.execution.pipeline.staged_execution import StagedExecution
from tekso.framework.execution.whole_batches import ACCUMULATION, check_whole
from tekso.framework.planning import collectives, layout_ranking, layout_search
from tekso.framework.planning.layout_search import Ranked
from tekso.framework.run import batch_kinds, local_steps, pipelined_step, schedule_check
from tekso.framework.run.step_parts import NO_STARTS, StepParts, StepPlan
from tekso.framework.signature import num_examples

_REDUNDANT = 1.5  # times that products are computed


def step_plan(parts: StepParts, num_devices: int | None = None) -> StepPlan:
    """Returns the step under the execution of the experiment.

    Args:
      parts: the parts of the experiment.
      num_devices: number of devices; None: one, or as many as the execution needs.

    Raises:
      ExecutionError: the step is impossible.
    """
    owner: Any = parts.tree.execution.owner
    if issubclass(owner, StagedExecution):
        found = pipelined_step.pipelined(parts, parts.tree, simulates_memory=True)
        if num_devices in (None, found.devices):
            return found
        own = f"has its own number of devices, {found.devices}: --devices={num_devices} counts only"
        return dataclasses.replace(found, notes=(f"{own} for --auto", *found.notes))
    if issubclass(owner, MeshSharded):
        return parts.of_each_kind(lambda one: _on_mesh(one, num_devices))
    if issubclass(owner, DataParallel):
        return data_parallel(parts, num_devices or 1)
    raise ExecutionError(
        f"the execution {owner.__name__} cannot be planned: set --execution=data_parallel, "
        "mesh_sharded, pipelined or spmd_pipelined"
    )


def _on_mesh(parts: StepParts, num_devices: int | None) -> StepPlan:
    execution = batch_kinds.execution_of(parts.tree)
    accumulated = parts.learner.params.accumulation_steps
    check_whole(parts.task, accumulated, *ACCUMULATION)
    layout = execution.layout(
        parts.task, part_of(parts.batch, accumulated), num_devices=num_devices
    )
    dtype = parts.dtype(execution)
    if parts.device.name == THIS_MACHINE:
        return local_steps.on_mesh(parts, layout, dtype, execution.params.xla)
    return priced(parts, layout, dtype)


def data_parallel(parts: StepParts, devices: int) -> StepPlan:
    """Returns a data-parallel step.

    Args:
      parts: the parts of the experiment; of another execution, the Params do not count.
      devices: number of devices.

    Raises:
      ExecutionError: the step is impossible.
    """
    _check_towers(parts, devices)
    return parts.of_each_kind(lambda one: _data_parallel_batch(one, devices))


def _check_towers(parts: StepParts, devices: int) -> None:
    """Rejects towers as training does: by the first batch, as others may have fewer."""
    execution = parts.data_parallel
    if execution.towers is None:
        return
    examples = num_examples(parts.batch) // (devices * parts.learner.params.accumulation_steps)
    sums = devices == 1 and execution.xla != "step"
    num_towers(execution.towers, parts.task, max(1, examples), cores=1, sums=sums)


def _data_parallel_batch(parts: StepParts, devices: int) -> StepPlan:
    size, accumulated = num_examples(parts.batch), parts.learner.params.accumulation_steps
    check_size(size, replicas=devices, parts=accumulated)
    check_whole(parts.task, accumulated, *ACCUMULATION)
    execution = parts.data_parallel
    if execution.updates is not None:
        updates = execution.updates.instantiate()
        updates.check_parts(parts.task, size, accumulated)
        schedule_check.check_steps_per_call(parts.tree.run.steps_per_call, updates.num_groups)
    else:
        check_statistics(parts.task, replicas=devices, parts=accumulated, xla=execution.xla)
    if parts.device.name == THIS_MACHINE:
        return local_steps.data_parallel(parts, devices)
    ranked = layout_search.price_replicas(
        parts.task, parts.learner, parts.batch, devices,
        device=parts.device.name, activation_dtype=parts.tree.run.activation_dtype,
    )  # fmt: skip
    return of_ranked(ranked, "data_parallel", parts.device.name)


def priced(parts: StepParts, layout: MeshLayout, dtype: str) -> StepPlan:
    """Returns a step on a mesh, as the cost model prices its layout.

    Args:
      parts: the parts of the experiment.
      layout: the layout.
      dtype: type in which layers compute.
    """
    ranked = layout_search.price(
        parts.task, parts.learner, parts.batch, layout,
        device=parts.device.name, activation_dtype=dtype,
    )  # fmt: skip
    return of_ranked(ranked, "mesh_sharded", parts.device.name)


def of_ranked(ranked: Ranked, name: str, device: str) -> StepPlan:
    """Returns a step by the cost model of meshes.

    Args:
      ranked: the layout and its cost.
      name: "data_parallel" or "mesh_sharded".
      device: type of the devices.
    """
    cost, devices = ranked.cost, ranked.layout.mesh.size
    memory = dataclasses.asdict(cost.memory)
    where = counted(devices, "device")
    if name != "data_parallel":
        where = layout_ranking.layout_text(ranked.layout)
        if cost.redundancy > _REDUNDANT:
            where += f"  (computes products {cost.redundancy:.0f} times)"
    notes = tuple(layout_ranking.reasons(ranked))
    if device == THIS_MACHINE:
        notes = (*notes, NO_STARTS)
    return StepPlan(
        f"{name}, {where}", devices, memory, cost.flops, cost.seconds, notes=notes,
        collectives=collectives.of_costs(cost.collectives),
    )  # fmt: skip
