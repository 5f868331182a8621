"""Plans an experiment as a pipeline without devices, to inspect it."""

from __future__ import annotations

import dataclasses

from tekso.framework import schedules, task_results
from tekso.framework.costs.this_machine import MachineSpeed
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.mesh.layouts import MeshLayout
from tekso.framework.execution.pipeline.schedule import SCHEDULES
from tekso.framework.execution.pipeline.staged_execution import StagedExecution
from tekso.framework.execution.pipeline.stages_on_mesh import StagesOnMesh
from tekso.framework.execution.pipelined import Pipelined
from tekso.framework.execution.spmd_pipelined import SpmdPipelined
from tekso.framework.experiment import Tree
from tekso.framework.learning_step import LearnerBase
from tekso.framework.planning.mesh_figures import figures_of_program, figures_on_mesh
from tekso.framework.planning.saved_bytes import saved_bytes
from tekso.framework.planning.stage_figures import PipelineFigures, figures_of
from tekso.framework.primitives.fusion import XlaFusion, no_fusion
from tekso.framework.run import batch_kinds, inspection
from tekso.framework.signature import Signature
from tekso.framework.step import used_specs
from tekso.framework.task import Task

EXAMPLE = "--execution=pipelined --set execution.num_stages=4 --set execution.num_micro_batches=8"


def check_is_pipelined(tree: Tree.Params, what: str) -> None:
    """Raises an ExecutionError if an experiment is not a pipeline; `what` requires one."""
    owner = tree.execution.owner
    if owner is None or not issubclass(owner, StagedExecution):
        name = owner.__name__ if owner is not None else type(tree.execution).__name__
        raise ExecutionError(
            f"{what} requires a pipeline, but the execution of this experiment is {name}, which "
            f"has no stages: set one, as in {EXAMPLE}"
        )


def check_can_be_traced(tree: Tree.Params) -> None:
    """Raises an ExecutionError if the host cannot observe the stages of an experiment."""
    check_is_pipelined(tree, "--trace_pipeline")
    if issubclass(tree.execution.owner, SpmdPipelined):
        raise ExecutionError(
            "--trace_pipeline shows the actions that the host starts, but with "
            "--execution=spmd_pipelined the host starts only one program: remove the flag, or use "
            "--execution=pipelined"
        )


def figures(
    tree: Tree.Params,
    *,
    assets_dir: str | None = None,
    machine: MachineSpeed | None = None,
) -> PipelineFigures:
    """Returns the memory and the work of the stages of an experiment, and its schedule's timeline.

    Args:
      tree: the Params.
      assets_dir: folder of the assets of a run, if there was one.
      machine: speed of a core of this machine, for the times of stages; None: they have none.

    Raises:
      ExecutionError: the experiment is not a pipeline, or stages, micro-batches and schedule do not
        fit the task or each other.
      ValueError: the Params of a part are invalid.
    """
    check_is_pipelined(tree, "--mode=inspect_pipeline")
    task = inspection.task_of(tree, assets_dir=assets_dir)
    learner = schedules.end_with_run(tree.learner, tree.run.steps).instantiate()
    batch = inspection.batch_of(tree, assets_dir=assets_dir)
    found = figures_of_parts(tree, task, learner, batch, machine=machine)
    layout = stage_layout(batch_kinds.execution_of(tree), task, batch, learner)
    if layout is None:
        return found
    on_mesh = figures_on_mesh(found.plan, learner, task.specs(), layout)
    return dataclasses.replace(found, on_mesh=on_mesh)


def figures_of_parts(
    tree: Tree.Params,
    task: Task,
    learner: LearnerBase,
    batch: Signature,
    *,
    machine: MachineSpeed | None,
) -> PipelineFigures:
    """Returns the figures of a pipeline whose parts exist already, with each stage on a device.

    Args:
      tree: Params of the execution and of the run.
      task: the task.
      learner: the learner.
      batch: signature of the global batch.
      machine: see `figures`.

    Raises:
      ExecutionError: see `figures`.
    """
    execution: StagedExecution = batch_kinds.execution_of(tree)
    parts = learner.params.accumulation_steps
    dtype = execution.activation_dtype(tree.run.activation_dtype)
    plan = execution.plan(task, batch, parts=parts, dtype=dtype)
    specs, micro = task.specs(), execution.micro_batch(batch, parts=parts)
    traces = [trace for stage in plan.stage_plan.stages for trace in stage.traces]
    saved = saved_bytes(
        task_results.pieces(task),
        traces,
        used_specs(specs, dtype),
        set(learner.trainable(specs)),
        micro,
        machine=machine,
        fuse=XlaFusion() if plan.xla == "clusters" else no_fusion,
    )
    found = figures_of(_schedule_name(execution), plan, learner, specs, saved)
    if isinstance(execution, SpmdPipelined):
        layout = execution.layout(task, batch, parts=parts, num_devices=None)
        return dataclasses.replace(found, on_mesh=figures_of_program(learner, specs, layout))
    return found


def stage_layout(
    execution: StagedExecution, task: Task, batch: Signature, learner: LearnerBase
) -> MeshLayout | None:
    """Returns the mesh of a stage and the layout of its tensors; None: stages are on devices.

    Args:
      execution: the pipeline.
      task: the task.
      batch: signature of the global batch.
      learner: the learner.

    Raises:
      LayoutError: mesh and rules do not fit the model.
    """
    if not isinstance(execution, Pipelined) or not isinstance(execution.stages_on, StagesOnMesh):
        return None
    micro = execution.micro_batch(batch, parts=learner.params.accumulation_steps)
    return execution.stages_on.layout(task, micro, num_devices=None)


def _schedule_name(execution: StagedExecution) -> str:
    schedule = execution.params.schedule if isinstance(execution, Pipelined) else "gpipe"
    if isinstance(schedule, str):
        return schedule.strip()
    owner = type(schedule).owner
    return next((name for name, kind in SCHEDULES.items() if kind is owner), owner.__name__)
