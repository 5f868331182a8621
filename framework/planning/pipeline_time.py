"""Estimates the time of a step of a pipeline whose stages run on the cores of this machine.

    action      ops of a pass of the stage (`PassSeconds`), and the call of its function from Python
    schedule    simulated with these times: a device for each stage
    step        the schedule, the update of the stage that has most weights, and calls for every
                stage and weight

Devices share the cores, and only one thread at a time runs Python. So a schedule takes at least its
CPU time divided by the number of cores, and at least the time of all its calls.

`pass_times.py` prices the passes with the speeds of `costs/`; `pipeline_probes.py` measures the
calls. Stages on meshes are planned by the programs of the meshes (`mesh_stage_graphs.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import math

from tekso.framework.costs import stored_speeds
from tekso.framework.costs.this_machine import MachineSpeed, rate
from tekso.framework.execution.pipeline.actions import (
    BACKWARD,
    FORWARD,
    WEIGHT_GRADIENT,
    Kind,
)
from tekso.framework.planning.simulator import simulate
from tekso.framework.planning.stage_figures import (
    PipelineFigures,
    StageFigures,
    recomputed_share,
)
from tekso.framework.planning.step_time import StepTime

_PROBES = "tekso.framework.planning.pipeline_probes"  # a program
_PASSES_OF_TOTAL = 3  # reads a sum and a gradient, writes the sum


@dataclasses.dataclass(frozen=True)
class PipelineStarts:
    """What the host needs to start the work of a pipeline, in seconds of CPU time.

    Attributes:
      step_s: for a step.
      stage_s: for a stage in a step.
      weight_s: for a weight in a step.
      action_s: for an action, which is one call of a function.
      argument_s: for a weight in an action, which is an argument of the call.
    """

    step_s: float
    stage_s: float
    weight_s: float
    action_s: float
    argument_s: float


@functools.cache
def measured_starts() -> PipelineStarts:
    """Returns the times of this machine, from the cache if they were measured before.

    Raises:
      ExecutionError: the process of the probes ended with an error.
    """
    return stored_speeds.stored(
        "pipeline",
        lambda run: run(_PROBES),
        _of_record,
        cost="calls of pipeline stages, about 10 s of CPU time",
    )


def _of_record(values: dict[str, float]) -> PipelineStarts:
    names = [field.name for field in dataclasses.fields(PipelineStarts)]
    return PipelineStarts(*(stored_speeds.time_of(values[name]) for name in names))


def pipeline_time(
    figures: PipelineFigures,
    starts: PipelineStarts,
    machine: MachineSpeed,
    *,
    update_s: float,
    cores: int,
) -> StepTime:
    """Returns the time of a step.

    Args:
      figures: figures of the pipeline, with the times of its stages.
      starts: the times of calls.
      machine: speed of a core.
      update_s: time of the ops of the update of all weights.
      cores: number of cores.

    Raises:
      ValueError: the figures have no times, because they were computed without a machine.
    """
    plan, times, calls = figures.plan, {}, {}
    for stage in figures.stages:
        call = starts.action_s + starts.argument_s * len(stage.stage.weights)
        for kind, seconds in ops_seconds(figures, stage, machine).items():
            times[stage.stage.index, kind] = seconds + call
            calls[stage.stage.index, kind] = call
    actions = plan.actions
    makespan = simulate(actions, num_devices=plan.num_devices, durations=times).makespan
    repeats = plan.num_replicas * plan.num_parts
    work = repeats * math.fsum(times[a.stage, a.kind] for a in actions)
    in_calls = repeats * math.fsum(calls[a.stage, a.kind] for a in actions)
    weights = sum(len(stage.stage.weights) for stage in figures.stages)
    fixed = starts.step_s + plan.num_replicas * len(figures.stages) * starts.stage_s
    fixed += weights * starts.weight_s
    total = math.fsum(stage.weight_bytes for stage in figures.stages) or 1.0
    largest_share = max(stage.weight_bytes for stage in figures.stages) / total
    schedule = max(plan.num_parts * makespan, work / cores, in_calls)
    update = update_s * max(largest_share, 1.0 / cores)
    return StepTime(schedule + update + fixed, work + update_s + fixed, in_calls + fixed)


def ops_seconds(
    figures: PipelineFigures, stage: StageFigures, machine: MachineSpeed
) -> dict[Kind, float]:
    """Returns the time of the ops of each action of a stage, a mean over the micro-batches."""
    plan, passes = figures.plan, stage.seconds
    if passes is None:
        raise ValueError("the figures have no times: they were computed without a machine")
    again = recomputed_share(plan)
    # A stage without outputs computes nothing in a forward pass that is recomputed.
    forward = 1.0 if stage.stage.outputs else 1.0 - again
    moved = float(_PASSES_OF_TOTAL * stage.gradient_bytes)
    added = moved / rate(machine.streams, moved)
    inputs, weights = again * passes.forward + passes.inputs, passes.weights + added
    if plan.splits_backward:
        return {FORWARD: forward * passes.forward, BACKWARD: inputs, WEIGHT_GRADIENT: weights}
    return {FORWARD: forward * passes.forward, BACKWARD: inputs + weights}
