"""A measured step, and a simulation of the same step from the mean times of its work.

The two differ by what the means do not contain: work that took longer than usual, and waiting for
other reasons than other stages.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from tekso.framework.execution.base import ExecutionProgram
from tekso.framework.execution.pipeline.actions import Event, Kind
from tekso.framework.execution.pipeline.plan import PipelinePlan
from tekso.framework.execution.pipeline.program import PipelineProgram
from tekso.framework.planning.simulator import Timeline, simulate
from tekso.framework.planning.timeline_drawing import draw_png, draw_text

_UNIT = "ms"


@dataclasses.dataclass(frozen=True)
class MeasuredStep:
    """A measured and a simulated step; times in milliseconds.

    Attributes:
      measured: one timeline per replica.
      predicted: the simulated timeline, the same for every replica.
    """

    measured: Sequence[Timeline]
    predicted: Timeline

    @property
    def ratio(self) -> float:
        """Measured time of the slowest replica / predicted time."""
        longest = max(timeline.makespan for timeline in self.measured)
        return longest / self.predicted.makespan if self.predicted.makespan else 1.0

    def lines(self, width: int) -> list[str]:
        """Returns both timelines as text, in lines of at most `width` columns."""
        longest = max(timeline.makespan for timeline in self.measured)
        return [
            *draw_text(self._timelines(), width=width, unit=_UNIT),
            f"measured {longest:.1f} {_UNIT}, predicted {self.predicted.makespan:.1f} {_UNIT}, "
            f"ratio {self.ratio:.3f} (forward and backward)",
        ]

    def png(self, title: str) -> bytes:
        """Returns both timelines as a PNG picture."""
        return draw_png(self._timelines(), title=title, unit=_UNIT)

    def _timelines(self) -> dict[str, Timeline]:
        many = len(self.measured) > 1
        named = {
            f"measured, replica {r}" if many else "measured": timeline
            for r, timeline in enumerate(self.measured)
        }
        return {**named, "simulated from its mean times": self.predicted}


def measured_step_of(program: ExecutionProgram) -> MeasuredStep | None:
    """Returns the measured last training step of a pipeline; None for other programs."""
    if not isinstance(program, PipelineProgram):
        return None
    return measured_step(program.events, program.plan)


def measured_step(
    events: Mapping[tuple[int, int], Sequence[Event]], plan: PipelinePlan
) -> MeasuredStep | None:
    """Returns a measured step; None if no step has run yet.

    Args:
      events: {(replica, device): its actions with start and end, in seconds}. With accumulation
        steps, only the last one is used.
      plan: plan of the pipeline.
    """
    if not events:
        return None
    num_stages = len(plan.stage_plan.stages)
    times: dict[tuple[int, Kind], list[float]] = collections.defaultdict(list)
    measured = []
    for replica in range(plan.num_replicas):
        own = [
            Event(event.action, 1e3 * event.start, 1e3 * event.end)
            for device, order in enumerate(plan.by_device)
            for event in events[replica, device][len(events[replica, device]) - len(order) :]
        ]
        for event in own:
            times[event.action.stage, event.action.kind].append(event.end - event.start)
        measured.append(Timeline(tuple(own), plan.num_devices, num_stages))
    predicted = simulate(
        plan.actions,
        num_devices=plan.num_devices,
        durations={key: statistics.fmean(found) for key, found in times.items()},
    )
    return MeasuredStep(measured, predicted)
