"""Table lookup for a table that is used again: two gradients become one without extra passes."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def lookup_shared(table: tf.Tensor, ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the rows, and the table for its later use (the softmax that is tied to it).

    The rows' gradient is scattered into the gradient that the later use gives; adding a sparse to a
    dense gradient would pass over [vocab, embed] three times.

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
