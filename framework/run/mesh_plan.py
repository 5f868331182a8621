"""An experiment on a mesh, without its data and without the devices: for looking at layouts."""

from __future__ import annotations

import dataclasses

from tekso.framework import schedules
from tekso.framework.execution.base import Signature, part_of
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.mesh.layouts import MeshLayout
from tekso.framework.execution.mesh_sharded import MeshSharded
from tekso.framework.experiment import Tree
from tekso.framework.learning_step import LearnerBase
from tekso.framework.planning import collectives, sharding
from tekso.framework.run import inspection
from tekso.framework.task import Task

EXAMPLE = (
    "--execution=mesh_sharded --set execution.mesh='data:2;model:4' "
    "--set execution.rules='batch:data;mlp:model'"
)


@dataclasses.dataclass(frozen=True)
class MeshPlan:
    """The parts of an experiment that decide what lies where.

    Attributes:
      task: the task.
      learner: the learner.
      execution: the execution.
      batch: shape and dtype of every array of the global batch.
      activation_dtype: type of activations.
    """

    task: Task
    learner: LearnerBase
    execution: MeshSharded
    batch: Signature
    activation_dtype: str

    def layout(self, num_devices: int | None = None) -> MeshLayout:
        """Returns mesh and rules as the experiment asks for them.

        Args:
          num_devices: how many there would be; None for as many as `execution.mesh` asks for.

        Raises:
          LayoutError: they do not fit the model or the devices.
        """
        part = part_of(self.batch, self.learner.params.accumulation_steps)
        return self.execution.layout(self.task, part, num_devices=num_devices)

    def sharding(self, layout: MeshLayout) -> sharding.Sharding:
        """Returns what a device holds."""
        specs = self.task.specs()
        return sharding.of_model(layout, specs, self.learner.slots(specs))

    def collectives(self, layout: MeshLayout) -> collectives.StepCollectives:
        """Returns what a training step exchanges; compiles it.

        Raises:
          ExecutionError: DTensor cannot compile it.
        """
        return collectives.of_step(
            self.task,
            self.learner,
            layout,
            self.batch,
            activation_dtype=self.activation_dtype,
        )


def plan_of(tree: Tree.Params, *, assets_dir: str | None = None) -> MeshPlan:
    """Returns the plan of an experiment; reads its data only if nothing else tells its shapes.

    Args:
      tree: the Params.
      assets_dir: what a run of it has learned from the data, if there was one.

    Raises:
      ExecutionError: the experiment is not laid over a mesh.
      ValueError: a part says that its Params make no sense.
    """
    owner = tree.execution.owner
    if owner is None or not issubclass(owner, MeshSharded):
        name = owner.__name__ if owner is not None else type(tree.execution).__name__
        raise ExecutionError(
            f"the execution of this experiment is {name}, which lays nothing over a mesh: give "
            f"one, as in {EXAMPLE}"
        )
    execution: MeshSharded = tree.execution.instantiate()
    return MeshPlan(
        task=inspection.task_of(tree, assets_dir=assets_dir),
        learner=schedules.end_with_run(tree.learner, tree.run.steps).instantiate(),
        execution=execution,
        batch=inspection.batch_of(tree, assets_dir=assets_dir),
        activation_dtype=execution.activation_dtype(tree.run.activation_dtype),
    )
