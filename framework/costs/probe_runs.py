"""Measures the time of small graphs, with which the probes find the speed of this machine.

Every time is an array [CPU time, time that passes]. CPU time hardly depends on other programs. Of
several measurements, the median counts, as it does of the steps of a run: the least is a moment in
which nothing else uses the caches, 5 to 10 % below the median. A machine that others share is slow
for some tenths of a second. So all probes are measured in passes, and of these the median counts.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Seconds = npt.NDArray[np.float64]
"""[CPU time, time that passes]."""

Speeds = list[tuple[float, Seconds]]
"""[(distance or operations per byte, something per second)]."""

TIMES = 16
"""Repetitions of an op in a probe, so that the call of the function hardly counts."""

_RUN_S = 0.03  # CPU time of a measurement, for each copy
_REPEATS = 3
_PASSES = 3
_LEAST = 0.1  # least share of a call that its ops take, if other programs disturb a measurement
_LEAST_OF_PAIR = 0.02  # the same of a pair with the small ops after it
_MANY_TIMES = 256  # repetitions of an op that does nothing
_PAUSE_OPS = 40  # small ops between two that use all threads


class ProbeRuns:
    """Runs functions as ops of graphs.

    Args:
      copies: number of copies of a function that run at the same time; one on a single core.
      is_alone: whether an op may use all threads; there is one copy.
    """

    def __init__(self, copies: int, *, is_alone: bool = False) -> None:
        self.copy = 0  # the one that is being traced
        self.copies, self.is_alone = copies, is_alone
        self._functions: list[Any] = []  # in the order in which a pass measures them
        self._number = 0  # of those that this pass has measured
        self._of_pass: dict[str, Seconds] = {}

    def median_of_passes(self, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Returns the medians of the speeds that several passes measure.

        Args:
          measure: measures {name: an array, or `Speeds`}; the same functions in the same order
            each time. They are traced once.
        """
        passes = []
        for _ in range(_PASSES):
            self._number, self._of_pass = 0, {}
            passes.append(measure())
        return {name: _median([one[name] for one in passes]) for name in passes[0]}

    def once(self, name: str, measure: Callable[[], Seconds]) -> Seconds:
        """Returns the time that a function measures once in a pass."""
        if name not in self._of_pass:
            self._of_pass[name] = measure()
        return self._of_pass[name]

    def _traced(self, function: Callable[..., Any]) -> Any:
        """Returns the function that is measured, as an earlier pass traced it."""
        import tensorflow as tf

        if self._number == len(self._functions):
            self._functions.append(tf.function(function, autograph=False))
        self._number += 1
        return self._functions[self._number - 1]

    def of_chain(self, function: Callable[[Any], Any], x: Any) -> Seconds:
        """Returns the time of a function from a tensor to one of the same number of elements."""
        return self.seconds(chain(function, TIMES), x) / TIMES

    def of_series(self, function: Callable[[Any, Any], Any], x: Any) -> Seconds:
        """Returns the time of a function of the last two results, which gives the next one.

        Each result is an array of its own, as most are in a step. In `of_chain`, TensorFlow
        overwrites the only one.
        """

        def following(pair: tuple[Any, Any]) -> tuple[Any, Any]:
            return pair[1], function(pair[1], pair[0])

        return self.seconds(chain(following, TIMES), (x, x * 1.5)) / TIMES

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that XLA compiles, once for each copy."""
        import tensorflow as tf

        own: dict[int, Any] = {}

        def call(*tensors: Any) -> Any:
            if self.copy not in own:
                own[self.copy] = tf.function(function, jit_compile=True, autograph=False)
            return own[self.copy](*tensors)

        return call

    def of_nothing(self, function: Callable[[Any], Any], x: Any) -> Seconds:
        """Returns the time of a function that has next to nothing to compute.

        There is one copy: TensorFlow runs such ops one after the other.
        """
        whole = _typical(self._traced(chain(function, _MANY_TIMES)), (x,), least_s=_RUN_S)
        return rest(whole, self._call_s(), least=_LEAST) / _MANY_TIMES

    def of_each(
        self,
        function: Callable[[Any, Any], Any],
        a: Any,
        b: Any,
        *,
        times: int = TIMES,
        run_s: float | None = None,
        paused: bool = True,
    ) -> Seconds:
        """Returns the time of a function of two tensors, which are not in the cache.

        Args:
          function: the function.
          a: its first argument.
          b: its second one.
          times: number of pairs of arguments.
          run_s: CPU time of a measurement, for each copy; None: the usual one.
          paused: whether there are small ops between two that use all threads.
        """
        whole = self._of_pairs(function, a, b, times, run_s, paused=paused)
        pause_s = self._pause_s() if paused else np.zeros(2)
        return rest(whole, pause_s + self._arguments_s(), least=_LEAST_OF_PAIR)

    def _arguments_s(self) -> Seconds:
        """Returns the time that passing a pair of arguments, and returning a tensor, takes."""
        import tensorflow as tf

        def measure() -> Seconds:
            small = tf.ones([4])
            one = self.of_chain(lambda x: x + small, small)
            whole = self._of_pairs(tf.add, small, small, TIMES)
            return np.maximum(whole - self._pause_s() - one, 0.0)

        return self.once("arguments", measure)

    def _of_pairs(
        self,
        function: Callable[[Any, Any], Any],
        a: Any,
        b: Any,
        times: int,
        run_s: float | None = None,
        *,
        paused: bool = True,
    ) -> Seconds:
        pairs = [(a * (1.0 + 0.01 * i), b * (1.0 + 0.01 * i)) for i in range(times)]
        each = functools.partial(self._each, function, paused)
        return self.seconds(each, *pairs, run_s=run_s) / times

    def _pause_s(self) -> Seconds:
        """Returns the time of the small ops between two others."""
        if not self.is_alone:
            return np.zeros(2)
        return self.once("pause", lambda: self.seconds(_pause(), array(4)))

    def _call_s(self) -> Seconds:
        """Returns the time of calling a function that does nothing."""
        import tensorflow as tf

        def measure() -> Seconds:
            return _typical(self._traced(lambda x: x), (tf.zeros([4]),), least_s=_RUN_S)

        return self.once("call", measure)

    def _each(self, function: Callable[[Any, Any], Any], paused: bool, *pairs: Any) -> list[Any]:
        """Returns the results of all pairs; alone, one is computed after the other."""
        import tensorflow as tf

        made: list[Any] = []
        before: list[Any] = []
        for a, b in pairs:
            with tf.control_dependencies(before):
                made.append(function(a, b))
            if self.is_alone:
                last = made[-1]
                before = [_pause()(tf.reshape(last, [-1])[:4]) if paused else last]
        return made

    def seconds(
        self, function: Callable[..., Any], *inputs: Any, run_s: float | None = None
    ) -> Seconds:
        """Returns the time of the ops of a copy of a function; see `of_each` for `run_s`."""
        import tensorflow as tf

        def copies(*each: Any) -> Any:
            found = []
            for number, own in enumerate(each):
                self.copy = number
                found.append(function(*own))
            return found

        each = [
            tf.nest.map_structure(lambda x, i=i: x * (1.0 + 0.001 * i), list(inputs))
            for i in range(self.copies)
        ]
        least_s = min(_RUN_S, run_s or _RUN_S) * self.copies
        whole = _typical(self._traced(copies), each, least_s=least_s)
        return rest(whole, self._call_s(), least=_LEAST) / self.copies


def rest(whole: Seconds, part: Seconds, *, least: float) -> Seconds:
    """Returns whole - part, but at least a share: the two are measured one after the other."""
    return np.maximum(whole - part, least * whole)


def chain(function: Callable[[Any], Any], times: int) -> Callable[[Any], Any]:
    """Returns a function that applies a function again and again."""

    def chained(x: Any) -> Any:
        for _ in range(times):
            x = function(x)
        return x

    return chained


def array(*shape: int) -> Any:
    """Returns an array of arbitrary numbers."""
    import tensorflow as tf

    return tf.random.stateless_normal(shape, [1, 2])


@functools.cache
def _pause() -> Any:
    """Returns a function of small ops, which run on the thread of what came before them."""
    import tensorflow as tf

    return tf.function(chain(lambda x: x * 0.99 + x, _PAUSE_OPS), autograph=False)


def _median(found: Sequence[Any]) -> Any:
    """Returns the median of each number of several arrays, or of several `Speeds`."""
    if not isinstance(found[0], list):
        return np.median(found, axis=0)
    return [
        (points[0][0], _median([speed for _, speed in points]))
        for points in zip(*found, strict=True)
    ]


def _typical(function: Any, inputs: Sequence[Any], *, least_s: float) -> Seconds:
    """Returns the median time of a call of a function, of several measurements.

    Args:
      function: the function, which may have to be traced and compiled.
      inputs: its arguments.
      least_s: CPU time of a measurement.
    """
    function(*inputs)
    function(*inputs)

    def measure() -> Seconds:
        calls, start = 0, _now()
        while _now()[0] - start[0] < least_s:
            function(*inputs)
            calls += 1
        return (_now() - start) / calls

    found = np.median([measure() for _ in range(_REPEATS)], axis=0)
    # While a graph runs, a thread computes. If more time passes, other programs use the cores.
    return np.array([found[0], min(found)])


def _now() -> Seconds:
    return np.array([time.process_time(), time.perf_counter()])
