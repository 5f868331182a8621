"""Defects of DTensor in single ops: slices, gathers, conditions and resharding."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import tensorflow as tf
from reproducing import COLUMNS, ROWS, WHOLE_2D, Place, computed, equal, values
from tensorflow.python.eager import context

from tekso.framework.execution.workarounds import forms, tensors
from tekso.framework.weight_update import select


def scalar_where(place: Place, avoided: bool) -> bool:
    """tf.where with a scalar condition and a sharded tensor crashes the process."""
    x = values(4, 6)

    def negated(x: tf.Tensor) -> tf.Tensor:
        condition = tf.reduce_sum(x) > 1e6
        return select(tf.reshape(condition, [1]), x, -x) if avoided else tf.where(condition, x, -x)

    y = computed(negated, place.put(x, ROWS))
    return equal(place, y, -x)


def new_axis(place: Place, avoided: bool) -> bool:
    """x[:, None] of a sharded tensor has no layout."""
    x = values(4, 6)
    expand = (lambda x: tf.expand_dims(x, 1)) if avoided else (lambda x: x[:, None])
    return equal(place, computed(lambda x: expand(x) * 2.0, place.put(x, ROWS)), 2 * x[:, None])


def negative_step(place: Place, avoided: bool) -> bool:
    """A slice with a negative step along a sharded dim reverses each shard alone."""
    x = values(4, 6)

    def reverse(x: tf.Tensor) -> tf.Tensor:
        return tf.gather(x, range(5, -1, -1), axis=1) if avoided else x[:, ::-1]

    return equal(place, computed(reverse, place.put(x, COLUMNS)), x[:, ::-1])


def inner_relayout(place: Place, avoided: bool) -> bool:
    """The default resharding between two inner dims of a tensor of rank 4 gives wrong values."""
    x = values(2, 4, 4, 4)
    placed = place.put(x, (None, "m", None, None))
    return equal(place, place.reshard(placed, (None, None, "m", None)), x)


def changing_integer(place: Place, avoided: bool) -> bool:
    """A small integer is compiled as a constant, so a function is compiled again for another."""

    @tf.function(autograph=False)
    def scale(x: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
        return x * tf.cast(number[0], tf.float32)

    x, compiled = values(4), []
    for value in (2, 3):
        number = np.int32(value)
        number = tensors.copies(number) if avoided else number[np.newaxis]
        is_right = equal(place, scale(place.put(x, ("m",)), place.put(number)), x * value)
        compiled.append(context.context().list_function_names())
    return is_right and compiled[0] == compiled[1]


def concatenated_shards(place: Place, avoided: bool) -> bool:
    """Tensors cannot be concatenated along a dim that is sharded afterwards."""
    x, y = values(4, 6), values(4, 2)

    def join(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        joined = tf.concat([x, y], 1)
        if avoided:
            joined = tensors.separated(place.reshard(joined, WHOLE_2D))
        return place.reshard(joined, COLUMNS)

    return equal(place, computed(join, place.put(x), place.put(y)), np.concatenate([x, y], 1))


def row_of_stacked_weights(place: Place, avoided: bool) -> bool:
    """x[-1], of which an einsum contracts two dims, one of them sharded."""
    x, w = values(8, 4, 2), values(3, 4, 2, 6)

    def contract(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        row = forms.take_row(cast(Any, None), w, 2) if avoided else w[-1]  # needs no context
        return tf.einsum("abc,bcd->ad", x, row)

    layouts = (None, "m", None), (None, "m", None, None)
    y = computed(contract, place.put(x, layouts[0]), place.put(w, layouts[1]))
    return equal(place, y, np.einsum("abc,bcd->ad", x, w[-1]))


def resharded_gather(place: Place, avoided: bool) -> bool:
    """A gather whose result is sharded along a dim that is not sharded in its input."""
    x = values(4, 6)

    def reverse(x: tf.Tensor) -> tf.Tensor:
        y = tf.gather(x, tf.range(5, -1, -1), axis=1)
        if avoided:
            y = tensors.separated(place.reshard(y, WHOLE_2D))
        return place.reshard(y, ROWS)

    return equal(place, computed(reverse, place.put(x)), x[:, ::-1])


def row_of_replicated_weights(place: Place, avoided: bool) -> bool:
    """The same of replicated weights, if the other operand and the result are sharded."""
    x, w = values(6, 4, 8), values(3, 2, 4, 8, 6)
    variable = tensors.new_variable(place.put(w))

    def contract(x: tf.Tensor) -> tf.Tensor:
        w = variable.read_value()
        row = forms.take_row(cast(Any, None), w, 1) if avoided else w[1]
        return place.reshard(tf.einsum("dfcb,bfc->cd", row, x), (None, "m"))

    y = computed(contract, place.put(x, ("m", None, None)))
    return equal(place, y, np.einsum("dfcb,bfc->cd", w[1], x))


def sorted_values(place: Place, avoided: bool) -> bool:
    """The gradient of the values of top_k scatters by indices of the whole tensor into a shard."""
    x = values(4, 6)

    def gradient(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = place.reshard(3 * x, ROWS)
            values, indices = tf.math.top_k(y, 2)
            if avoided:
                values = tf.gather(y, indices, batch_dims=1)
            total = tf.reduce_sum(tf.reduce_sum(values, 1, keepdims=True) * y)
        return tape.gradient(total, x)

    is_kept = x >= np.sort(x, 1)[:, -2:-1]
    sums = (x * is_kept).sum(1, keepdims=True), x.sum(1, keepdims=True)
    return equal(place, computed(gradient, place.put(x, ROWS)), 9 * (sums[0] + sums[1] * is_kept))


def diagonal(place: Place, avoided: bool) -> bool:
    """The diagonal of a matrix has no layout, and its gradient may crash the process."""
    x = values(6, 6)

    def gradient(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            part = tf.reduce_sum(x * tf.eye(6), -1) if avoided else tf.linalg.diag_part(x)
            total = tf.reduce_sum(part**2)
        return tape.gradient(total, x)

    return equal(place, computed(gradient, place.put(x, ROWS)), 2 * x * np.eye(6))


def cross_product(place: Place, avoided: bool) -> bool:
    """A cross product has no layout."""
    x, y = values(4, 3), values(4, 3)[::-1]

    def product(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        if not avoided:
            return tf.linalg.cross(x, y)
        after, before = (
            [tf.gather(t, to, axis=1) for t in (x, y)] for to in ([1, 2, 0], [2, 0, 1])
        )
        return after[0] * before[1] - before[0] * after[1]

    return equal(place, computed(product, place.put(x, ROWS), place.put(y, ROWS)), np.cross(x, y))


REPRODUCTIONS = (
    changing_integer,
    concatenated_shards,
    cross_product,
    diagonal,
    inner_relayout,
    negative_step,
    new_axis,
    resharded_gather,
    row_of_replicated_weights,
    row_of_stacked_weights,
    scalar_where,
    sorted_values,
)
