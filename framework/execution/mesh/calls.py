"""How functions are called with the weights of a mesh: on one device, or over the mesh."""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.execution.mesh.context import MeshContext
from tekso.framework.execution.mesh.placement import Placement
from tekso.framework.theta import Theta

Function = Callable[..., Any]
Flat = dict[str, tf.Tensor]


class Calls(abc.ABC):
    """Calls pure functions, `function(theta, *inputs, ctx)`, with the weights of evaluation."""

    def __init__(self) -> None:
        self._functions: dict[Function, Function] = {}

    def call(self, function: Function, inputs: tuple[Any, ...]) -> Any:
        """Returns what the function returns; its trace is kept."""
        if function not in self._functions:
            self._functions[function] = self._traced(function)
        return self._run(self._functions[function], inputs)

    @abc.abstractmethod
    def forget(self) -> None:
        """The weights have changed."""

    @abc.abstractmethod
    def _traced(self, function: Function) -> Function: ...

    @abc.abstractmethod
    def _run(self, traced: Function, inputs: tuple[Any, ...]) -> Any: ...


class OneDeviceCalls(Calls):
    """Gathers the weights to one device, once after they have changed, one after the other.

    No other device ever holds more than one of them whole.

    Args:
      placement: the devices.
      weights: returns the weights of evaluation, as they are stored.
      theta: makes Theta of them.
      seed: of random numbers.
    """

    def __init__(
        self,
        placement: Placement,
        weights: Callable[[], Flat],
        theta: Callable[[Flat], Theta],
        *,
        seed: int,
    ) -> None:
        super().__init__()
        self._placement, self._weights, self._theta, self._seed = placement, weights, theta, seed
        self._gathered: Flat | None = None

    def forget(self) -> None:
        """See `Calls`."""
        self._gathered = None

    def _traced(self, function: Function) -> Function:
        def run(weights: Flat, *inputs: Any) -> Any:
            ctx = StepContext(mode="decode", seed=self._seed)
            return function(self._theta(weights), *inputs, ctx)

        return tf.function(run, autograph=False)

    def _run(self, traced: Function, inputs: tuple[Any, ...]) -> Any:
        if self._gathered is None:
            spread = self._weights()
            self._gathered = {
                path: tf.constant(self._placement.whole(spread.pop(path))) for path in list(spread)
            }
        return traced(self._gathered, *inputs)


class MeshCalls(Calls):
    """Runs a function as a program of the mesh, every device with its part of the weights.

    Args:
      placement: the devices.
      compiled: makes a step of a function of tensors.
      begun: `begun(examples)` returns, inside of a step, Theta and context for so many examples.
    """

    def __init__(
        self,
        placement: Placement,
        compiled: Callable[[Function], Function],
        begun: Callable[[int], tuple[Theta, MeshContext]],
    ) -> None:
        super().__init__()
        self._placement, self._compiled, self._begun = placement, compiled, begun
        # The exchanges of two programs that run at a time would wait for each other.
        self._running = threading.Lock()

    def forget(self) -> None:
        """See `Calls`; a step reads the weights where they are stored."""

    def _traced(self, function: Function) -> Function:
        def run(*inputs: Any) -> Any:
            given = tf.nest.map_structure(self._taken, inputs)
            shapes = [x.shape for x in tf.nest.flatten(given)]
            theta, ctx = self._begun(shapes[0][0] if shapes and shapes[0] else 1)
            outputs = function(theta, *given, ctx)
            return tf.nest.map_structure(self._whole, outputs)

        return self._compiled(run)

    def _taken(self, placed: tf.Tensor) -> tf.Tensor:
        """What `put_changing` placed.

        Pinned on both sides of an identity, or what layers pin of it would be asked of what was
        placed, in which that dim has another place.
        """
        return tf.identity(self._whole(tf.gather(placed, 0)))

    def _whole(self, x: Any) -> tf.Tensor:
        x = tf.convert_to_tensor(x)
        return self._placement.relayout(x, (None,) * x.shape.rank)

    def _run(self, traced: Function, inputs: tuple[Any, ...]) -> Any:
        placed = tf.nest.map_structure(self._placement.put_changing, inputs)
        with self._running:
            outputs = traced(*placed)
        return tf.nest.map_structure(self._placement.local, outputs)
