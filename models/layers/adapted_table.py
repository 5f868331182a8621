"""TableLayer: base of the layers with a table of vectors for a vocabulary, which may be adapted.

    row of id      table[id] + scale * lora_a[id] @ lora_b
    scores of x    x @ table^T + scale * (dropout(x) @ lora_b^T) @ lora_a^T

Legend: D size of a vector, R rank, V rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from tekso.framework import error_advice, ops
from tekso.framework.context import StepContext
from tekso.framework.params import param
from tekso.framework.theta import Theta
from tekso.models.layers.lora import Lora
from tekso.models.layers.projections import AdaptedLayer


class TableLayer(AdaptedLayer):
    """Looks up the rows of a table, and multiplies by its transpose.

    Shapes:
      as in the subclasses
    Weights:
      of an adapted table [rows, dim]: *_lora_a [rows, rank], *_lora_b [rank, dim]
    """

    class Params(AdaptedLayer.Params):
        """Params of a layer with a table."""

        table_adapter: Lora.Params | None = param(
            "Low-rank update of the table, for fine-tuning; None: none.", default=None
        )

    adapter_field = "table_adapter"

    def adapt_table(self, name: str, rows: int, dim: int) -> None:
        """Declares the weights of the adapter of a table."""
        rank = 1 if self._lora is None else self._lora.params.rank
        self.adapt(name, [rows, dim], dims=("vocab", "embed"), fan_in=rank)

    def rows_of(self, theta: Theta, name: str, ids: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """Returns the rows of a table for ids.

        Shapes:
          ids: [...]
          returns: [..., dim]

        Raises:
          IdError: an id has no row. A traced function raises it as an error of TensorFlow.
        """
        with self._naming_ids():
            x = ops.lookup(ctx, theta[name], ids)
        if (lora := self.lora(name)) is None:
            return x
        low = ops.lookup(ctx, theta[f"{name}_lora_a"], ids)
        return x + lora.scale * ops.project(ctx, low, theta[f"{name}_lora_b"])

    def rows_shared(
        self, theta: Theta, name: str, ids: tf.Tensor, ctx: StepContext
    ) -> tuple[tf.Tensor, Theta]:
        """Returns the rows for ids, and weights for further use; see `ops.lookup_shared`."""
        with self._naming_ids():
            x, table = ops.lookup_shared(ctx, theta[name], ids)
        theta = Theta(theta, **{name: table})
        if (lora := self.lora(name)) is None:
            return x, theta
        low, table = ops.lookup_shared(ctx, theta[f"{name}_lora_a"], ids)
        x += lora.scale * ops.project(ctx, low, theta[f"{name}_lora_b"])
        return x, Theta(theta, **{f"{name}_lora_a": table})

    @contextlib.contextmanager
    def _naming_ids(self) -> Iterator[None]:
        try:
            yield
        except tf.errors.InvalidArgumentError as error:
            if not (advice := error_advice.advice_for_ids(str(error))):
                raise
            where = self.path or "the layer"
            raise error_advice.IdError(f"{where} ({type(self).__name__}): {advice}") from None

    def scores(self, theta: Theta, name: str, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """Returns x @ table^T.

        Shapes:
          x: [..., dim]
          returns: [..., rows], dtype of x
        """
        y = ops.logits(ctx, x, theta[name])
        if (lora := self.lora(name)) is None:
            return y
        return y + ops.logits(ctx, self._low(lora, theta, name, x, ctx), theta[f"{name}_lora_a"])

    def joined(
        self, theta: Theta, name: str, x: tf.Tensor, ctx: StepContext
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns x and a table whose product x @ table^T is that of the adapted table.

        Shapes:
          x: [..., dim]
          returns: [..., dim + rank], [rows, dim + rank]; without an adapter, x and the table
        """
        table = theta[name]
        if (lora := self.lora(name)) is None:
            return x, table
        low = self._low(lora, theta, name, x, ctx)
        # A mesh cannot concatenate along a dim that it shards.
        batch_dims = ("batch", *[None] * (x.shape.rank - 1))
        x_BR = tf.concat([ctx.constrain(t, batch_dims) for t in (x, low)], x.shape.rank - 1)
        pair = (table, theta[f"{name}_lora_a"])
        table_VR = tf.concat([ctx.constrain(t, ("vocab", None)) for t in pair], 1)
        return x_BR, table_VR

    def _low(
        self, lora: Lora, theta: Theta, name: str, x: tf.Tensor, ctx: StepContext
    ) -> tf.Tensor:
        """Returns scale * dropout(x) @ lora_b^T."""
        x = ops.dropout(ctx, x, lora.params.dropout_rate, self, f"{name}_lora")
        b_DR = tf.transpose(ctx.constrain(theta[f"{name}_lora_b"], (None, "embed")))
        return lora.scale * ops.project(ctx, x, b_DR)
