"""Plans the step of an experiment under all executions over a number of devices."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator

from tekso.framework.costs.this_machine import THIS_MACHINE
from tekso.framework.counting import counted
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.mesh.layouts import MeshLayout
from tekso.framework.execution.pipeline.staged_execution import StagedExecution
from tekso.framework.execution.pipelined import Pipelined
from tekso.framework.execution.spmd_pipelined import SpmdPipelined
from tekso.framework.experiment import Tree
from tekso.framework.planning import layout_search
from tekso.framework.planning.layout_search import Ranked
from tekso.framework.run import batch_kinds, local_steps, step_plan
from tekso.framework.run.divided_losses import Division, division_of
from tekso.framework.run.divided_plan import DividedStep
from tekso.framework.run.fitting_steps import enough, first_that_fits
from tekso.framework.run.pipelined_step import pipelined
from tekso.framework.run.step_parts import StepParts, StepPlan
from tekso.framework.signature import Signature, num_examples

_PIPELINES: dict[str, type[StagedExecution]] = {
    "pipelined": Pipelined,
    "spmd_pipelined": SpmdPipelined,
}
_NOT_REPEATED = 1.01  # smallest redundancy of a layout by which devices repeat products
_PER_STAGE = 4  # micro-batches; the number that is nearest and divides the batch
_COMPARED = 10  # layouts of the meshes of stages: of the fastest, and of those with least memory


def other_plans(
    parts: StepParts, devices: int, of_division: Callable[[Division], DividedStep]
) -> tuple[list[StepPlan], dict[str, str]]:
    """Returns steps of all executions over a number of devices, and why others are impossible.

    A step that does not fit is planned again: with more accumulation steps, or as a pipeline with
    more micro-batches or rematerialization.

    Args:
      parts: the parts of the experiment.
      devices: number of devices.
      of_division: finds out whether the parts of a batch have the loss of the whole batch.
    """
    found: list[StepPlan] = []
    rejected: dict[str, str] = {}

    def add(name: str, make: Callable[[], StepPlan], to: dict[str, str] = rejected) -> None:
        try:
            found.append(make())
        except ExecutionError as error:
            to[name] = str(error)

    def replicas(number: int) -> StepPlan:
        def find(count: int) -> DividedStep:
            return of_division(division_of(parts.data_parallel, number, accumulation=count))

        plan = functools.partial(step_plan.data_parallel, devices=number)
        return _accumulated(parts, number, plan, find)

    def on_mesh() -> StepPlan:
        plan = functools.partial(_best_mesh, devices=devices)
        return _accumulated(parts, 0, plan, lambda count: of_division(Division(1, count)))

    add("data_parallel", lambda: replicas(devices))
    if devices > 1:
        add("data_parallel, 1 device", lambda: replicas(1))
        add("mesh_sharded", on_mesh)
    for name, owner in _PIPELINES.items():
        reasons: dict[str, str] = {}
        for stages in _divisors(devices):
            text = f"{name}, {stages} stages"
            add(text, functools.partial(_pipeline_over, parts, owner, devices, stages), reasons)
            for size in _divisors(devices // stages) if owner is Pipelined else ():
                of_size = functools.partial(_stages_on_meshes, parts, devices, stages, size)
                add(f"{text} on meshes of {size} devices", of_size, reasons)
        one = set(reasons.values())
        rejected.update(reasons if len(one) > 1 or len(reasons) < 2 else {name: one.pop()})
    return found, rejected


def _accumulated(
    parts: StepParts,
    replicas: int,
    plan: Callable[[StepParts], StepPlan],
    find: Callable[[int], DividedStep],
) -> StepPlan:
    """Returns a step, with more accumulation steps if it does not fit, or fewer if it must.

    Args:
      parts: the parts of the experiment.
      replicas: number of data-parallel devices; 0: a mesh.
      plan: plans the step.
      find: finds out whether a number of accumulation steps computes the loss of the whole batch.
    """
    size, own = num_examples(parts.batch), parts.learner.params.accumulation_steps

    def planned(count: int) -> StepPlan:
        step = plan(parts if count == own else parts.with_accumulation(count))
        if count != own:
            step = dataclasses.replace(step, name=f"{step.name}, accumulation_steps={count}")
        return _accepted(step, find(count))

    counts = [n for n in _divisors(size, 1) if size % (n * max(1, replicas)) == 0]
    count = next((n for n in reversed(counts) if own % n == 0), own)
    step, shards = planned(count), not replicas

    def others() -> Iterator[tuple[str, Callable[[], StepPlan]]]:
        for n in enough(step, parts.device, count, counts):
            yield f"accumulation_steps={n}", functools.partial(planned, n)

    return first_that_fits(step, parts.device, others(), shards=shards)


def _accepted(step: StepPlan, found: DividedStep) -> StepPlan:
    """Returns a step, with warnings about its loss.

    Raises:
      ExecutionError: training would refuse it for its loss.
    """
    if found.problem:
        raise ExecutionError(f"refused: {found.problem}")
    return dataclasses.replace(step, notes=(*step.notes, *found.warnings))


def _divisors(number: int, least: int = 2) -> list[int]:
    """Returns the divisors of a number that are at least `least`, ascending."""
    return [n for n in range(least, number + 1) if number % n == 0]


def _ranking(parts: StepParts, batch: Signature, devices: int) -> list[Ranked]:
    """Returns the layouts over a number of devices for a batch, the best first."""
    ranking = layout_search.rank(
        parts.task, parts.learner, batch, num_devices=devices, device=parts.device.name,
        activation_dtype=parts.tree.run.activation_dtype,
    )  # fmt: skip
    found = [ranked for ranked in ranking if ranked.layout.mesh.size == devices]
    if not found:
        raise ExecutionError(f"no layout over {counted(devices, 'device')} divides the step")
    return found


def _best_mesh(parts: StepParts, devices: int) -> StepPlan:
    over_all = _ranking(parts, parts.batch, devices)
    first = over_all[0]
    best = _mesh_plan(parts, first)
    if parts.device.name != THIS_MACHINE or first.cost.redundancy < _NOT_REPEATED:
        return best
    # The ranking ignores that ops take time to start and that the devices share the cores, so a
    # layout by which every device computes its own part may be faster here.
    other = next((r for r in over_all if r.cost.redundancy < _NOT_REPEATED), None)
    if other is None:
        return best
    return min(best, _mesh_plan(parts, other), key=lambda step: step.seconds)


def _mesh_plan(parts: StepParts, ranked: Ranked) -> StepPlan:
    """Returns the step of a layout of a ranking."""
    found = step_plan.of_ranked(ranked, "mesh_sharded", parts.device.name)
    dtype = parts.tree.run.activation_dtype

    def planned(one: StepParts) -> StepPlan:
        if parts.device.name == THIS_MACHINE:
            local = local_steps.on_mesh(one, ranked.layout, dtype, "auto")
            return dataclasses.replace(local, name=found.name)
        if one is parts:
            return found
        return step_plan.priced(one, ranked.layout, dtype)

    return parts.of_each_kind(planned)


def _pipeline_over(
    parts: StepParts, owner: type[StagedExecution], devices: int, stages: int
) -> StepPlan:
    """Returns a step of a pipeline."""

    def plan(tree: Tree.Params) -> StepPlan:
        return pipelined(parts, tree, simulates_memory=False)

    return _pipeline(parts, owner, stages, devices // stages, plan, shards=False)


def _stages_on_meshes(parts: StepParts, devices: int, stages: int, size: int) -> StepPlan:
    """Returns the fastest step of a pipeline whose stages are on meshes of `size` devices.

    The layouts that are compared are the fastest for the whole model on one such mesh, and those
    with the least memory.
    """

    def layouts(tree: Tree.Params) -> list[MeshLayout]:
        # The accumulation steps divide this batch: the search computes a micro-batch.
        batch = batch_kinds.execution_of(tree).micro_batch(parts.batch, parts=1)
        ranking = _ranking(parts, batch, size)
        fast = sorted(ranking, key=lambda ranked: ranked.cost.seconds)[:_COMPARED]
        small = sorted(ranking, key=lambda ranked: ranked.cost.memory.total)[:_COMPARED]
        return list(dict.fromkeys(ranked.layout for ranked in (*fast, *small)))

    def plan(tree: Tree.Params) -> StepPlan:
        return pipelined(parts, tree, simulates_memory=False, layouts=layouts(tree))

    return _pipeline(parts, Pipelined, stages, devices // stages // size, plan, shards=True)


def _pipeline(
    parts: StepParts,
    owner: type[StagedExecution],
    stages: int,
    replicas: int,
    plan: Callable[[Tree.Params], StepPlan],
    *,
    shards: bool,
) -> StepPlan:
    """Returns a step of a pipeline, with the settings with which it fits, if there are any.

    Args:
      parts: the parts of the experiment.
      owner: the execution.
      stages: number of stages.
      replicas: number of replicas.
      plan: plans the step, given Params with the pipeline as the execution.
      shards: whether the stages are on meshes.
    """
    size, device = num_examples(parts.batch), parts.device
    size //= parts.learner.params.accumulation_steps
    if size % replicas:
        raise ExecutionError(
            f"{size} examples do not divide evenly over {counted(replicas, 'replica')}"
        )
    counts = _divisors(size // replicas, 1)
    count = min(counts, key=lambda n: abs(math.log(n / (_PER_STAGE * stages))))

    @functools.cache
    def planned(count: int, rematerialize: str) -> StepPlan:
        tree = parts.tree.copy()
        tree.execution = owner.Params(
            num_stages=stages, num_replicas=replicas, num_micro_batches=count
        ).set(rematerialize=rematerialize)
        return plan(tree)

    step = planned(count, "none")

    def others() -> Iterator[tuple[str, Callable[[], StepPlan]]]:
        if owner is Pipelined:  # the other one saves the activations of all micro-batches
            for n in enough(step, device, count, counts):
                yield f"{n} micro-batches", functools.partial(planned, n, "none")
        yield "rematerialize=all", functools.partial(planned, count, "all")
        try:
            again = planned(count, "all")
        except ExecutionError:
            again = step
        for n in enough(again, device, count, counts):
            yield f"rematerialize=all and {n} micro-batches", functools.partial(planned, n, "all")

    return first_that_fits(step, device, others(), shards=shards)
