"""What a device holds of a stage that lies on a mesh of its own: from specs alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Set

import tensorflow as tf

from tekso.framework.execution.mesh.layouts import Layout, MeshLayout
from tekso.framework.execution.pipeline.piece_traces import rows_of
from tekso.framework.execution.pipeline.plan import PipelinePlan
from tekso.framework.execution.pipeline.stage_specs import StageSpecs
from tekso.framework.execution.state import State
from tekso.framework.learning_step import LearnerBase
from tekso.framework.optimizers.optimizer import state_dtype
from tekso.framework.weight_spec import WeightSpec


@dataclasses.dataclass(frozen=True)
class ShardBytes:
    """Bytes that each device of a stage's mesh holds.

    Attributes:
      weights: of the weights that the stage keeps, as they are stored.
      copies: of those that it is given for a step.
      slots: what the optimizer keeps.
      gradients: the sums of the gradients of all weights that it reads and that are learned.
    """

    weights: int
    copies: int
    slots: int
    gradients: int


@dataclasses.dataclass(frozen=True)
class MeshFigures:
    """Stages on meshes.

    Attributes:
      layout: mesh and rules of every stage, or of the one program for all.
      stages: in model order; of one program, all of it.
      is_program: whether it is one program.
    """

    layout: MeshLayout
    stages: tuple[ShardBytes, ...]
    is_program: bool = False


def figures_on_mesh(
    plan: PipelinePlan, learner: LearnerBase, specs: Mapping[str, WeightSpec], layout: MeshLayout
) -> MeshFigures:
    """Returns what the devices of all stages hold; allocates nothing.

    Args:
      plan: the stages.
      learner: its slots lie beside their weights.
      specs: of all weights of the task.
      layout: mesh and rules of a stage.
    """
    kept = StageSpecs(plan.stage_plan, learner, State(specs, learner.slots(specs)))
    trained = set(learner.trainable(specs))
    return MeshFigures(
        layout,
        tuple(
            _shards(
                kept.specs[stage.index],
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
    """Returns what the devices of one program for all stages hold; arguments as above."""
    owned = State(specs, learner.slots(specs))
    shards = _shards(owned, specs, set(learner.trainable(specs)), layout)
    return MeshFigures(layout, (shards,), is_program=True)


def _shards(
    owned: State[WeightSpec],
    read: Mapping[str, WeightSpec],
    trained: Set[str],
    layout: MeshLayout,
) -> ShardBytes:
    def held(spec: WeightSpec, axes: Layout, dtype: str) -> int:
        size: int = tf.as_dtype(dtype).size
        return math.prod(layout.shard_shape(spec.shape, axes)) * size

    weights, slots = owned
    return ShardBytes(
        weights=sum(held(s, layout.of_stored_weight(s), s.dtype) for s in weights.values()),
        copies=sum(
            held(s, layout.of_weight(s), s.dtype) for path, s in read.items() if path not in weights
        ),
        slots=sum(held(s, layout.of_slot(s), s.dtype) for s in slots.values()),
        gradients=sum(
            held(s, layout.of_slot(s), state_dtype(s))
            for path, s in read.items()
            if path in trained
        ),
    )
