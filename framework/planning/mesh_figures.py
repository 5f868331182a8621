"""Computes the memory of each device of a pipeline stage on a mesh, from specs alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Set

from tekso.framework.costs.piece_traces import rows_of
from tekso.framework.execution.mesh.layouts import MeshLayout
from tekso.framework.execution.pipeline.plan import PipelinePlan
from tekso.framework.execution.pipeline.stage_specs import StageSpecs
from tekso.framework.learning_step import LearnerBase
from tekso.framework.optimizers.optimizer import state_dtype
from tekso.framework.planning.rings import CollectiveCost
from tekso.framework.state import State
from tekso.framework.weight_spec import WeightSpec


@dataclasses.dataclass(frozen=True)
class ShardBytes:
    """Bytes on each device of a stage's mesh.

    Attributes:
      weights: stored weights of the stage.
      copies: copies of weights for a step: of those that other stages store, and of those that are
        gathered (`weights_axis`).
      slots: slots of the optimizer.
      gradients: summed gradients of all learned weights that the stage reads.
    """

    weights: int
    copies: int
    slots: int
    gradients: int


@dataclasses.dataclass(frozen=True)
class MeshFigures:
    """Memory of the devices of all stages.

    Attributes:
      layout: mesh and rules of every stage, or of one program for all stages.
      stages: bytes of the stages in model order; a single entry for one program.
      is_program: whether it is one program for all stages.
      collectives: for each stage, the collectives of a device in a step; empty: not computed.
    """

    layout: MeshLayout
    stages: tuple[ShardBytes, ...]
    is_program: bool = False
    collectives: tuple[tuple[CollectiveCost, ...], ...] = ()


def figures_on_mesh(
    plan: PipelinePlan, learner: LearnerBase, specs: Mapping[str, WeightSpec], layout: MeshLayout
) -> MeshFigures:
    """Returns the memory of the devices of all stages; allocates nothing.

    Args:
      plan: plan of the pipeline.
      learner: the learner; a stage stores the slots of its weights.
      specs: specs of all weights of the task.
      layout: mesh and rules of a stage.
    """
    by_stage = StageSpecs(plan.stage_plan, learner, State(specs, learner.slots(specs)))
    trained = set(learner.trainable(specs))
    return MeshFigures(
        layout,
        tuple(
            _shards(
                by_stage.specs[stage.index],
                {path: rows_of(specs[path], rows) for path, rows in stage.weights.items()},
                trained,
                layout,
            )
            for stage in plan.stage_plan.stages
        ),
    )


def figures_of_program(
    learner: LearnerBase, specs: Mapping[str, WeightSpec], layout: MeshLayout
) -> MeshFigures:
    """Returns the memory of the devices of one program for all stages; allocates nothing.

    Args:
      learner: the learner.
      specs: specs of all weights of the task.
      layout: mesh and rules of the program.
    """
    owned = State(specs, learner.slots(specs))
    shards = _shards(owned, specs, set(learner.trainable(specs)), layout)
    return MeshFigures(layout, (shards,), is_program=True)


def _shards(
    owned: State[WeightSpec],
    read: Mapping[str, WeightSpec],
    trained: Set[str],
    layout: MeshLayout,
) -> ShardBytes:
    weights, slots = owned
    held = layout.shard_bytes
    return ShardBytes(
        weights=sum(held(s, layout.of_stored_weight(s)) for s in weights.values()),
        copies=sum(
            held(s, layout.of_weight(s))
            for path, s in read.items()
            if path not in weights or layout.of_weight(s) != layout.of_stored_weight(s)
        ),
        slots=sum(held(s, layout.of_slot(s)) for s in slots.values()),
        gradients=sum(
            held(dataclasses.replace(s, dtype=state_dtype(s)), layout.of_slot(s))
            for path, s in read.items()
            if path in trained
        ),
    )
