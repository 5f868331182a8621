"""ProjectionLayer: base of the layers that project with matrices, which may have adapters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tekso.framework import ops
from tekso.framework.context import StepContext
from tekso.framework.layer import Layer
from tekso.framework.params import param
from tekso.framework.theta import Theta
from tekso.framework.weight_spec import WeightSpec
from tekso.models.layers.lora import Lora

ADAPTER_DOC = "Low-rank update of the matrices, for fine-tuning; None: none."


class ProjectionLayer(Layer):
    """Declares matrices with `matrix`, and projects with `project`.

    Shapes:
      project: x [batch, ..., *inner]; returns [batch, ..., *outer]
    Weights:
      each matrix, [*inner, *outer], and those of its adapter (see Lora) if there is one
    """

    class Params(Layer.Params):
        """Params of a layer with matrices."""

        adapter: Lora.Params | None = param(ADAPTER_DOC, default=None)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        adapter = self.params.adapter
        self._lora: Lora | None = None if adapter is None else adapter.instantiate()
        self._num_contracted: dict[str, int] = {}

    def matrix(
        self,
        name: str,
        shape: Sequence[int],
        *,
        dims: Sequence[str | None],
        init: Any,
        num_contracted: int = 1,
        fan_in: int | None = None,
        fan_out: int | None = None,
    ) -> None:
        """Declares a matrix, and the weights of its adapter; the arguments are as in `weight`.

        Args:
          name: name of the weight in theta.
          shape: its shape, [*inner, *outer].
          dims: its dim names.
          init: Params of its Initializer.
          num_contracted: number of `inner` dims, which are contracted with the input.
          fan_in: number of inputs of each output unit.
          fan_out: number of outputs of each input unit.
        """
        self.weight(name, shape, dims=dims, init=init, fan_in=fan_in, fan_out=fan_out)
        self._num_contracted[name] = num_contracted
        if self._is_adapted(name) and self._lora is not None:
            self._lora.declare(self, name, shape, dims, num_contracted=num_contracted)

    def specs(self) -> dict[str, WeightSpec]:
        """Returns the specs of all weights; see `Layer`.

        Raises:
          ValueError: `adapter.only` names a matrix that this layer does not have.
        """
        only = [] if self._lora is None else self._lora.params.only
        if unknown := [name for name in only if name not in self._num_contracted]:
            raise ValueError(
                f"{self.path or type(self).__name__}: adapter.only names {unknown[0]!r}, but the "
                f"matrices of {type(self).__name__} are {', '.join(self._num_contracted)}"
            )
        return super().specs()

    def project(
        self,
        theta: Theta,
        name: str,
        x: tf.Tensor,
        ctx: StepContext,
        bias: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Contracts the last dims of x with a matrix, adds the bias and the adapter's update.

        Shapes:
          x: [batch, ..., *inner], bias: [*outer]
          returns: [batch, ..., *outer], dtype of x
        """
        n = self._num_contracted[name]
        y = ops.project(ctx, x, theta[name], bias, num_contracted=n)
        if self._lora is None or not self._is_adapted(name):
            return y
        return y + self._lora.update(self, theta, name, x, ctx, num_contracted=n)

    def adapted(self) -> Iterator[tuple[str, Lora]]:
        """Yields (name of the matrix, its adapter) for every matrix that has one."""
        for name in self._num_contracted:
            if self._lora is not None and self._is_adapted(name):
                yield name, self._lora

    def _is_adapted(self, name: str) -> bool:
        return self._lora is not None and (
            not self._lora.params.only or name in self._lora.params.only
        )
