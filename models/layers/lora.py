"""Lora: a low-rank update of a matrix, trained instead of the matrix (an adapter).

    y = x @ w + b + (alpha / rank) * dropout(x) @ lora_a @ lora_b

Of a table, the rows of lora_a are looked up or multiplied like those of the table; of a
convolution, lora_a is a kernel with `rank` outputs; of experts, each has its own factors. `lora_b`
starts at 0, so a model with adapters begins with exactly the outputs of the model without.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework import ops
from tekso.framework.context import StepContext
from tekso.framework.initializers import Initializer, LecunNormal, Zeros
from tekso.framework.layer import Layer
from tekso.framework.params import Configurable, param
from tekso.framework.theta import Theta


class Lora(Configurable):
    """The update of each matrix of a layer.

    Weights (of a matrix w: [*inner, *outer], whose inner dims are contracted):
      w_lora_a: [*inner, rank], dims: those of w and "rank"
      w_lora_b: [rank, *outer], dims: "rank" and those of w; starts at 0
    Raises:
      ValueError: rank, alpha or dropout_rate is out of range.
    Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1.
    """

    class Params(Configurable.Params):
        """Params of Lora."""

        rank: int = param("Rank of the update: the number of columns of lora_a.", default=8)
        alpha: float = param("The update is multiplied by alpha / rank.", default=8.0)
        dropout_rate: float = param("Dropout of the input of the update.", default=0.0)
        init: Initializer.Params = param(
            "Initializer of lora_a; lora_b starts at 0.", default=LecunNormal.Params()
        )
        only: list[str] = param(
            'Names of the matrices of the layer that are updated, such as ["q", "v"]; empty: all.',
            default=[],
        )

    def __init__(self, params: Any) -> None:
        """Checks the Params."""
        super().__init__(params)
        p = self.params
        if p.rank < 1 or not p.alpha > 0 or not 0 <= p.dropout_rate < 1:
            raise ValueError(
                f"{p.path_of('rank').removesuffix('.rank')}: rank is {p.rank}, alpha {p.alpha} and "
                f"dropout_rate {p.dropout_rate}; rank must be at least 1, alpha above 0, and "
                "dropout_rate in [0, 1)"
            )

    @property
    def scale(self) -> float:
        """The factor of the product lora_a @ lora_b."""
        return float(self.params.alpha / self.params.rank)

    def declare(
        self,
        layer: Layer,
        name: str,
        shape: Sequence[int],
        dims: Sequence[str | None],
        *,
        num_contracted: int,
        num_separate: int = 0,
        fan_in: int | None = None,
    ) -> None:
        """Declares the two weights of the update of a matrix.

        Args:
          layer: the layer that has the matrix.
          name: name of the matrix.
          shape: its shape.
          dims: its dim names.
          num_contracted: number of its dims that are contracted with the input.
          num_separate: number of dims before these; every index has factors of its own.
          fan_in: for the initializer of lora_a; None: the size of the contracted dims.
        """
        p, s, n = self.params, num_separate, num_separate + num_contracted
        layer.weight(
            f"{name}_lora_a",
            [*shape[:n], p.rank],
            dims=(*dims[:n], "rank"),
            init=p.init,
            fan_in=math.prod(shape[s:n]) if fan_in is None else fan_in,
            fan_out=p.rank,
        )
        layer.weight(
            f"{name}_lora_b",
            [*shape[:s], p.rank, *shape[n:]],
            dims=(*dims[:s], "rank", *dims[n:]),
            init=Zeros.Params(),
            fan_in=p.rank,
            fan_out=math.prod(shape[n:]),
            scale=self.scale,
        )

    def update(
        self,
        layer: Layer,
        theta: Theta,
        name: str,
        x: tf.Tensor,
        ctx: StepContext,
        *,
        num_contracted: int,
    ) -> tf.Tensor:
        """Returns what the update adds to the projection of x.

        Shapes:
          x: [batch, ..., *inner]
          returns: [batch, ..., *outer], dtype of x
        """
        x = ops.dropout(ctx, x, self.params.dropout_rate, layer, f"{name}_lora")
        low = ops.project(ctx, x, theta[f"{name}_lora_a"], num_contracted=num_contracted)
        return self.scale * ops.project(ctx, low, theta[f"{name}_lora_b"])

    def merged(self, w: np.ndarray, a: np.ndarray, b: np.ndarray, *, stacked: int) -> np.ndarray:
        """Returns w + (alpha / rank) * a @ b, summed in float64.

        Args:
          w: the matrix.
          a: lora_a.
          b: lora_b.
          stacked: number of leading dims that all three have in common: the layers of a stack.

        Shapes:
          w: [*stack, *inner, *outer], a: [*stack, *inner, rank], b: [*stack, rank, *outer]
          returns: shape and dtype of w
        """
        stack, rank = w.shape[:stacked], self.params.rank
        factors = (
            a.astype(np.float64).reshape(*stack, -1, rank),
            b.astype(np.float64).reshape(*stack, rank, -1),
        )
        product = np.matmul(*factors).reshape(w.shape)
        return np.asarray(w.astype(np.float64) + self.scale * product).astype(w.dtype)
