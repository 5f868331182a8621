"""Describes a registered experiment as text: Params, weights, sharding and stages.

The text changes only if the experiment does, so a stored copy shows in a diff what a change to a
layer or to an experiment altered. Nothing is allocated, and no data is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tekso.framework import schedules
from tekso.framework.execution.mesh.layouts import MeshLayout
from tekso.framework.execution.mesh_sharded import MeshSharded
from tekso.framework.execution.pipeline.staged_execution import StagedExecution
from tekso.framework.execution.pipeline.stages import Stage
from tekso.framework.experiment import Tree
from tekso.framework.planning import sharding
from tekso.framework.planning.sharding import ShardedWeight
from tekso.framework.run import inspection, mesh_plan, weight_groups
from tekso.framework.run.batch_kinds import execution_of
from tekso.framework.run.pipeline_plan import stage_layout
from tekso.framework.task import Task
from tekso.framework.weight_spec import WeightSpec

SIZES_OF_DATA = {"task.model.vocab_size": 70, "task.num_classes": 10}
"""Assumed values of sizes that only the data determines."""

PLACEMENT = "## placement"


def completed(tree: Tree.Params) -> tuple[Tree.Params, Task, dict[str, int]]:
    """Returns a tree with its task, and the sizes that had to be assumed, {path: value}."""
    try:
        return tree, inspection.task_of(tree), {}
    except ValueError as error:
        assumed = {p: v for p, v in SIZES_OF_DATA.items() if f"{p} is not set" in str(error)}
        if not assumed:
            raise
    changed = tree.copy().set(dict(assumed))
    return changed, inspection.task_of(changed), assumed


def text(key: str, tree: Tree.Params, *, placement: bool = True) -> str:
    """Returns the description of an experiment.

    Args:
      key: its key.
      tree: its Params.
      placement: whether to describe shards and stages, for which parts of the model are traced.
    """
    tree, task, assumed = completed(tree)
    specs = task.specs()
    total = sum(spec.size for spec in specs.values())
    trained = sum(spec.size for spec in specs.values() if spec.trainable)
    lines = [f"# {key}: {total:,} weights in {len(specs)} tensors"]
    if trained != total:
        lines[0] += f", {trained:,} of them trained"
    lines += [f"# {p} = {v} is assumed: the data determines it" for p, v in assumed.items()]
    lines += ["", "## Params", "", tree.to_text().rstrip(), "", "## weights", ""]
    lines += _weights(specs.values())
    placed = _placement(tree, task) if placement else []
    if placed:
        lines += ["", PLACEMENT, "", *placed]
    return "\n".join(lines) + "\n"


def _placement(tree: Tree.Params, task: Task) -> list[str]:
    owner: Any = tree.execution.owner
    if issubclass(owner, MeshSharded):
        layout = mesh_plan.plan_of(tree).layout()
        return [f"mesh {layout.mesh}", *_sharding(tree, task, layout)]
    if issubclass(owner, StagedExecution):
        return _stages(tree, task)
    return []


def _weights(specs: Iterable[WeightSpec]) -> list[str]:
    """Returns a line for every weight, or for every group that differs in indices only."""
    found = weight_groups.groups(
        specs, lambda s: s.path, lambda s: (s.shape, s.dims, s.dtype, s.trainable)
    )
    lines = []
    for group in found:
        first = group[0]
        dims = ", ".join(
            f"{dim or '-'}={size}" for dim, size in zip(first.dims, first.shape, strict=True)
        )
        more = "" if first.dtype == "float32" else f" {first.dtype}"
        more += "" if first.trainable else " not trained"
        many = f" × {len(group)}" if len(group) > 1 else ""
        lines.append(f"{weight_groups.joined(s.path for s in group)}: [{dims}]{more}{many}")
    return lines


def _sharding(tree: Tree.Params, task: Task, layout: MeshLayout) -> list[str]:
    learner = schedules.end_with_run(tree.learner, tree.run.steps).instantiate()
    specs = task.specs()
    found = sharding.of_model(layout, specs, learner.slots(specs))
    lines = []
    for group in weight_groups.groups(
        found.weights, lambda w: w.spec.path, lambda w: (w.layout, w.used_layout, w.shard_shape)
    ):
        path = weight_groups.joined(w.spec.path for w in group)
        lines.append(f"{path}: {_placed(group[0])}")
    lines.append(
        f"bytes of a device: {found.weight_bytes_per_device:,} of weights, "
        f"{found.optimizer_bytes_per_device:,} of the optimizer"
    )
    return lines


def _placed(weight: ShardedWeight) -> str:
    axes = [
        f"{dim} over {axis}" + ("" if axis == used else " between steps")
        for dim, axis, used in zip(weight.spec.dims, weight.layout, weight.used_layout, strict=True)
        if axis
    ]
    shape = " × ".join(map(str, weight.shard_shape)) or "scalar"
    return f"{shape} ({', '.join(axes) or 'replicated'})"


def _stages(tree: Tree.Params, task: Task) -> list[str]:
    execution: StagedExecution = execution_of(tree)
    batch = inspection.batch_of(tree)
    learner = schedules.end_with_run(tree.learner, tree.run.steps).instantiate()
    parts = learner.params.accumulation_steps
    dtype = execution.activation_dtype(tree.run.activation_dtype)
    plan = execution.plan(task, batch, parts=parts, dtype=dtype)
    sizes = {path: spec.size for path, spec in task.specs().items()}
    lines = [
        f"{plan.num_devices} devices, {plan.num_replicas} replicas, {plan.num_micro_batches} "
        f"micro-batches of {plan.micro_batch_size} examples"
    ]
    layout = stage_layout(execution, task, batch, learner)
    if layout is not None:
        lines.append(f"every stage on a mesh {layout.mesh}, rules {layout.rules}")
    lines += [_stage(stage, sizes) for stage in plan.stage_plan.stages]
    return lines


def _stage(stage: Stage, sizes: dict[str, int]) -> str:
    names: Sequence[str] = stage.piece_names
    span = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)})"
    whole = sum(sizes[path] for path, rows in stage.weights.items() if rows is None)
    some = sum(1 for rows in stage.weights.values() if rows is not None)
    rows = f", and rows of {some} stacked weights" if some else ""
    return f"stage {stage.index}: {span}, reads {whole:,} weights{rows}"
