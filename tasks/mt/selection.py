"""The choice of pairs by length."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from tekso.framework.input.packing import blocks, compact


@dataclasses.dataclass(frozen=True)
class Selection:
    """The pairs of a corpus that are used.

    Attributes:
      pairs: [pairs used] numbers of the pairs, in the order of the data; int32 if they fit.
      left_out: {reason: number of pairs left out}; a pair is counted under the first reason.
    """

    pairs: npt.NDArray[Any]
    left_out: dict[str, int]

    @property
    def num_left_out(self) -> int:
        """Number of pairs that are left out."""
        return sum(self.left_out.values())


def choose(
    source_lengths: npt.NDArray[Any],
    target_lengths: npt.NDArray[Any],
    *,
    source_length: int,
    target_length: int,
    max_ratio: float | None,
) -> Selection:
    """Selects the pairs that are short enough and whose lengths are similar enough.

    Args:
      source_lengths: number of tokens of each source.
      target_lengths: number of tokens of each target.
      source_length: most tokens of a source.
      target_length: most tokens of a target.
      max_ratio: largest ratio between the lengths of the two sides; None: no limit.

    Shapes:
      source_lengths, target_lengths: [pairs], at least 1
    """
    left_out: dict[str, int] = {}
    pairs = [np.zeros(0, np.int32)]
    for block in blocks(len(source_lengths)):  # so that little memory is needed per pair
        source, target = source_lengths[block], target_lengths[block]
        reasons = {
            f"source longer than {source_length} tokens": source > source_length,
            f"target longer than {target_length} tokens": target > target_length,
        }
        if max_ratio is not None:
            longer, shorter = np.maximum(source, target), np.minimum(source, target)
            reasons[f"one side over {max_ratio:g} times as long"] = longer > max_ratio * shorter
        taken = np.ones(len(source), bool)
        for reason, holds in reasons.items():
            left_out[reason] = left_out.get(reason, 0) + int((holds & taken).sum())
            taken &= ~holds
        pairs.append(compact(np.flatnonzero(taken) + block.start))
    return Selection(
        np.concatenate(pairs), {why: count for why, count in left_out.items() if count}
    )
