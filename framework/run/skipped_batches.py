"""Which batch a step trains on, after a run has skipped batches.

    steps     0 … 109 | 110 111 …      Batches 110–119 are skipped from step 110 on:
    batches   0 … 109 | 120 121 …      SkippedBatches(ranges=((110, 110, 120),), rollbacks=1)

The mapping is part of every checkpoint. So the batch of a step remains a function of the data, the
seed and the position, also if a run is killed and resumed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

_SKIPPED, _ROLLBACKS = "skipped_batches", "rollbacks"


@dataclasses.dataclass(frozen=True)
class SkippedBatches:
    """The batches that a run has skipped, as described in its checkpoints.

    Attributes:
      ranges: (step, first, end), in ascending order: from `step` on, the batches from `first` to
        `end` - 1 are skipped.
      rollbacks: how often the run was rolled back.
    """

    ranges: tuple[tuple[int, int, int], ...] = ()
    rollbacks: int = 0

    @staticmethod
    def of(input: Mapping[str, Any]) -> SkippedBatches:
        """Returns the skipped batches from the field `input` of a checkpoint's description.

        Raises:
          ValueError: the field does not have the form that `described` writes.
        """
        ranges, rollbacks = input.get(_SKIPPED, []), input.get(_ROLLBACKS, 0)
        if not isinstance(ranges, list) or not all(map(_is_range, ranges)):
            raise ValueError(
                f"input: {_SKIPPED} must be a list of [step, first, end], three integers with "
                "first < end"
            )
        if not _is_count(rollbacks):
            raise ValueError(f"input: {_ROLLBACKS} must be an integer, at least 0")
        steps = [step for step, _, _ in ranges]
        if steps != sorted(steps):
            raise ValueError(f"input: {_SKIPPED} must be in ascending order of step")
        return SkippedBatches(tuple((s, first, end) for s, first, end in ranges), rollbacks)

    def described(self, input: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the field `input` of a description, with the skipped batches."""
        rest = {name: value for name, value in input.items() if name not in (_SKIPPED, _ROLLBACKS)}
        own = {_SKIPPED: [list(one) for one in self.ranges], _ROLLBACKS: self.rollbacks}
        return {**rest, **own} if self.rollbacks else rest

    def position(self, step: int) -> int:
        """Returns the number of the batch that a step trains on; steps count from 0."""
        return step + sum(end - first for start, first, end in self.ranges if start <= step)

    def batches(self, numbered: Callable[[int], Iterator[Any]], step: int) -> Generator[Any]:
        """Yields the batches of the steps from `step` on.

        Args:
          numbered: returns an iterator over all batches, starting at a number.
          step: the first step.
        """
        later = [start for start, _, _ in self.ranges if start > step]
        for begin in (*later, None):
            found = numbered(self.position(step))
            try:
                yield from found if begin is None else itertools.islice(found, begin - step)
            finally:
                getattr(found, "close", lambda: None)()
            step = step if begin is None else begin

    def begins_at(self, step: int) -> bool:
        """Whether the last skipped batches are those that `step` would have trained on."""
        return bool(self.ranges) and self.ranges[-1][0] == step

    def rolled_back(self, begin: int, end: int) -> SkippedBatches:
        """Returns the skipped batches after a rollback.

        Args:
          begin: from this step on, batches are skipped.
          end: number of steps done before the rollback; the batches of steps from `begin` to
            `end` - 1 are skipped, and all that were skipped between them.
        """
        earlier = SkippedBatches(tuple(one for one in self.ranges if one[0] < begin))
        skipped = (begin, earlier.position(begin), self.position(end - 1) + 1)
        return SkippedBatches((*earlier.ranges, skipped), self.rollbacks + 1)


def _is_range(value: Any) -> bool:
    is_list = isinstance(value, list) and len(value) == 3 and all(map(_is_count, value))
    return is_list and value[1] < value[2]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
