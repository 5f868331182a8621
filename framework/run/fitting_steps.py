"""Finds settings with which a step of a ranking fits into the memory, if it does not without."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

from tekso.framework.costs.device_types import DeviceType
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.run.step_parts import StepPlan
from tekso.framework.units import bytes_text

_STATE = ("weights", "used_weights", "slots", "gradients")  # memory that has no examples

_AIM = 0.9  # share of the memory that a step should need, since plans are estimates


def fits(step: StepPlan, device: DeviceType) -> bool:
    """Whether a step fits into the memory of a device."""
    return step.bytes_together <= device.memory_bytes


def first_that_fits(
    step: StepPlan,
    device: DeviceType,
    others: Iterable[tuple[str, Callable[[], StepPlan]]],
    *,
    shards: bool,
) -> StepPlan:
    """Returns a step or, if it does not fit, the first of others that does.

    If none does, it is the step with what was tried.

    Args:
      step: the step.
      device: type of the devices.
      others: settings that need less memory, each with a function that plans its step, or raises
        an ExecutionError if they are impossible.
      shards: whether layouts of other steps may shard weights that this one replicates; otherwise
        no other step is planned if the weights alone do not fit.
    """
    if fits(step, device):
        return step
    state = _state_bytes(step)
    if not shards and state >= device.memory_bytes:
        alone = f"weights, slots and gradients alone: {bytes_text(state)}"
        return dataclasses.replace(step, tried=alone)
    tried = []
    for settings, make in others:
        try:
            other = make()
        except ExecutionError as error:
            tried.append(f"{settings} (impossible: {error})")
            continue
        if fits(other, device):
            note = f"without {settings}: {bytes_text(step.total_bytes)} of memory"
            return dataclasses.replace(other, notes=(note, *other.notes))
        tried.append(settings)
    return dataclasses.replace(step, tried=f"tried: {', '.join(tried)}" if tried else "")


def enough(step: StepPlan, device: DeviceType, count: int, counts: Sequence[int]) -> list[int]:
    """Returns into how many parts a batch could be divided so that a step fits.

    The memory that has examples is assumed to be inversely proportional to their number. The
    largest number is always one, since it may fit though this estimate says that it does not.

    Args:
      step: a step that does not fit.
      device: type of the devices.
      count: number of its parts.
      counts: possible numbers, ascending.

    Returns: the smallest number that should be enough, if there is one, and the largest.
    """
    state, more = _state_bytes(step), [n for n in counts if n > count]
    spare = _AIM * device.memory_bytes - state
    needed = count * (step.bytes_together - state) / spare if spare > 0 else math.inf
    right = [n for n in more if n >= needed]
    return list(dict.fromkeys([*right[:1], *more[-1:]]))


def _state_bytes(step: StepPlan) -> float:
    """Returns the bytes without examples of all devices that share the memory of one."""
    share = math.fsum(step.memory.get(name, 0.0) for name in _STATE) / step.total_bytes
    return share * step.bytes_together
