"""Parts of a batch on one device: computed concurrently, or one after the other in a loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tekso.framework.step import Flat, Sums, added

Gradients = list[Flat]
"""Gradients of several parts of a batch, not summed yet."""

Compute = Callable[[Mapping[str, tf.Tensor], Any, int], tuple[Gradients, Sums]]
"""`compute(part, index of the first example, index of the part)`."""


def size_of(batch: Mapping[str, tf.Tensor]) -> int:
    """Returns the number of examples."""
    return int(next(iter(batch.values())).shape[0])


def side_by_side(
    batch: Mapping[str, tf.Tensor], start: Any, count: int, compute: Any
) -> tuple[Gradients, Any]:
    """Computes equal parts of a batch concurrently; returns gradients per part and summed sums."""
    gradients, sums = [], []
    size = size_of(batch) // count
    for number in range(count):
        part = {name: x[number * size : (number + 1) * size] for name, x in batch.items()}
        own_gradients, own_sums = compute(part, start + number * size, number)
        gradients += own_gradients
        sums.append(own_sums)
    return gradients, added(sums)


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

    gradients, sums = tf.while_loop(
        lambda i, *_: i < count,
        lambda i, total: (i + 1, tf.nest.map_structure(tf.add, total, part(i))),
        (tf.constant(1), part(0)),
        maximum_iterations=count,
    )[1]
    return [gradients], sums


def part_start(size: int, parts: int, part: Any) -> Any:
    """Returns the index of the first example of a part; the first parts take the remainder."""
    shorter, rest = divmod(size, parts)
    if isinstance(part, int):
        return part * shorter + min(part, rest)
    return part * shorter + tf.minimum(part, rest)
