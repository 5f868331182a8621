"""Parts of the batches of an input, as processes of data-parallel training have them."""

from __future__ import annotations

from tekso.framework.batch_part import equal_part
from tekso.framework.input.input import Batch, Input


def part_of(one: Input, step: int, part: int, parts: int, *, even: bool = False) -> Batch:
    """Returns one of several consecutive parts, of sizes that differ by one example at most."""
    return one.own_part(step, lambda size: (equal_part(size, part, parts, even=even),))
