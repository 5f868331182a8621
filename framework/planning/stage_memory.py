"""Simulates the memory of the devices of a pipeline while its schedule runs.

    forward     saves its inputs, and the other saved activations unless they are recomputed
    backward    needs working memory, and frees what the micro-batch has saved

The devices are separate, or share the memory of one host, as stages on a CPU do. Then only what
exists at the same time is added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tekso.framework.costs.piece_costs import BACKWARD_COST
from tekso.framework.execution.pipeline.actions import FORWARD, WEIGHT_GRADIENT, Event
from tekso.framework.execution.pipeline.plan import PipelinePlan
from tekso.framework.planning.simulator import Timeline

_TICKS = 1e9  # of a schedule; so that sums of the same durations are the same time


class StageBytes(NamedTuple):
    """The memory of a stage for one micro-batch, in bytes.

    Attributes:
      inputs: inputs from the batch and from other stages.
      saved: saved activations, including inputs.
      between: what stays saved between the gradients of inputs and of weights.
      backward: peak of the backward pass beyond the saved activations.
      recomputed: of a backward pass that recomputes the forward pass: peak beyond the inputs in
        the backward pass of each piece.
      shares: share of each piece in the time of the stage.
    """

    inputs: float
    saved: float
    between: float
    backward: float
    recomputed: tuple[float, ...]
    shares: tuple[float, ...]

    @property
    def saved_only(self) -> StageBytes:
        """The saved activations alone; recomputed ones exist until the backward pass ends."""
        more = self.saved - self.inputs
        return self._replace(backward=0.0, recomputed=(more,), shares=(1.0,))


def peak_bytes(
    plan: PipelinePlan,
    stages: Sequence[StageBytes],
    timeline: Timeline,
    *,
    device: int | None = None,
) -> float:
    """Returns the largest memory of a device, or of all devices of a replica at the same time.

    Args:
      plan: plan of the pipeline.
      stages: memory of every stage.
      timeline: the simulated schedule.
      device: index of the device; None: all of them.
    """
    # (time, change of the memory, change of its growth per time); at equal times, memory is freed
    # first.
    changes = sorted(
        (round(_TICKS * time / (timeline.makespan or 1.0)), change, slope)
        for event in timeline.events
        if device in (None, event.action.device)
        for time, change, slope in _changes(plan, stages[event.action.stage], event)
    )
    unit = (timeline.makespan or 1.0) / _TICKS
    now, memory, growth, most = 0, 0.0, 0.0, 0.0
    for time, change, slope in changes:
        memory += growth * (time - now) * unit
        most = max(most, memory, memory + change)
        now, memory, growth = time, memory + change, growth + slope
    return most


def _changes(plan: PipelinePlan, stage: StageBytes, event: Event) -> list[tuple[float, ...]]:
    """Returns [(time, change of the memory, change of its growth)] of an action."""
    saves = plan.saves(event.action.micro_batch)
    saved = stage.saved if saves else stage.inputs
    start, end = event.start, event.end
    if event.action.kind == FORWARD:
        return [(start, saved, 0.0)]
    if event.action.kind == WEIGHT_GRADIENT:
        return [(end, -stage.between, 0.0)]
    left = stage.between if plan.splits_backward else 0.0
    if saves:
        # One change at the end: what is left is part of what was there.
        return [(start, stage.backward, 0.0), (end, left - stage.backward - saved, 0.0)]
    # The recomputed forward pass allocates its tensors one after the other. The backward pass of
    # a piece frees those of the piece.
    backward = BACKWARD_COST / 2 if plan.splits_backward else BACKWARD_COST
    at = start + (end - start) / (1.0 + backward)
    level, span = stage.recomputed[-1], end - at
    growth = level / (at - start) if at > start else 0.0
    found = [(start, 0.0 if growth else level, growth), (at, 0.0, -growth)]
    for share, before in zip(stage.shares[:0:-1], stage.recomputed[-2::-1], strict=True):
        at = min(end, at + share * span)
        found.append((at, before - level, 0.0))
        level = before
    return [*found, (end, left - level - saved, 0.0)]
