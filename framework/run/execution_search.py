"""Plans the step of an experiment under all executions over a number of devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tekso.framework.costs.this_machine import THIS_MACHINE
from tekso.framework.counting import counted
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.pipeline.staged_execution import StagedExecution
from tekso.framework.execution.pipelined import Pipelined
from tekso.framework.execution.spmd_pipelined import SpmdPipelined
from tekso.framework.planning import layout_search
from tekso.framework.run import local_steps, pipelined_step, step_plan
from tekso.framework.run.step_parts import StepParts, StepPlan
from tekso.framework.signature import num_examples

_PIPELINES: dict[str, type[StagedExecution]] = {
    "pipelined": Pipelined,
    "spmd_pipelined": SpmdPipelined,
}
_MICRO_BATCHES_PER_STAGE = (4, 2, 1)  # the first that divides the batch


def other_plans(parts: StepParts, devices: int) -> tuple[list[StepPlan], dict[str, str]]:
    """Returns steps of all executions over a number of devices, and why others are impossible."""
    found: list[StepPlan] = []
    rejected: dict[str, str] = {}

    def add(name: str, make: Callable[[], StepPlan]) -> None:
        try:
            found.append(make())
        except ExecutionError as error:
            rejected[name] = str(error)

    add("data_parallel", lambda: step_plan.data_parallel(parts, devices))
    if devices > 1:
        add("data_parallel, 1 device", lambda: step_plan.data_parallel(parts, 1))
        add("mesh_sharded", lambda: _best_mesh(parts, devices))
    for name, owner in _PIPELINES.items():
        reasons: dict[str, str] = {}
        for stages in _numbers_of_stages(devices):
            try:
                found.append(_pipeline_over(parts, owner, devices, stages))
            except ExecutionError as error:
                reasons[f"{name}, {stages} stages"] = str(error)
        one = set(reasons.values())
        rejected.update(reasons if len(one) > 1 or len(reasons) < 2 else {name: one.pop()})
    return found, rejected


def not_ranked(devices: int) -> dict[str, str]:
    """Returns executions over a number of devices that `other_plans` leaves out, and why."""
    if not any(stages < devices for stages in _numbers_of_stages(devices)):
        return {}
    return {
        "pipelined, stages on meshes": "execution.stages_on is not ranked, because the time and "
        "the memory of a stage are known for one device only; --mode=inspect_pipeline shows the "
        "weights of such a stage and its collectives"
    }


def _numbers_of_stages(devices: int) -> list[int]:
    return [stages for stages in range(2, devices + 1) if devices % stages == 0]


def _best_mesh(parts: StepParts, devices: int) -> StepPlan:
    ranking = layout_search.rank(
        parts.task, parts.learner, parts.batch, num_devices=devices, device=parts.device.name,
        activation_dtype=parts.tree.run.activation_dtype,
    )  # fmt: skip
    first = next((ranked for ranked in ranking if ranked.layout.mesh.size == devices), None)
    if first is None:
        raise ExecutionError(f"no layout over {counted(devices, 'device')} divides the step")
    best = step_plan.of_ranked(first, "mesh_sharded", parts.device.name)
    dtype = parts.tree.run.activation_dtype

    def planned(one: StepParts) -> StepPlan:
        if parts.device.name == THIS_MACHINE:
            found = local_steps.on_mesh(one, first.layout, dtype, "auto")
            return dataclasses.replace(found, name=best.name)
        if one is parts:
            return best
        return step_plan.priced(one, first.layout, "mesh_sharded", dtype)

    return parts.of_each_task(planned)


def _pipeline_over(
    parts: StepParts, owner: type[StagedExecution], devices: int, stages: int
) -> StepPlan:
    """Returns a step of a pipeline with as many micro-batches as the batch allows."""
    replicas = devices // stages
    size = num_examples(parts.batch) // parts.learner.params.accumulation_steps
    micro = [stages * n for n in _MICRO_BATCHES_PER_STAGE if size % (stages * n * replicas) == 0]
    if not micro:
        raise ExecutionError(
            f"{size} examples do not divide evenly into {stages} micro-batches of "
            f"{counted(replicas, 'replica')}"
        )
    tree = parts.tree.copy()
    tree.execution = owner.Params(
        num_stages=stages, num_replicas=replicas, num_micro_batches=micro[0]
    )
    return pipelined_step.pipelined(parts, tree, simulates_memory=False)
