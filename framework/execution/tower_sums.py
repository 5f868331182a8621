"""Sums over the towers of a device, for layers that couple examples, such as batch statistics.

Towers are parts of a batch, computed concurrently by one graph. Each is traced in a thread of its
own, one thread at a time, until it needs a sum over all towers. When all have come to this sum, the
first tower continues with it:

    tower 0   forward, sum ┐              ┌ forward, sum ┐              ┌ …
    tower 1                └ forward, sum ┘              └ forward, sum ┘       (order of tracing)

So a layer sees one tower only, and the graph has small sums between the towers.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

from tekso.framework.execution.errors import ExecutionError
from tekso.framework.primitives.custom_gradient import custom_gradient

T = TypeVar("T")

_OWN = threading.local()  # in the thread of a tower: `turns` and `number`


def in_turns(count: int, compute: Callable[[int], T]) -> list[T]:
    """Returns [compute(0), compute(1), …]; `sum_over_towers` sums over these calls.

    Raises:
      ExecutionError: a sum is not in all calls, or is inside a loop or a condition.
      Exception: what the first failing call raised.
    """
    turns, graph = _Turns(count), tf.compat.v1.get_default_graph()
    graph.switch_to_thread_local()  # the scopes of one tower are not those of another
    found: dict[int, T] = {}

    def run(number: int) -> None:
        with graph.as_default():
            found[number] = compute(number)

    for number in range(count):
        own = functools.partial(run, number)
        threading.Thread(target=turns.take, args=(number, own), daemon=True).start()
    turns.give(graph)
    return [found[number] for number in range(count)]


def sum_over_towers(x: tf.Tensor) -> tf.Tensor:
    """Returns the sum of x over the calls of `in_turns`; x itself outside of them."""
    turns: _Turns | None = getattr(_OWN, "turns", None)
    if turns is None:
        return x
    meet = turns.meet

    @custom_gradient
    def total(x: tf.Tensor) -> Any:
        return tf.add_n(meet(x)), lambda dy: tf.add_n(meet(dy))

    summed: tf.Tensor = total(x)
    return summed


class _StoppedError(Exception):
    """Ends the thread of a tower because another tower failed."""


class _Turns:
    """Lets threads run one at a time, each until its next sum or its end."""

    def __init__(self, count: int) -> None:
        self._go = [threading.Semaphore(0) for _ in range(count)]
        self._back = threading.Semaphore(0)
        self._running = list(range(count))
        self._given: list[tf.Tensor] = []
        self._met: list[tf.Tensor] = []
        self._error: BaseException | None = None

    def give(self, graph: tf.Graph) -> None:
        """Gives turns until all threads have ended; raises what a thread raised."""
        while self._running:
            self._given = []
            for number in list(self._running):
                self._go[number].release()
                self._back.acquire()
            self._met = self._given
            everywhere = len(self._met) in (0, len(self._go))
            if not everywhere or any(x.graph is not graph for x in self._met):
                self._error = self._error or ExecutionError(
                    "a layer sums over the towers of a device inside a loop or a condition, or "
                    "not in every tower: set execution.towers=1"
                )
        if self._error is not None:
            raise self._error

    def take(self, number: int, function: Callable[[], None]) -> None:
        """Calls a function in the turns of this thread; `give` raises what it raises."""
        _OWN.turns, _OWN.number = self, number
        try:
            self._wait(number)
            function()
        except BaseException as error:
            self._error = self._error or error
        finally:
            self._running.remove(number)
            self._back.release()

    def meet(self, x: tf.Tensor) -> list[tf.Tensor]:
        """Ends a turn; returns, in the next one, the tensors of all towers."""
        self._given.append(x)
        self._back.release()
        self._wait(_OWN.number)
        return self._met

    def _wait(self, number: int) -> None:
        self._go[number].acquire()
        if self._error is not None:
            raise _StoppedError
