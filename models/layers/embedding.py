"""Embedding: a table of vectors, looked up by id, and the softmax tied to it."""

from __future__ import annotations

import math
from typing import Any, Literal

import tensorflow as tf

from tekso.framework import ops
from tekso.framework.context import StepContext
from tekso.framework.initializers import Initializer, LecunNormal
from tekso.framework.params import REQUIRED, param
from tekso.framework.theta import Theta
from tekso.models.layers import vocabulary
from tekso.models.layers.adapted_table import TableLayer


class Embedding(TableLayer):
    """Looks up vectors by id; the table can also be used for a tied softmax.

    Shapes:
      ids: [...] int in [0, vocab_size)
      returns: [..., dim], dtype of the table
      tied softmax: `logits` of x [..., dim] is [..., rows], `cross_entropy` is [...]
    Weights:
      table: [rows, dim], dims ("vocab", "embed"); rows is vocab_size, padded
      table_lora_a, table_lora_b: with an adapter (see Lora)
    Source:
      Factor sqrt(dim): Vaswani et al. 2017, section 3.4. Tied: Press & Wolf 2017.
    """

    class Params(TableLayer.Params):
        """Params of Embedding."""

        vocab_size: int = param("Number of vectors.", default=REQUIRED)
        vocab_multiple: int = param(vocabulary.ROWS_DOC, default=1)
        dim: int = param("Size of a vector.", default=REQUIRED)
        scale: Literal["none", "sqrt_dim"] = param(
            "Factor on the looked-up vectors (not on the tied softmax).", default="none"
        )
        init: Initializer.Params = param(
            "Initializer of the table; its fan_in is dim.", default=LecunNormal.Params()
        )

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        self._rows = vocabulary.padded_rows(p.vocab_size, p.vocab_multiple, "Embedding")
        self.weight(
            "table",
            [self._rows, p.dim],
            dims=("vocab", "embed"),
            init=p.init,
            fan_in=p.dim,
            fan_out=p.vocab_size,
        )
        self.adapt_table("table", self._rows, p.dim)

    def fprop(self, theta: Theta, ids: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """Returns the vectors of ids.

        Shapes:
          ids: [...] int in [0, vocab_size)
          returns: [..., dim], dtype of the table

        Raises:
          ValueError: the ids are not integers.
        """
        return self._scaled(self.rows_of(theta, "table", _integers(ids), ctx))

    def fprop_shared(
        self, theta: Theta, ids: tf.Tensor, ctx: StepContext
    ) -> tuple[tf.Tensor, Theta]:
        """Returns the vectors of ids, and weights for the tied softmax.

        The values are the same as from `fprop`. Using the returned weights in the softmax makes the
        gradient of the table cheaper.

        Raises:
          ValueError: the ids are not integers.
        """
        x, theta = self.rows_shared(theta, "table", _integers(ids), ctx)
        return self._scaled(x), theta

    def _scaled(self, x: tf.Tensor) -> tf.Tensor:
        return x * math.sqrt(self.params.dim) if self.params.scale == "sqrt_dim" else x

    def logits(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """Returns x @ table^T.

        Shapes:
          x: [..., dim]
          returns: [..., rows], dtype of x; -1e9 for padding rows
        """
        y = self.scores(theta, "table", x, ctx)
        bias = vocabulary.padding_bias(self.params.vocab_size, self._rows, y.dtype)
        return y if bias is None else y + bias

    def cross_entropy(
        self,
        theta: Theta,
        x: tf.Tensor,
        labels: tf.Tensor,
        ctx: StepContext,
        *,
        label_smoothing: float = 0.0,
    ) -> tf.Tensor:
        """Returns -log softmax(logits)[label] of every position, in nats.

        Shapes:
          x: [..., dim], labels: [...] int in [0, vocab_size)
          returns: [...] float32
        """
        x, table = self.joined(theta, "table", x, ctx)
        return ops.cross_entropy(
            ctx,
            x,
            table,
            labels,
            bias=vocabulary.padding_bias(self.params.vocab_size, self._rows),
            label_smoothing=label_smoothing,
            classes=self.params.vocab_size,
        )


def _integers(ids: tf.Tensor) -> tf.Tensor:
    """Returns ids in a type that a lookup accepts: types of 8 bits and unsigned types are widened.

    Raises:
      ValueError: the ids are not integers.
    """
    ids = tf.convert_to_tensor(ids)
    if not ids.dtype.is_integer:
        raise ValueError(
            f"Embedding: ids are {ids.dtype.name} {ids.shape}, but must be integers, the numbers "
            "of rows from 0. If the data has whole numbers in a table of floats, convert them in "
            "the input (ids.astype('int32')), or here: tf.cast(ids, tf.int32)"
        )
    if ids.dtype in (tf.int16, tf.int32, tf.int64):
        return ids
    return tf.cast(ids, tf.int32 if ids.dtype.size < 4 else tf.int64)
