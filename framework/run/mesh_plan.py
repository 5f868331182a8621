"""Plans an experiment on a mesh without devices, to inspect its layout."""

from __future__ import annotations

import dataclasses

from tekso.framework import schedules
from tekso.framework.execution.accumulation import part_of
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.mesh.layouts import MeshLayout
from tekso.framework.execution.mesh_sharded import MeshSharded
from tekso.framework.experiment import Tree
from tekso.framework.learning_step import LearnerBase
from tekso.framework.planning import collectives, sharding
from tekso.framework.run import batch_kinds, inspection
from tekso.framework.signature import Signature
from tekso.framework.task import Task

EXAMPLE = (
    "--execution=mesh_sharded --set execution.mesh='data:2;model:4' "
    "--set execution.rules='batch:data;mlp:model'"
)


@dataclasses.dataclass(frozen=True)
class MeshPlan:
    """The parts of an experiment that determine its layout on a mesh.

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
        """Returns the layout with the mesh and rules of the experiment.

        Args:
          num_devices: assumed number of devices; None: the size of `execution.mesh`.

        Raises:
          LayoutError: mesh and rules do not fit the model or the devices.
        """
        part = part_of(self.batch, self.learner.params.accumulation_steps)
        return self.execution.layout(self.task, part, num_devices=num_devices)

    def sharding(self, layout: MeshLayout) -> sharding.Sharding:
        """Returns the shards and bytes of weights and optimizer slots on a device."""
        specs = self.task.specs()
        return sharding.of_model(layout, specs, self.learner.slots(specs))

    def collectives(self, layout: MeshLayout) -> collectives.StepCollectives:
        """Compiles a training step, and returns its collectives.

        Raises:
          ExecutionError: DTensor cannot compile the step.
        """
        return collectives.of_step(
            self.task,
            self.learner,
            layout,
            self.batch,
            activation_dtype=self.activation_dtype,
        )


def plan_of(tree: Tree.Params, *, assets_dir: str | None = None) -> MeshPlan:
    """Returns the plan of an experiment; reads data only if the Params do not determine shapes.

    Args:
      tree: the Params.
      assets_dir: folder of the assets of a run, if there was one.

    Raises:
      ExecutionError: the experiment is not sharded over a mesh.
      ValueError: the Params of a part are invalid.
    """
    owner = tree.execution.owner
    if owner is None or not issubclass(owner, MeshSharded):
        name = owner.__name__ if owner is not None else type(tree.execution).__name__
        raise ExecutionError(
            f"the execution of this experiment is {name}, which does not use a mesh: set one, as "
            f"in {EXAMPLE}"
        )
    execution: MeshSharded = batch_kinds.execution_of(tree)
    return MeshPlan(
        task=inspection.task_of(tree, assets_dir=assets_dir),
        learner=schedules.end_with_run(tree.learner, tree.run.steps).instantiate(),
        execution=execution,
        batch=inspection.batch_of(tree, assets_dir=assets_dir),
        activation_dtype=execution.activation_dtype(tree.run.activation_dtype),
    )
