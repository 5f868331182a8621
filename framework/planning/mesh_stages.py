"""The figures of a pipeline whose stages are on meshes: those of one device of each mesh.

    operations, cost     those of the stage on one device, times the share of a device by the cost
                         model of layouts (cost_model.py)
    collectives          by the cost model: for every micro-batch; gathers of weights once a step
    weights, slots, …    shards (mesh_figures.py)
    saved activations,   those of the stage on one device, times the share of a device of the
    inputs, outputs      activations, inputs and outputs that the cost model knows

So a stage on one device and on a mesh are compared by the same figures, and a mesh of one device
changes nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tekso.framework.costs.device_types import DeviceType
from tekso.framework.execution.mesh.layouts import MeshLayout
from tekso.framework.execution.mesh.step_errors import lists_of_loop
from tekso.framework.learning_step import LearnerBase
from tekso.framework.planning.cost_model import Cost, CostModel
from tekso.framework.planning.layout_search import ONE_DEVICE
from tekso.framework.planning.mesh_figures import ShardBytes, figures_on_mesh
from tekso.framework.planning.placed_work import PlacedActivations
from tekso.framework.planning.rings import WEIGHTS, CollectiveCost
from tekso.framework.planning.stage_figures import (
    PipelineFigures,
    StageFigures,
    of_stages,
    pass_costs,
    recomputed_share,
)
from tekso.framework.planning.stage_memory import StageBytes
from tekso.framework.planning.stage_work import StageWork, stage_works
from tekso.framework.planning.step_work import Part
from tekso.framework.weight_spec import WeightSpec


class Share(NamedTuple):
    """What a device of a mesh has of a stage, as a share of the stage on one device.

    Attributes:
      flops: operations.
      compute: time of the computation.
      activations: bytes of activations that are saved for the backward pass.
      inputs, outputs: bytes of what the stage gets and hands on.
      collectives: its collectives for a micro-batch, without gathers of weights.
      gathers: its gathers of weights, once in a step.
    """

    flops: float
    compute: float
    activations: float
    inputs: float
    outputs: float
    collectives: tuple[CollectiveCost, ...]
    gathers: tuple[CollectiveCost, ...]


class MeshStages:
    """Computes the figures of a pipeline on meshes, for any layout; allocates nothing.

    Args:
      figures: figures of the pipeline with a device for each stage.
      learner: the learner.
      specs: specs of all weights of the task.
      device: type of the devices.
      cost_s: seconds of a unit of the costs of stages.
      dtype: type in which layers compute.
    """

    def __init__(
        self,
        figures: PipelineFigures,
        learner: LearnerBase,
        specs: Mapping[str, WeightSpec],
        device: DeviceType,
        *,
        cost_s: float,
        dtype: str,
    ) -> None:
        self._figures, self._learner, self._specs = figures, learner, specs
        self._cost_s, self._dtype = cost_s, dtype
        # On a mesh, the backward pass of a loop recomputes it.
        on_mesh = alone = self._works(recomputes_loops=True)
        if any(stage.work.recomputed for stage in on_mesh):
            alone = self._works(recomputes_loops=False)
        cast = 4 if dtype == "float32" else 2
        models = [
            [CostModel(w.work, w.weights, [], device, activation_bytes=cast) for w in works]
            for works in (on_mesh, alone)
        ]
        self._stages = list(zip(on_mesh, *models, strict=True))

    def _works(self, *, recomputes_loops: bool) -> list[StageWork]:
        plan = self._figures.plan
        works = stage_works(
            plan.stage_plan,
            self._specs,
            set(self._learner.trainable(self._specs)),
            plan.micro_batch_size,
            dtype=self._dtype,
            recomputes_loops=recomputes_loops,
        )
        again = recomputed_share(plan) > 0
        return [
            work.with_recomputation() if again and stage.outputs else work
            for work, stage in zip(works, plan.stage_plan.stages, strict=True)
        ]

    def on(self, layout: MeshLayout) -> PipelineFigures:
        """Returns the figures of a device of each mesh.

        Args:
          layout: mesh and rules of every stage; must be legal.

        Raises:
          ExecutionError: DTensor cannot compile a loop of a stage.
        """
        loops = [place for work, *_ in self._stages for place in work.work.list_loops]
        if loops:
            raise lists_of_loop(f"a stage on a {layout}", loops[0])
        before, plan = self._figures, self._figures.plan
        on_mesh = figures_on_mesh(plan, self._learner, self._specs, layout)
        shares = [
            _share(work, model.cost(layout), alone.cost(ONE_DEVICE), layout)
            for work, model, alone in self._stages
        ]
        # Of a stage whose forward pass costs 1, in the units of costs:
        passes = pass_costs(plan, [1.0 for _ in before.stages])
        stages = tuple(
            _of_device(
                stage,
                shard,
                share,
                exchange=math.fsum(c.seconds for c in share.collectives) / self._cost_s / whole,
            )
            for stage, shard, share, whole in zip(
                before.stages, on_mesh.stages, shares, passes, strict=True
            )
        )
        found = of_stages(before.schedule, plan, stages)
        repeats = plan.num_micro_batches * plan.num_parts
        collectives = tuple(
            (*(_repeated(c, repeats) for c in share.collectives), *share.gathers)
            for share in shares
        )
        return dataclasses.replace(
            found,
            shared_bytes=layout.mesh.size * found.shared_bytes,
            on_mesh=dataclasses.replace(on_mesh, collectives=collectives),
        )


def _share(work: StageWork, cost: Cost, alone: Cost, layout: MeshLayout) -> Share:
    placed = PlacedActivations(layout, work.work.weights)

    def of(parts: Sequence[Part]) -> float:
        whole = sum(part.size_bytes for part in parts)
        return _ratio(sum(placed.bytes(part) for part in parts), whole)

    rows = cost.collectives
    return Share(
        _ratio(cost.flops, alone.flops),
        _ratio(cost.compute_s, alone.compute_s),
        _ratio(cost.memory.activations, alone.memory.activations),
        of(work.inputs),
        of(work.outputs),
        tuple(c for c in rows if c.of != WEIGHTS),
        tuple(c for c in rows if c.of == WEIGHTS),
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 1.0


def _repeated(one: CollectiveCost, times: int) -> CollectiveCost:
    return dataclasses.replace(
        one,
        count=one.count * times,
        bytes=one.bytes * times,
        sent_bytes=one.sent_bytes * times,
        seconds=one.seconds * times,
    )


def _of_device(
    stage: StageFigures, shard: ShardBytes, share: Share, *, exchange: float
) -> StageFigures:
    """Returns the figures of a device of a stage's mesh.

    Args:
      stage: figures of the stage on one device.
      shard: bytes of weights, slots and gradients on the device.
      share: the device's share.
      exchange: cost of its collectives, as a part of the cost of a forward pass.
    """
    return dataclasses.replace(
        stage,
        weight_bytes=shard.weights,
        copy_bytes=shard.copies,
        slot_bytes=shard.slots,
        gradient_bytes=shard.gradients,
        flops=share.flops * stage.flops,
        handed_bytes=round(share.outputs * stage.handed_bytes),
        returned_bytes=round(share.inputs * stage.returned_bytes),
        memory=_memory(stage.memory, share),
        counted=_memory(stage.counted, share),
        forward_cost=share.compute * stage.forward_cost + exchange,
    )


def _memory(whole: StageBytes, share: Share) -> StageBytes:
    inputs = share.inputs * whole.inputs
    return StageBytes(
        inputs,
        inputs + share.activations * (whole.saved - whole.inputs),
        share.activations * whole.between,
        share.activations * whole.backward,
        tuple(share.activations * size for size in whole.recomputed),
        whole.shares,
    )
