"""Finds the weights, slots and rows of stacked weights that each stage of a pipeline stores."""

from __future__ import annotations

from tekso.framework.costs.piece_traces import rows_of
from tekso.framework.execution.pipeline.stages import Rows, StagePlan
from tekso.framework.learning_step import LearnerBase, TrainedWeight, trained_weights
from tekso.framework.state import State
from tekso.framework.weight_spec import WeightSpec


class StageSpecs:
    """Specs of the weights and slots of every stage; allocates nothing.

    Args:
      stage_plan: the stages.
      learner: the learner. Its counts belong to no stage: the host stores them.
      specs: specs of all weights and slots.

    Attributes:
      trained: for every stage, the weights that it updates.
      rows: for every stage, its rows of each weight and slot; None: all rows.
      specs: for every stage, the specs of its weights and slots, with only its rows.
    """

    def __init__(
        self, stage_plan: StagePlan, learner: LearnerBase, specs: State[WeightSpec]
    ) -> None:
        groups = learner.groups(specs.weights)
        self.trained: list[list[TrainedWeight]] = []
        self.rows: list[State[Rows]] = []
        self.specs: list[State[WeightSpec]] = []
        for stage in stage_plan.stages:
            owned = stage_plan.owned(stage.index)
            trained = trained_weights(
                {
                    name: (own, {p: rows_of(s, owned[p]) for p, s in learned.items() if p in owned})
                    for name, (own, learned) in groups.items()
                }
            )
            of_slots: dict[str, Rows] = {}
            for weight in trained:
                for made in weight.slots.values():
                    is_cut = made.shape != specs.slots[made.path].shape
                    of_slots[made.path] = owned[weight.spec.path] if is_cut else None
            self.trained.append(trained)
            self.rows.append(State(owned, of_slots))
            self.specs.append(
                State(
                    {path: rows_of(specs.weights[path], r) for path, r in owned.items()},
                    {path: rows_of(specs.slots[path], r) for path, r in of_slots.items()},
                )
            )
