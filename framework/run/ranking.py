"""Ranks the checkpoints of a run by a metric, to keep the best ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from tekso.framework.run import comparable
from tekso.framework.run.checkpoint_description import describe
from tekso.framework.run.checkpoint_errors import DamagedCheckpointError


class Ranking:
    """The values of a metric of the checkpoints that are kept.

    Args:
      metric: "evaluation/metric".
      goal: whether the smallest or the largest value of the metric is best.
      count: number of best checkpoints to keep.
      warn: called with the text of a warning.
    """

    def __init__(
        self,
        metric: str,
        goal: Literal["min", "max"],
        *,
        count: int = 0,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.metric = metric
        self._goal, self._count, self._warn, self._has_warned = goal, count, warn, False
        self._values: dict[int, float] = {}
        self._earlier = set[int]()  # were best when their values were forgotten
        self._has_forgotten = False  # a value of an earlier meaning of the metric

    def read(self, paths: Mapping[int, str]) -> None:
        """Reads the metrics of checkpoints, {step: path}.

        Only those count that can be compared with the newest one; see `comparable`.
        """
        self._values, self._earlier, self._has_forgotten = {}, set(), False
        for step, path in sorted(paths.items()) if self.metric else ():
            try:
                description = describe(path)
            except DamagedCheckpointError:
                continue  # reported when it is opened
            self.forget_until(comparable.comparable_since(description.input))
            self.add(step, description.metrics)

    def forget_until(self, step: int) -> None:
        """Forgets the values up to and including a step; the checkpoints with the best are kept."""
        forgotten = [one for one in self._values if one <= step]
        self._earlier.update(self._ranked(forgotten)[: self._count])
        self._has_forgotten |= bool(forgotten)
        for one in forgotten:
            del self._values[one]

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds a checkpoint, if it has the metric."""
        value = self._value(metrics)
        if value is not None:
            self._values[step] = value

    def remove(self, step: int) -> None:
        """Removes a checkpoint."""
        self._values.pop(step, None)
        self._earlier.discard(step)

    def best(self) -> int | None:
        """Returns the step of the best checkpoint; None if none has the metric."""
        ranked = self._ranked(list(self._values))
        return ranked[0] if ranked else None

    def earlier_best(self) -> list[int]:
        """Returns the steps of the checkpoints that were best when their values were forgotten."""
        return sorted(self._earlier)

    def why_no_best(self) -> str:
        """Returns a sentence for a message: why there is no best checkpoint."""
        since = " since its meaning or the data changed" if self._has_forgotten else ""
        what = self.metric or "any metric"
        reason = f"no checkpoint was evaluated by {what} (run.keep_best){since}"
        return f"{reason}, so the best one is unknown"

    def to_keep(self, steps: Iterable[int]) -> list[int]:
        """Returns the best of some steps: as many as are to be kept, of each meaning of the metric.

        Args:
          steps: the steps of the checkpoints that exist.
        """
        there = list(steps)
        ranked = self._ranked(step for step in there if step in self._values)[: self._count]
        return ranked + [step for step in there if step in self._earlier]

    def would_be_best(self, metrics: Mapping[str, float]) -> bool:
        """Whether a checkpoint with these metrics would be one of the best that are kept."""
        value = self._value(metrics)
        if value is None or not self._count:
            self._warn_of_no_metric(metrics)
            return False
        kept = sorted(map(self._rank, list(self._values.values())))[: self._count]
        return len(kept) < self._count or self._rank(value) < kept[-1]

    def _warn_of_no_metric(self, metrics: Mapping[str, float]) -> None:
        """Warns once if an evaluation does not report the metric of the best checkpoint."""
        name = self.metric.partition("/")[0]
        there = [key.partition("/")[2] for key in metrics if key.startswith(f"{name}/")]
        if there and self._count and self.metric not in metrics and not self._has_warned:
            self._has_warned = True
            self._warn(
                f"no best checkpoint is kept: the evaluation does not report {self.metric} "
                f"(run.keep_best.metric), only {', '.join(there)}"
            )

    def _ranked(self, steps: Iterable[int]) -> list[int]:
        return sorted(steps, key=lambda step: (self._rank(self._values[step]), step))

    def _value(self, metrics: Mapping[str, float]) -> float | None:
        value = metrics.get(self.metric)
        return value if value is not None and math.isfinite(value) else None

    def _rank(self, value: float) -> float:
        return value if self._goal == "min" else -value
