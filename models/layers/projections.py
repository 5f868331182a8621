"""Bases of layers whose weights may have adapters; ProjectionLayer projects with matrices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import tensorflow as tf

from tekso.framework import ops
from tekso.framework.context import StepContext
from tekso.framework.layer import Layer
from tekso.framework.params import param
from tekso.framework.theta import Theta
from tekso.framework.weight_spec import WeightSpec
from tekso.models.layers.lora import Lora

ADAPTER_DOC = "Low-rank update of the matrices, for fine-tuning; None: none."
KERNEL_ADAPTER_DOC = "Low-rank update of the kernel, for fine-tuning; None: none."


class AdaptedLayer(Layer):
    """Declares the adapters of its weights with `adapt`.

    Shapes:
      as in the subclasses
    Weights:
      those of the adapter (see Lora) of each adapted weight, if there is one
    Attributes:
      adapter_field: name of the field of the Params that has the Params of the adapter.
      num_separate: number of leading dims of the weights for which each index has its own update.
    """

    class Params(Layer.Params):
        """Params of a layer whose weights may have adapters."""

    adapter_field: ClassVar[str] = "adapter"
    num_separate: ClassVar[int] = 0

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        adapter = self.params.get(self.adapter_field)
        self._lora: Lora | None = None if adapter is None else adapter.instantiate()
        self._num_contracted: dict[str, int] = {}

    def adapt(
        self,
        name: str,
        shape: Sequence[int],
        *,
        dims: Sequence[str | None],
        num_contracted: int = 1,
        fan_in: int | None = None,
    ) -> None:
        """Declares the weights of the adapter of a weight; see `Lora.declare`."""
        self._num_contracted[name] = num_contracted
        if (lora := self.lora(name)) is not None:
            lora.declare(
                self, name, shape, dims, num_contracted=num_contracted,
                num_separate=self.num_separate, fan_in=fan_in,
            )  # fmt: skip

    def lora(self, name: str) -> Lora | None:
        """Returns the adapter of a weight; None: it has none."""
        lora = self._lora
        return lora if lora is not None and name in (lora.params.only or [name]) else None

    def specs(self) -> dict[str, WeightSpec]:
        """Returns the specs of all weights; see `Layer`.

        Raises:
          ValueError: `only` of the adapter names a matrix that this layer does not have.
        """
        only = [] if self._lora is None else self._lora.params.only
        if unknown := [name for name in only if name not in self._num_contracted]:
            raise ValueError(
                f"{self.path or type(self).__name__}: {self.adapter_field}.only names "
                f"{unknown[0]!r}, but the matrices of {type(self).__name__} are "
                f"{', '.join(self._num_contracted)}"
            )
        return super().specs()

    def adapted(self) -> Iterator[tuple[str, Lora]]:
        """Yields (name of the matrix, its adapter) for every matrix that has one."""
        for name in self._num_contracted:
            if (lora := self.lora(name)) is not None:
                yield name, lora


class ProjectionLayer(AdaptedLayer):
    """Declares matrices with `matrix`, and projects with `project`.

    Shapes:
      project: x [batch, ..., *inner]; returns [batch, ..., *outer]
    Weights:
      each matrix, [*inner, *outer], and those of its adapter (see Lora) if there is one
    """

    class Params(AdaptedLayer.Params):
        """Params of a layer with matrices."""

        adapter: Lora.Params | None = param(ADAPTER_DOC, default=None)

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
        self.adapt(name, shape, dims=dims, num_contracted=num_contracted)

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
        lora = self.lora(name)
        return y if lora is None else y + lora.update(self, theta, name, x, ctx, num_contracted=n)
