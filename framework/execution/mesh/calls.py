"""Calls functions with the weights of a mesh: on one device, or on the mesh."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tekso.framework.execution.mesh.context import MeshContext
from tekso.framework.execution.mesh.placement import Placement
from tekso.framework.execution.mesh.step_errors import compiled
from tekso.framework.execution.workarounds.call_counts import counted_alone
from tekso.framework.nests import mapped, tensors
from tekso.framework.step import Flat, Step
from tekso.framework.theta import Theta

Function = Callable[..., Any]

_ADVICE = (
    'Set execution.decode_on=one_device, which gathers the weights; docs/meshes.md, "Decoding", '
    "lists the limitations of decoding on a mesh"
)


class Calls(abc.ABC):
    """Calls pure functions, `function(theta, *inputs, ctx)`, with the evaluation weights."""

    def __init__(self) -> None:
        self._functions: dict[Function, Function] = {}

    def call(self, function: Function, inputs: tuple[Any, ...]) -> Any:
        """Returns the result of the function; its trace is cached."""
        return self._run(self._called(function), inputs)

    def on_one_device(self, function: Function) -> Function | None:
        """Returns the tf.function of the weights and inputs that `call` runs; None: on a mesh."""
        del function
        return None

    def _called(self, function: Function) -> Function:
        if function not in self._functions:
            self._functions[function] = self._traced(function)
        return self._functions[function]

    @abc.abstractmethod
    def forget(self) -> None:
        """Drops copies of the weights; to be called when the weights change."""

    @abc.abstractmethod
    def _traced(self, function: Function) -> Function: ...

    @abc.abstractmethod
    def _run(self, traced: Function, inputs: tuple[Any, ...]) -> Any: ...


class OneDeviceCalls(Calls):
    """Gathers the weights to one device and calls functions there.

    The weights are gathered one at a time, at the first call after they have changed. So every
    other device holds at most one full weight at a time.

    Args:
      placement: the devices.
      weights: returns the evaluation weights, sharded as they are stored.
      step: the steps of the task.
    """

    def __init__(self, placement: Placement, weights: Callable[[], Flat], step: Step) -> None:
        super().__init__()
        self._placement, self._weights, self._step = placement, weights, step
        self._gathered: Flat | None = None

    def forget(self) -> None:
        """See `Calls`."""
        self._gathered = None

    def on_one_device(self, function: Function) -> Function | None:
        """See `Calls`."""
        return self._called(function)

    def _traced(self, function: Function) -> Function:
        def run(weights: Flat, *inputs: Any) -> Any:
            return self._step.decoded(function, weights, inputs)

        traced: Function = counted_alone(tf.function(run, autograph=False))
        return traced

    def _run(self, traced: Function, inputs: tuple[Any, ...]) -> Any:
        if self._gathered is None:
            spread = self._weights()
            self._gathered = {
                path: tf.constant(self._placement.to_host(spread.pop(path)))
                for path in list(spread)
            }
        return traced(self._gathered, *inputs)


class MeshCalls(Calls):
    """Runs a function as a program of the mesh, with sharded weights.

    Args:
      placement: the devices.
      where: the mesh and the rules, for messages.
      begun: `begun(examples)` is called in a step and returns Theta and the step context for this
        number of examples.
    """

    def __init__(
        self,
        placement: Placement,
        where: str,
        begun: Callable[[int], tuple[Theta, MeshContext]],
    ) -> None:
        super().__init__()
        self._placement, self._where, self._begun = placement, where, begun

    def forget(self) -> None:
        """See `Calls`; there are no copies: a step reads the stored weights."""

    def _traced(self, function: Function) -> Function:
        def run(*inputs: Any) -> Any:
            given = mapped(self._taken, inputs)
            shapes = [x.shape for x in tensors(given)]
            theta, ctx = self._begun(next((shape[0] for shape in shapes if shape.rank), 1))
            outputs = function(theta, *given, ctx)
            return mapped(self._replicated, outputs)

        return compiled(run, self._where, advice=_ADVICE)

    def _taken(self, placed: tf.Tensor) -> tf.Tensor:
        return self._placement.taken(placed, 0, (None,) * (placed.shape.rank - 1))

    def _replicated(self, x: Any) -> tf.Tensor:
        x = tf.convert_to_tensor(x)
        return self._placement.reshard(x, (None,) * x.shape.rank)

    def _run(self, traced: Function, inputs: tuple[Any, ...]) -> Any:
        placed = mapped(lambda x: self._placement.put_changing(tf.convert_to_tensor(x)), inputs)
        return mapped(self._placement.local, traced(*placed))
