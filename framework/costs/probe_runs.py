"""Measures the time of small graphs, with which the probes find the speed of this machine.

Every time is an array [CPU time, time that passes]. CPU time hardly depends on other programs. Of
several measurements, the smallest counts.
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
_MOST_REPEATS = 9  # if measurements differ
_SCATTER = 0.05  # of two measurements that confirm each other
_MOST_AGAIN, _SLOW = 2, 0.8  # how often a product is measured again, if it is that slow
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

    def of_nothing(self, function: Callable[[Any], Any], x: Any) -> Seconds:
        """Returns the time of a function that has next to nothing to compute.

        There is one copy: TensorFlow runs such ops one after the other.
        """
        import tensorflow as tf

        whole = _mean(
            tf.function(chain(function, _MANY_TIMES), autograph=False), (x,), least_s=_RUN_S
        )
        return rest(whole, _call_s(), least=_LEAST) / _MANY_TIMES

    def of_each(
        self, function: Callable[[Any, Any], Any], a: Any, b: Any, *, times: int = TIMES
    ) -> Seconds:
        """Returns the time of a function of two tensors, which are not in the cache."""
        whole = self._of_pairs(function, a, b, times)
        return rest(whole, self._pause_s() + self._arguments_s(), least=_LEAST_OF_PAIR)

    @functools.cache  # noqa: B019  # the process ends after the probes
    def _arguments_s(self) -> Seconds:
        """Returns the time that passing a pair of arguments, and returning a tensor, takes."""
        import tensorflow as tf

        small = tf.ones([4])
        one = self.of_chain(lambda x: x + small, small)
        whole = self._of_pairs(tf.add, small, small, TIMES)
        return np.maximum(whole - self._pause_s() - one, 0.0)

    def _of_pairs(self, function: Callable[[Any, Any], Any], a: Any, b: Any, times: int) -> Seconds:
        pairs = [(a * (1.0 + 0.01 * i), b * (1.0 + 0.01 * i)) for i in range(times)]
        return self.seconds(functools.partial(self._each, function), *pairs) / times

    @functools.cache  # noqa: B019  # the process ends after the probes
    def _pause_s(self) -> Seconds:
        """Returns the time of the small ops between two others."""
        return self.seconds(_pause(), array(4)) if self.is_alone else np.zeros(2)

    def _each(self, function: Callable[[Any, Any], Any], *pairs: Any) -> list[Any]:
        """Returns the results of all pairs; alone, one is computed after the other."""
        import tensorflow as tf

        made: list[Any] = []
        before: list[Any] = []
        for a, b in pairs:
            with tf.control_dependencies(before):
                made.append(function(a, b))
            if self.is_alone:
                before = [_pause()(tf.reshape(made[-1], [-1])[:4])]
        return made

    def seconds(self, function: Callable[..., Any], *inputs: Any) -> Seconds:
        """Returns the time of the ops of a copy of a function."""
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
        whole = _mean(tf.function(copies, autograph=False), each, least_s=_RUN_S * self.copies)
        return rest(whole, _call_s(), least=_LEAST) / self.copies


def rest(whole: Seconds, part: Seconds, *, least: float) -> Seconds:
    """Returns whole - part, but at least a share: the two are measured one after the other."""
    return np.maximum(whole - part, least * whole)


def measured_again(found: Speeds, measure: Sequence[Callable[[], tuple[float, Seconds]]]) -> Speeds:
    """Returns the points after measuring those again that are much slower than one before.

    A product with more operations per byte is about as fast or faster. If it is not, other programs
    may have disturbed its measurement.

    Args:
      found: the points, ascending.
      measure: measures each of them.
    """
    found = list(found)
    for _ in range(_MOST_AGAIN):
        best = np.maximum.accumulate([speed for _, speed in found])
        slow = [i for i, (_, speed) in enumerate(found) if (speed < _SLOW * best[i]).any()]
        for i in slow:
            at, speed = found[i]
            found[i] = (at, np.maximum(speed, measure[i]()[1]))
        if not slow:
            break
    return found


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


@functools.cache
def _call_s() -> Seconds:
    """Returns the time of calling a function that does nothing."""
    import tensorflow as tf

    return _mean(tf.function(lambda x: x), (tf.zeros([4]),), least_s=_RUN_S)


def _mean(function: Any, inputs: Sequence[Any], *, least_s: float) -> Seconds:
    function(*inputs)  # traces and compiles
    function(*inputs)

    def measure() -> Seconds:
        calls, start = 0, _now()
        while _now()[0] - start[0] < least_s:
            function(*inputs)
            calls += 1
        return (_now() - start) / calls

    best = _least(measure)
    # While a graph runs, a thread computes. If more time passes, other programs use the cores.
    return np.array([best[0], min(best)])


def _least(measure: Callable[[], Seconds]) -> Seconds:
    """Returns the least times of several measurements.

    If one is much below all others, these were disturbed, and so it may be. Then there are more
    measurements, until a second one confirms the least.
    """
    found: list[Seconds] = []
    while len(found) < _REPEATS or (len(found) < _MOST_REPEATS and not _is_confirmed(found)):
        found.append(measure())
    best: Seconds = np.min(found, axis=0)
    return best


def _is_confirmed(found: Sequence[Seconds]) -> bool:
    least, second = np.sort(found, axis=0)[:2]
    return bool((second <= (1.0 + _SCATTER) * least).all())


def _now() -> Seconds:
    return np.array([time.process_time(), time.perf_counter()])
