"""Attributes every second of a run to what it was spent on.

    start │ input │ compile │ input │ step │ input │ step │ evaluation │ checkpoint │ step …

Exactly one activity is current at any time, so the seconds of all activities add up to the time of
the process. A process that resumes takes over the seconds of the earlier ones; those after the step
that it restores become `LOST`.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tekso.framework.run.report.lines import WIDTH, duration, wrapped

START = "start"
INPUT = "input"
COMPILE = "compile"
STEP = "step"
EVALUATION = "evaluation"
CHECKPOINT = "checkpoint"
DECODING = "decoding"
OTHER = "other"
LOST = "lost"

ACTIVITIES = {
    START: "imports, data, building and restoring the model",
    INPUT: "training steps that wait for their batch",
    COMPILE: "the first call of a step with batches of a new shape",
    STEP: "all other training steps",
    EVALUATION: "evaluation passes and their decoding",
    CHECKPOINT: "checkpoints, while training waits for them",
    DECODING: "decoding at the end of the run",
    OTHER: "log lines, curves, timelines",
    LOST: "work after a checkpoint that was done again, because the run resumed from there",
}
"""{activity: what it contains}, in the order of a run."""

# {activity: (share of the run that makes it the bottleneck, what to do)}
_ADVICE = {
    INPUT: (0.2, "training waits for its input: cache or simplify the preprocessing"),
    EVALUATION: (0.4, "evaluate less often (run.eval_every_steps) or fewer batches (max_batches)"),
    CHECKPOINT: (0.2, "save less often (run.checkpoint_every_steps)"),
    DECODING: (0.4, "a longer run has less of it; run.decode_at_end=false has none"),
    LOST: (0.1, "save more often (run.checkpoint_every_steps)"),
    COMPILE: (0.4, "a longer run has less of it"),
    START: (0.4, "a longer run has less of it"),
}


_SMALL_BUFFER = (
    ", or keep a copy of the state in memory while it is written (run.checkpoint_buffer_mb)"
)
_SEVERAL_SHAPES = "a longer run, or fewer shapes of batches, has less of it"


class TimeUse:
    """A stopwatch for activities.

    Args:
      begin: when the process began, by the same clock; None: now.
      clock: returns seconds.
    """

    def __init__(
        self, begin: float | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock = clock
        self._since = clock() if begin is None else begin
        self._current, self._is_resumed = START, False
        self._seconds = dict.fromkeys(ACTIVITIES, 0.0)

    def switch(self, activity: str) -> str:
        """Ends the current activity and begins another; returns the one that ended."""
        now, before = self._clock(), self._current
        self._seconds[before] += now - self._since
        self._since, self._current = now, activity
        return before

    @contextlib.contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """Attributes the time of a block to an activity, except for blocks inside of it."""
        before = self.switch(activity)
        try:
            yield
        finally:
            self.switch(before)

    def seconds(self) -> dict[str, float]:
        """Returns {activity: seconds so far}, over all processes of the run."""
        self.switch(self._current)
        return dict(self._seconds)

    def resume(self, kept: Mapping[str, Any], last: Mapping[str, Any]) -> None:
        """Takes over the seconds of earlier work of a run that resumes.

        If this process did that work and was rolled back, its own time since `kept` is lost.

        Args:
          kept: `seconds()` at the last record up to the restored step; {} if there is none.
          last: `seconds()` at the last record of all.
        """
        kept, last = valid(kept), valid(last)
        own = self.seconds()
        if self._is_resumed:
            self._seconds = dict.fromkeys(ACTIVITIES, 0.0)
            last = own
        self._is_resumed = True
        for activity, seconds in kept.items():
            self._seconds[activity] += seconds
        self._seconds[LOST] += max(0.0, math.fsum(last.values()) - math.fsum(kept.values()))


def valid(seconds: Mapping[str, Any]) -> dict[str, float]:
    """Returns the seconds of known activities that a record has, without damaged ones."""
    found = {name: seconds.get(name) for name in ACTIVITIES} if seconds else {}
    return {
        name: float(value)
        for name, value in found.items()
        if isinstance(value, int | float) and math.isfinite(value) and value > 0
    }


def lines(
    seconds: Mapping[str, float], *, shapes: int = 1, fits_buffer: bool = False, width: int = WIDTH
) -> list[str]:
    """Returns where the time of a run went, as text, and its bottleneck if there is one.

    Args:
      seconds: {activity: seconds}.
      shapes: number of shapes of training batches that were compiled.
      fits_buffer: whether all values of a checkpoint fit into `run.checkpoint_buffer_mb`.
      width: columns of a line.
    """
    total = math.fsum(seconds.values())
    if total <= 0:
        return []
    shown = sorted(ACTIVITIES, key=lambda name: -seconds.get(name, 0.0))
    parts = [  # a no-break space: a line does not end between a name and its time
        f"{name}\u00a0{duration(seconds[name])} ({100 * seconds[name] / total:.0f}%)"
        for name in shown
        if seconds.get(name, 0.0) >= 0.005 * total
    ]
    texts = [f"  time of the run: {duration(total)}: {', '.join(parts)}"]
    if sentence := bottleneck(seconds, shapes=shapes, fits_buffer=fits_buffer):
        texts.append(f"  {sentence}")
    return [line for text in texts for line in wrapped(text, width)]


def bottleneck(seconds: Mapping[str, float], *, shapes: int = 1, fits_buffer: bool = False) -> str:
    """Returns a sentence about the activity that takes too large a share of a run, or "".

    Args:
      seconds: as of `lines`.
      shapes: as of `lines`.
      fits_buffer: as of `lines`.
    """
    total = math.fsum(seconds.values())
    shares = {name: seconds.get(name, 0.0) / total for name in _ADVICE} if total > 0 else {}
    found = [name for name, share in shares.items() if round(share, 2) >= _ADVICE[name][0]]
    if not found:
        return ""
    name = max(found, key=lambda name: shares[name] / _ADVICE[name][0])
    advice = _SEVERAL_SHAPES if name == COMPILE and shapes > 1 else _ADVICE[name][1]
    if name == CHECKPOINT and not fits_buffer:
        advice += _SMALL_BUFFER
    return f"bottleneck: {name}, {100 * shares[name]:.0f}% of the time; {advice}"
