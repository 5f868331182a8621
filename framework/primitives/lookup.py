"""Lookup in a table that is also used elsewhere, with a cheap sum of both gradients."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def lookup_shared(table: tf.Tensor, ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns rows of a table, and the table itself for further use, for example a tied softmax.

    The gradient of the rows is scattered into the gradient of the returned table. Adding a sparse
    to a dense gradient would instead need three passes over [vocab, embed].

    Shapes:
      table: [vocab, embed], ids: [...]
      returns: [..., embed], [vocab, embed]
    """

    @tf.custom_gradient
    def run(table: tf.Tensor) -> Any:
        def grad(drows: tf.Tensor, dtable: tf.Tensor) -> tf.Tensor:
            flat = tf.reshape(drows, [-1, table.shape[1]])
            return tf.tensor_scatter_nd_add(dtable, tf.reshape(ids, [-1, 1]), flat)

        return (tf.gather(table, ids), tf.identity(table)), grad

    return run(table)


def fill_in_place(buffer: tf.Tensor, index: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """Returns the buffer with rows added at an index; see `ops.fill_rows`."""
    # TensorScatterUpdate would always copy the buffer.
    return tf.raw_ops.ScatterNdNonAliasingAdd(input=buffer, indices=index, updates=rows)
