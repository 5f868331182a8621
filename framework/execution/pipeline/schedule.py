"""Schedules as data: which actions each device of a pipeline runs, and in which order.

| name             | idle / ideal time                  | micro-batches saved on device d  |
|------------------|------------------------------------|----------------------------------|
| gpipe            | (K-1) / M                          | M                                |
| 1f1b             | (K-1) / M                          | min(M, K-d)                      |
| interleaved_1f1b | (K-1) / (V·M)                      | device 0: min(M, K + (K-1) / V)  |
| zero_bubble_h1   | (K-1)(F+B-W) / (M(F+B+W))          | min(M, K)                        |

with K devices, M micro-batches, and V stages (chunks) per device. F, B and W are the times of the
forward pass, of the gradients of the inputs and of the gradients of the weights; all stages have
equal times. The ideal time is the time of the work of a device. The figure of zero_bubble_h1 holds
for M ≥ K, and W at most F and at most B. A micro-batch is saved on a device as long as its
activations are: see `simulator.Timeline.held`.

A custom schedule is a subclass, in the experiment, that yields the work of each device:

    class Mine(PipelineSchedule):
        def order(self, device, num_devices, num_micro_batches):
            for m in range(num_micro_batches):
                yield Work(device, m, FORWARD)
                yield Work(device, m, BACKWARD)

    execution.schedule = Mine.Params()

This module handles no tensors. Check a schedule before executing it (`schedule_check`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from tekso.framework.counting import multiples_near
from tekso.framework.execution.pipeline.actions import (
    BACKWARD,
    FORWARD,
    KINDS,
    WEIGHT_GRADIENT,
    Action,
    Kind,
    ScheduleError,
    Work,
    listed,
)
from tekso.framework.execution.pipeline.timing import in_ticks
from tekso.framework.params import Configurable, param
from tekso.framework.spelling import close_matches


class PipelineSchedule(Configurable):
    """The work of each device, in order.

    A subclass overrides `order`, or `actions` to set the ticks itself.
    """

    class Params(Configurable.Params):
        """Params of a schedule."""

    def num_stages(self, num_devices: int) -> int:
        """Returns the number of stages; `actions.device_of` assigns them to devices."""
        return num_devices

    def order(self, device: int, num_devices: int, num_micro_batches: int) -> Iterator[Work]:
        """Yields the work of a device, in order."""
        raise ScheduleError(f"{type(self).__name__} overrides neither order() nor actions()")

    def actions(self, num_devices: int, num_micro_batches: int) -> Iterator[Action]:
        """Yields the actions of all devices.

        Ticks assume that all work takes one tick. Either a schedule has no "weight_gradient", and
        "backward" computes both gradients; or it has one for every stage and micro-batch, and
        "backward" computes only the gradients of the inputs.

        Raises:
          ScheduleError: the schedule does not support this number of devices or micro-batches.
        """
        num_stages = num_stages_of(self, num_devices)
        orders = [
            listed(
                functools.partial(self.order, d, num_devices, num_micro_batches),
                what=f"{type(self).__name__}.order of device {d}",
                kind=Work,
                most=len(KINDS) * num_stages * num_micro_batches,
            )
            for d in range(num_devices)
        ]
        return in_ticks(orders, num_stages)


class Gpipe(PipelineSchedule):
    """All forwards, then all backwards.

        device 0   0 1 2 · · · · a b c      0 1 2  forward of micro-batch 0, 1, 2
        device 1   · 0 1 2 · · a b c ·      a b c  backward of the same
        device 2   · · 0 1 2 a b c · ·

    The backward passes run from the first micro-batch to the last, as in all other schedules.
    Gradients are therefore summed in the same order and are bit-identical.

    Source:
      Huang et al. 2018, "GPipe" (arXiv 1811.06965). The figure in the paper has the backward passes
      in the opposite order, which takes the same time and memory.
    """

    def order(self, device: int, num_devices: int, num_micro_batches: int) -> Iterator[Work]:
        """See `PipelineSchedule`."""
        for kind in (FORWARD, BACKWARD):
            for m in range(num_micro_batches):
                yield Work(device, m, kind)


class OneFOneB(PipelineSchedule):
    """One forward, one backward: as fast as GPipe, but device d saves at most K-d micro-batches.

        device 0   0 1 2 · · a 3 b 4 c · d · e
        device 1   · 0 1 · a 2 b 3 c 4 d · e ·
        device 2   · · 0 a 1 b 2 c 3 d 4 e · ·

    Source:
      Narayanan et al. 2020, "Memory-Efficient Pipeline-Parallel DNN Training" (arXiv 2006.09503),
      PipeDream-Flush.
    """

    def order(self, device: int, num_devices: int, num_micro_batches: int) -> Iterator[Work]:
        """See `PipelineSchedule`."""
        ahead = min(num_devices - 1 - device, num_micro_batches)
        forwards = [Work(device, m, FORWARD) for m in range(num_micro_batches)]
        backwards = [Work(device, m, BACKWARD) for m in range(num_micro_batches)]
        return _one_by_one(forwards, backwards, ahead)


class InterleavedOneFOneB(PipelineSchedule):
    """1F1B with several smaller stages per device: less idle time, more transfers, more memory.

        device 0   0 1 0 1 2 a 3 b 2 a 3 b · c · d c d      2 devices, 2 chunks:
        device 1   · 0 1 0 a 1 b 2 a 3 b 2 c 3 d c d ·      stages 0 and 2, stages 1 and 3

    Micro-batches run in groups. A group has as many micro-batches as there are devices. It runs
    through the first chunk, then through the next one, and after the last chunk the next group
    follows. The backward passes run in the same groups, from the last chunk to the first.

    Source:
      Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
      Megatron-LM" (arXiv 2104.04473), section 2.2.
    """

    class Params(PipelineSchedule.Params):
        """Params of InterleavedOneFOneB."""

        chunks: int = param("Stages per device.", default=2)

    def num_stages(self, num_devices: int) -> int:
        """See `PipelineSchedule`."""
        return self._chunks() * num_devices

    def actions(self, num_devices: int, num_micro_batches: int) -> Iterator[Action]:
        """See `PipelineSchedule`."""
        self._chunks()
        if num_devices and num_micro_batches % num_devices:
            near = " or ".join(map(str, multiples_near(num_micro_batches, num_devices)))
            raise ScheduleError(
                f"interleaved_1f1b: {num_micro_batches} micro-batches do not divide evenly over "
                f"{num_devices} devices; the nearest numbers that do: {near}. 1f1b supports any "
                "number"
            )
        return super().actions(num_devices, num_micro_batches)

    def order(self, device: int, num_devices: int, num_micro_batches: int) -> Iterator[Work]:
        """See `PipelineSchedule`."""
        chunks = self._chunks()
        forwards, backwards = [], []
        for first in range(0, num_micro_batches, num_devices):
            group = range(first, first + num_devices)
            stages = range(device, chunks * num_devices, num_devices)
            forwards += [Work(s, m, FORWARD) for s in stages for m in group]
            backwards += [Work(s, m, BACKWARD) for s in reversed(stages) for m in group]
        # Before the first backward pass, a group runs through all chunks except the last, and the
        # first micro-batch runs through the following devices, forward and backward.
        ahead = (chunks - 1) * num_devices + 2 * (num_devices - 1 - device)
        return _one_by_one(forwards, backwards, min(ahead, len(forwards)))

    def _chunks(self) -> int:
        chunks: int = self.params.chunks
        if chunks < 1:
            raise ScheduleError(f"interleaved_1f1b: chunks is {chunks}, expected at least 1")
        return chunks


class ZeroBubbleH1(PipelineSchedule):
    """1F1B with separate weight gradients, which fill the idle time of 1F1B.

        device 0   0 1 2 · · a A 3 b B 4 c C d D e E      a b c  gradients of the inputs
        device 1   · 0 1 · a 2 b A 3 c B 4 d C e D E      A B C  gradients of the weights
        device 2   · · 0 a 1 b 2 c A 3 d B 4 e C D E

    Only the update waits for weight gradients. Device d delays them by d micro-batches. Its forward
    passes are K-d micro-batches ahead, as in 1F1B, so it saves at most K micro-batches.

    Source:
      Qi et al. 2023, "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241), ZB-H1.
    """

    def order(self, device: int, num_devices: int, num_micro_batches: int) -> Iterator[Work]:
        """See `PipelineSchedule`."""
        ahead = min(num_devices - device, num_micro_batches)
        for m in range(ahead):
            yield Work(device, m, FORWARD)
        for m in range(num_micro_batches):
            yield Work(device, m, BACKWARD)
            if m >= device:
                yield Work(device, m - device, WEIGHT_GRADIENT)
            if m + ahead < num_micro_batches:
                yield Work(device, m + ahead, FORWARD)
        for m in range(max(0, num_micro_batches - device), num_micro_batches):
            yield Work(device, m, WEIGHT_GRADIENT)


def _one_by_one(forwards: list[Work], backwards: list[Work], ahead: int) -> Iterator[Work]:
    """Yields `ahead` forwards, then forwards and backwards alternately, then the last backwards."""
    yield from forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(forwards) - ahead :]


SCHEDULES: dict[str, type[PipelineSchedule]] = {
    "gpipe": Gpipe,
    "1f1b": OneFOneB,
    "interleaved_1f1b": InterleavedOneFOneB,
    "zero_bubble_h1": ZeroBubbleH1,
}
"""The schedules by name, as in `execution.schedule`."""


def num_stages_of(schedule: PipelineSchedule, num_devices: int) -> int:
    """Returns the number of stages of a schedule.

    Raises:
      ScheduleError: the schedule does not return a positive integer.
    """
    count = schedule.num_stages(num_devices)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ScheduleError(
            f"{type(schedule).__name__}.num_stages({num_devices}) is {count!r}, expected an "
            "integer of at least 1"
        )
    return count


def schedule_of(value: str | PipelineSchedule.Params) -> PipelineSchedule:
    """Returns a schedule by its name, with default Params, or from its Params.

    Raises:
      ScheduleError: no schedule has that name.
    """
    name = value.strip() if isinstance(value, str) else ""
    if name in SCHEDULES:
        value = SCHEDULES[name].Params()
    if isinstance(value, PipelineSchedule.Params):
        built: PipelineSchedule = value.instantiate()
        return built
    close = close_matches(name, SCHEDULES, count=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise ScheduleError(
        f"execution.schedule is {value!r}, expected one of {', '.join(SCHEDULES)}, or the Params "
        f"of a custom PipelineSchedule{hint}"
    )


__all__ = [
    "BACKWARD",
    "FORWARD",
    "SCHEDULES",
    "WEIGHT_GRADIENT",
    "Action",
    "Gpipe",
    "InterleavedOneFOneB",
    "Kind",
    "OneFOneB",
    "PipelineSchedule",
    "ScheduleError",
    "Work",
    "ZeroBubbleH1",
    "num_stages_of",
    "schedule_of",
]
