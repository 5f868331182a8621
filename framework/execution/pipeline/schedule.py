"""Schedules as data: what each device of a pipeline does, and in which order.

| name             | idle / ideal time                  | micro-batches held by device d   |
|------------------|------------------------------------|----------------------------------|
| gpipe            | (K-1) / M                          | M                                |
| 1f1b             | (K-1) / M                          | min(M, K-d)                      |
| interleaved_1f1b | (K-1) / (V·M)                      | device 0: min(M, K + (K-1) / V)  |
| zero_bubble_h1   | (K-1)(F+B-W) / (M(F+B+W))          | min(M, K)                        |

with K devices, M micro-batches, V stages (chunks) a device; F, B, W the times of forward, gradient
of the input and gradient of the weights, the same at all stages. The ideal time is that of the work
of a device. That of zero_bubble_h1 holds for M ≥ K and W no longer than F and B. A micro-batch is
held as long as its activations are: see `simulator.Timeline.held`.

A schedule of one's own is a subclass, in the experiment, that says what each device does:

    class Mine(Schedule):
        def order(self, device, num_devices, num_micro_batches):
            for m in range(num_micro_batches):
                yield Work(device, m, FORWARD)
                yield Work(device, m, BACKWARD)

    execution.schedule = Mine.Params()

Nothing here knows a tensor: who executes a schedule has it checked first (`schedule_check`).
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterator

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


class PipelineSchedule(Configurable):
    """What each device does. A subclass gives `order`, or `actions` with ticks of its own."""

    class Params(Configurable.Params):
        """Params of a schedule."""

    def num_stages(self, num_devices: int) -> int:
        """Returns into how many stages the model is cut; `actions.device_of` says who holds one."""
        return num_devices

    def order(self, device: int, num_devices: int, num_micro_batches: int) -> Iterator[Work]:
        """Yields what a device does, in its order."""
        raise ScheduleError(f"{type(self).__name__} has neither order() nor actions()")

    def actions(self, num_devices: int, num_micro_batches: int) -> Iterator[Action]:
        """Returns what all devices do.

        The ticks are those of a world in which all work takes one. A schedule either never has a
        "weight_gradient", and "backward" means both gradients; or it has one for every stage and
        micro-batch, and "backward" is the gradient of the input alone.

        Raises:
          ScheduleError: there is no such schedule for so many devices and micro-batches.
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

    The backwards go from the first micro-batch to the last, as in all other schedules, so that
    gradients are added up in the same order and are the same to the last bit.

    Source:
      Huang et al. 2018, "GPipe" (arXiv 1811.06965). Its picture has the backwards in the opposite
      order, which takes as long and holds as much.
    """

    def order(self, device: int, num_devices: int, num_micro_batches: int) -> Iterator[Work]:
        """See `PipelineSchedule`."""
        for kind in (FORWARD, BACKWARD):
            for m in range(num_micro_batches):
                yield Work(device, m, kind)


class OneFOneB(PipelineSchedule):
    """One forward, one backward: as fast as GPipe, and a device holds K-d micro-batches at most.

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
    """1F1B with several smaller stages a device: less idle time, more handovers, more held.

        device 0   0 1 0 1 2 a 3 b 2 a 3 b · c · d c d      2 devices, 2 chunks:
        device 1   · 0 1 0 a 1 b 2 a 3 b 2 c 3 d c d ·      stages 0 and 2, stages 1 and 3

    Micro-batches go in groups of as many as there are devices: a group through the first chunk,
    then through the next one, and after the last chunk the next group. The backwards go alike, from
    the last chunk to the first.

    Source:
      Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
      Megatron-LM" (arXiv 2104.04473), section 2.2.
    """

    class Params(PipelineSchedule.Params):
        """Params of InterleavedOneFOneB."""

        chunks: int = param("Stages a device.", default=2)

    def num_stages(self, num_devices: int) -> int:
        """See `PipelineSchedule`."""
        return self._chunks() * num_devices

    def actions(self, num_devices: int, num_micro_batches: int) -> Iterator[Action]:
        """See `PipelineSchedule`."""
        self._chunks()
        if num_devices and num_micro_batches % num_devices:
            below = num_micro_batches - num_micro_batches % num_devices
            near = " or ".join(str(n) for n in (below, below + num_devices) if n)
            raise ScheduleError(
                f"interleaved_1f1b: {num_micro_batches} micro-batches do not divide evenly over "
                f"{num_devices} devices; the nearest that do: {near}. Any number will do for 1f1b"
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
        # Before the first backward a group goes through all chunks but the last, and the first
        # micro-batch through the devices below, there and back.
        ahead = (chunks - 1) * num_devices + 2 * (num_devices - 1 - device)
        return _one_by_one(forwards, backwards, min(ahead, len(forwards)))

    def _chunks(self) -> int:
        chunks: int = self.params.chunks
        if chunks < 1:
            raise ScheduleError(f"interleaved_1f1b: chunks is {chunks}, want 1 or more")
        return chunks


class ZeroBubbleH1(PipelineSchedule):
    """1F1B with weight gradients apart, which fill the time in which 1F1B is idle.

        device 0   0 1 2 · · a A 3 b B 4 c C d D e E      a b c  gradient of the input
        device 1   · 0 1 · a 2 b A 3 c B 4 d C e D E      A B C  gradient of the weights
        device 2   · · 0 a 1 b 2 c A 3 d B 4 e C D E

    Nothing waits for a weight gradient but the update. Device d puts them off by d micro-batches;
    its forwards are K-d ahead, as in 1F1B, so that it holds K micro-batches at most.

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
    """So many forwards first, then one forward and one backward in turn, then the backwards."""
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
"""By the name that `execution.schedule` takes."""


def num_stages_of(schedule: PipelineSchedule, num_devices: int) -> int:
    """Returns into how many stages a schedule cuts the model.

    Raises:
      ScheduleError: what the schedule says is no number of stages.
    """
    count = schedule.num_stages(num_devices)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ScheduleError(
            f"{type(schedule).__name__}.num_stages({num_devices}) is {count!r}, want a whole "
            "number of 1 or more"
        )
    return count


def schedule_of(value: str | PipelineSchedule.Params) -> PipelineSchedule:
    """Returns the schedule of a name, with its defaults, or of Params.

    Raises:
      ScheduleError: there is no schedule of that name.
    """
    if isinstance(value, PipelineSchedule.Params):
        built: PipelineSchedule = value.instantiate()
        return built
    name = value.strip()
    if name in SCHEDULES:
        return SCHEDULES[name].Params().instantiate()
    close = difflib.get_close_matches(name.lower(), SCHEDULES, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise ScheduleError(
        f"execution.schedule is {value!r}, want one of {', '.join(SCHEDULES)}, or the Params of a "
        f"Schedule of one's own{hint}"
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
