"""Partitions a list of pieces into stages, so that the most expensive stage costs least.

The result is exact: the contiguous partition with the smallest largest cost, found by bisection
over the sums of neighbouring costs, O(L² log L). If there are several, it is the one whose last
stages have the most pieces, because the first stages save the activations of the most
micro-batches. (A greedy histogram of prefixes leaves stages empty: costs 1, 1, 10, 1 in 4 stages.)
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

from tekso.framework.execution.errors import ExecutionError


def min_max(costs: Sequence[float], num_stages: int) -> list[int]:
    """Returns the number of neighbouring pieces of each stage, which is at least one.

    Args:
      costs: costs of the pieces, in order; not negative.
      num_stages: number of stages; at most the number of pieces.
    """
    costs = costs[::-1]
    sums = [0.0, *itertools.accumulate(costs)]

    def sizes(limit: float) -> list[int] | None:
        """Returns sizes for which no stage costs more than `limit`; None if there are none."""
        result, start = [], 0
        for left in reversed(range(num_stages)):
            end = bisect.bisect_right(sums, sums[start] + limit * (1 + 1e-12)) - 1
            end = min(end, len(costs) - left)  # leave at least one piece for each other stage
            if end <= start:
                return None
            result.append(end - start)
            start = end
        return result if start == len(costs) else None  # from the last stage to the first

    low, high = 0.0, sums[-1]
    best = sizes(high)
    if best is None:
        raise ValueError(f"{len(costs)} pieces cannot be divided into {num_stages} stages")
    # The smallest limit is the cost of some stage. So narrow the bounds, and lower the upper bound
    # to the largest cost of the partition found.
    while True:
        reached = largest(costs, best)
        high = min(high, reached)
        middle = (low + high) / 2
        if not low < middle < high or high - low <= 1e-9 * high:
            return best[::-1]
        found = sizes(middle)
        if found is None:
            low = middle
        else:
            best = found


def largest(costs: Sequence[float], sizes: Sequence[int]) -> float:
    """Returns the cost of the most expensive stage."""
    return max(stage_costs(costs, sizes))


def stage_costs(costs: Sequence[float], sizes: Sequence[int]) -> list[float]:
    """Returns the cost of every stage."""
    ends = list(itertools.accumulate(sizes))
    return [sum(costs[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def balance(
    names: Sequence[str],
    costs: Sequence[float],
    num_stages: int,
    given: Sequence[int] | None,
    *,
    num_devices: int,
    most_devices: int,
) -> list[int]:
    """Returns the number of pieces of each stage: as given, or by cost.

    Args:
      names: names of the pieces, in order.
      costs: costs of the pieces.
      num_stages: number of stages of the schedule on `num_devices` devices.
      given: number of pieces of every stage; None: by cost.
      num_devices: execution.num_stages.
      most_devices: the largest number of devices for which the schedule has no more stages than
        there are pieces.

    Raises:
      ExecutionError: there are too few pieces, or the given numbers do not add up; lists the
        pieces with their shares of the cost.
    """
    what = f"{num_stages} stages"
    if num_stages != num_devices:
        what += f" ({num_stages // num_devices} on each of {num_devices} devices)"
    if num_stages > len(names):
        advice = f"set execution.num_stages to at most {most_devices}"
        if num_stages != num_devices:
            advice = (
                f"{advice}, or choose " if most_devices else "choose "
            ) + "an execution.schedule with fewer stages per device"
        if len(names) == 1:
            advice = (
                "define pieces() of the task, which returns the parts of its loss in order "
                f'(docs/pipelines.md, "Custom tasks and schedules"); or {advice}'
            )
        raise ExecutionError(
            f"a pipeline of {what} needs at least {num_stages} pieces, and the task has "
            f"{len(names)}:\n{listing(names, costs)}\n{advice}"
        )
    if given is None:
        return min_max(costs, num_stages)
    problems = []
    if len(given) != num_stages:
        problems.append(f"has {len(given)} numbers for {what}")
    if any(n < 1 for n in given):
        problems.append("leaves a stage without a piece")
    if sum(given) != len(names):
        problems.append(f"adds up to {sum(given)}, but the task has {len(names)} pieces")
    if problems:
        raise ExecutionError(
            f"execution.balance {list(given)} {' and '.join(problems)}; balanced by cost it is "
            f"{min_max(costs, num_stages)}. The pieces and their shares of the cost:\n"
            f"{listing(names, costs)}"
        )
    return list(given)


def listing(names: Sequence[str], costs: Sequence[float], *, most: int = 40) -> str:
    """Returns a line for each piece with its share of the cost."""
    total = sum(costs) or 1.0
    lines = [f"  {c / total:6.1%}  {name}" for name, c in zip(names, costs, strict=True)]
    if len(lines) > most:
        half = most // 2
        lines = [*lines[:half], f"  … {len(lines) - 2 * half} more …", *lines[-half:]]
    return "\n".join(lines)
