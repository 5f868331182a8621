"""Assigns pairs to rows, so that both sides of every row fit.

source   [ a a a | b b b b | c c ]
target   [ a a | b b b b | c c c ]
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tekso.framework.input import shuffle
from tekso.framework.input.packing import Packing, pack

Ints = npt.NDArray[np.int64]


def pack_pairs(
    lengths: tuple[Ints, Ints], capacities: tuple[int, int], *, key: shuffle.Words
) -> Packing:
    """Packs pairs into few rows, by the larger share of a row that either side of a pair takes.

    Args:
      lengths: lengths of the source and of the target of each pair, at most as long as a row.
      capacities: length of a row on the source side and on the target side.
      key: random key that orders pairs of equal length.

    Shapes:
      lengths: two of [pairs]
      key: [1]
    """
    whole = max(capacities)
    shares = [
        -(-size * whole // capacity) for size, capacity in zip(lengths, capacities, strict=True)
    ]
    return pack(np.maximum(*shares), whole, key=key)


def pack_in_order(lengths: tuple[Ints, Ints], capacities: tuple[int, int]) -> Packing:
    """Packs pairs in the given order; a new row begins when the next pair does not fit.

    Args:
      lengths: lengths of the source and of the target of each pair, at most as long as a row.
      capacities: length of a row on the source side and on the target side.

    Shapes:
      lengths: two of [pairs]
    """
    starts = [0]
    source = target = 0
    for number, (one, other) in enumerate(zip(*(side.tolist() for side in lengths), strict=True)):
        if source + one > capacities[0] or target + other > capacities[1]:
            starts.append(number)
            source = target = 0
        source += one
        target += other
    return Packing(np.arange(len(lengths[0])), np.array([*starts, len(lengths[0])], np.int64))
