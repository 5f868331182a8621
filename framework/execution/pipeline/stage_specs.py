"""Finds the weights, slots and rows of stacked weights that each stage of a pipeline stores."""

from __future__ import annotations

from tekso.framework.execution.pipeline.piece_traces import rows_of
from tekso.framework.execution.pipeline.stages import Rows, StagePlan
from tekso.framework.learning_step import Groups, LearnerBase
from tekso.framework.state import State
from tekso.framework.weight_spec import WeightSpec


class StageSpecs:
    """Specs of the weights and slots of every stage; allocates nothing.

    Args:
      stage_plan: the stages.
      learner: the learner. Its counts belong to no stage: the host stores them.
      specs: specs of all weights and slots.

    Attributes:
      groups: for every stage, {group: (learner, specs of the weights that it updates)}.
      rows: for every stage, its rows of each weight and slot; None: all rows.
      specs: for every stage, the specs of its weights and slots, with only its rows.
    """

    def __init__(
        self, stage_plan: StagePlan, learner: LearnerBase, specs: State[WeightSpec]
    ) -> None:
        groups = learner.groups(specs.weights)
        self.groups: list[Groups] = []
        self.rows: list[State[Rows]] = []
        self.specs: list[State[WeightSpec]] = []
        for stage in stage_plan.stages:
            owned = stage_plan.owned(stage.index)
            of_stage = {}
            of_slots: dict[str, Rows] = {}
            for name, (own_learner, learned) in groups.items():
                own = {p: rows_of(spec, owned[p]) for p, spec in learned.items() if p in owned}
                if own:
                    of_stage[name] = (own_learner, own)
                for path, spec in own.items():
                    for made in own_learner.slots_of(spec).values():
                        is_cut = made.shape != specs.slots[made.path].shape
                        of_slots[made.path] = owned[path] if is_cut else None
            self.groups.append(of_stage)
            self.rows.append(State(owned, of_slots))
            self.specs.append(
                State(
                    {path: rows_of(specs.weights[path], r) for path, r in owned.items()},
                    {path: rows_of(specs.slots[path], r) for path, r in of_slots.items()},
                )
            )
