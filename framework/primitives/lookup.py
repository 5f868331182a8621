"""Lookup of rows in a table; gradients of rows with the same id are summed in float32."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tekso.framework.primitives.custom_gradient import custom_gradient
from tekso.framework.primitives.precision import widen


def lookup(table: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    """Returns rows of a table.

    Shapes:
      table: [vocab, embed], ids: [...]
      returns: [..., embed]
    """
    if tf.as_dtype(table.dtype).size > 2:
        return tf.gather(table, ids)

    @custom_gradient
    def run(table: tf.Tensor) -> Any:
        def grad(drows: tf.Tensor) -> tf.Tensor:
            # TensorFlow would sum in the dtype of the table: in bfloat16, 256 + 1 is 256.
            flat = tf.reshape(widen(drows), [-1, table.shape[1]])
            summed = tf.math.unsorted_segment_sum(flat, tf.reshape(ids, [-1]), table.shape[0])
            return tf.cast(summed, table.dtype)

        return tf.gather(table, ids), grad

    return run(table)


def lookup_shared(table: tf.Tensor, ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns rows of a table, and the table itself for further use, for example a tied softmax.

    The gradient of the rows is scattered into the gradient of the returned table. Adding a sparse
    to a dense gradient would instead need three passes over [vocab, embed].

    Shapes:
      table: [vocab, embed], ids: [...]
      returns: [..., embed], [vocab, embed]
    """

    @custom_gradient
    def run(table: tf.Tensor) -> Any:
        def grad(drows: tf.Tensor, dtable: tf.Tensor) -> tf.Tensor:
            flat = tf.reshape(drows, [-1, table.shape[1]])
            return add_rows(dtable, tf.reshape(ids, [-1]), flat)

        return (tf.gather(table, ids), tf.identity(table)), grad

    found: tuple[tf.Tensor, tf.Tensor] = run(table)
    return found


def add_rows(table: tf.Tensor, ids: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """Returns a table to whose rows others are added, summed in float32.

    Shapes:
      table: [vocab, ...], ids: [n], rows: [n, ...]
      returns: shape and dtype of the table
    """
    summed = tf.tensor_scatter_nd_add(widen(table), tf.expand_dims(ids, 1), widen(rows))
    return tf.cast(summed, table.dtype)


def fill_in_place(buffer: tf.Tensor, index: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """Returns the buffer with rows added at an index; see `ops.fill_rows`."""
    # TensorScatterUpdate would always copy the buffer.
    return tf.raw_ops.ScatterNdNonAliasingAdd(input=buffer, indices=index, updates=rows)
