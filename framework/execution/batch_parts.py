"""Parts of a batch on one device: computed concurrently, or one after the other in a loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tekso.framework.batch_sums import Sums, added
from tekso.framework.execution import tower_sums
from tekso.framework.step import Flat
from tekso.framework.while_loops import while_loop

Gradients = list[Flat]
"""Gradients of several parts of a batch, not summed yet."""

Compute = Callable[[Mapping[str, tf.Tensor], Any, int], tuple[Gradients, Sums]]
"""`compute(part, index of the first example, index of the part)`."""


def size_of(batch: Mapping[str, tf.Tensor]) -> int:
    """Returns the number of examples."""
    return int(next(iter(batch.values())).shape[0])


def side_by_side(
    batch: Mapping[str, tf.Tensor], start: Any, count: int, compute: Any, *, in_turns: bool = False
) -> tuple[Gradients, Any]:
    """Computes equal parts of a batch concurrently.

    Args:
      batch: the batch.
      start: index of its first example.
      count: number of parts.
      compute: computes a part.
      in_turns: whether the parts may sum over each other by `sum_over_towers`.

    Returns: the gradients of each part, and the summed sums.
    """
    size = size_of(batch) // count

    def one(number: int) -> tuple[Gradients, Any]:
        part = {name: x[number * size : (number + 1) * size] for name, x in batch.items()}
        return compute(part, start + number * size, number)  # type: ignore[no-any-return]

    if in_turns and count > 1:
        found = tower_sums.in_turns(count, one)
    else:
        found = [one(number) for number in range(count)]
    return [g for gradients, _ in found for g in gradients], added([sums for _, sums in found])


def one_after_the_other(
    batch: Mapping[str, tf.Tensor], start: Any, count: int, compute: Compute
) -> tuple[Gradients, Sums]:
    """Computes equal parts of a batch in a loop that accumulates their gradients and sums."""
    if count == 1:
        return compute(batch, start, 0)
    size = size_of(batch) // count

    def part(index: Any) -> tuple[Flat, Sums]:
        examples = {
            name: tf.slice(x, [index * size] + [0] * (x.shape.rank - 1), [size, *x.shape[1:]])
            for name, x in batch.items()
        }
        gradients, sums = compute(examples, start + index * size, 0)
        return added(gradients), sums

    first = part(0)
    # Otherwise, TensorFlow begins a part before the one before has freed its tensors.
    with tf.control_dependencies(tf.nest.flatten(first)):
        second = tf.identity(1)
    gradients, sums = while_loop(
        lambda i, *_: i < count,
        lambda i, total: (i + 1, tf.nest.map_structure(tf.add, total, part(i))),
        (second, first),
        maximum_iterations=count,
        parallel_iterations=1,
    )[1]
    return [gradients], sums


def part_start(size: int, parts: int, part: Any) -> Any:
    """Returns the index of the first example of a part; the first parts take the remainder."""
    shorter, rest = divmod(size, parts)
    if isinstance(part, int):
        return part * shorter + min(part, rest)
    return part * shorter + tf.minimum(part, rest)
