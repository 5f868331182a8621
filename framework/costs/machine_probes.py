"""Probes of the speed of this machine: small graphs whose time is measured.

    side_by_side   a graph has a copy of the probe for each core, on one thread each
    alone          a graph has one copy, and an op may use all threads; the next one waits for it,
                   so the time contains the hand-over to other threads and the wait for them

Probes of products, copies and streams read and write many different arrays. Together these are
larger than a cache, as are the tensors of a step, of which the backward pass reads many.

Every time is an array [CPU time, time that passes]. CPU time hardly depends on other programs. Of
several measurements, the smallest counts.
"""

from __future__ import annotations

import functools
import json
import operator
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tekso.framework.cores import num_cores
from tekso.framework.costs.this_machine import rate

Seconds = npt.NDArray[np.float64]
"""[CPU time, time that passes]."""

_RUN_S = 0.03  # CPU time of a measurement, for each copy
_REPEATS = 3
_MOST_REPEATS = 9  # if measurements differ
_SCATTER = 0.05  # of two measurements that confirm each other
_LEAST = 0.1  # least share of a call that its ops take, if other programs disturb a measurement
_TIMES = 16  # repetitions of an op in a probe, so that the call of the function hardly counts
_MANY_TIMES = 64  # the same for ops that do nothing
_FEW_TIMES = 4  # the same for ops on large arrays
_MOST_COPIES = 8
_SIMPLE = 16  # multiplications and additions in a cluster
_IN_CACHE = 1 << 15  # elements of an array that stays in the cache of a core
_FROM_MEMORY = (1 << 16, 1 << 18)  # of arrays that together do not
_LARGE = 1 << 22  # of one array that does not
_ITERATIONS = 32  # of a loop that XLA compiles
_MATRIX = 512  # rows and columns of a matrix that stays in the cache of a core
_LARGER = (1024, 2048)  # of matrices that do not
_ROWS = (2, 16)  # few: the time is that of reading the matrix; more: that of the operations
_TINY = 1e-9
_IMAGES = 64  # very small images that oneDNN divides among threads


def main(kind: str) -> None:
    """Measures this machine; prints the speeds as JSON.

    Args:
      kind: "side_by_side" or "alone"; see the module.
    """
    import tensorflow as tf

    cores = num_cores()
    tf.config.threading.set_intra_op_parallelism_threads(1 if kind == "side_by_side" else cores)
    tf.config.threading.set_inter_op_parallelism_threads(cores)
    speeds = Probes(min(cores, _MOST_COPIES) if kind == "side_by_side" else 1).speeds()
    print(json.dumps({"cpu": _column(speeds, 0), "elapsed": _column(speeds, 1)}))


def _column(speeds: dict[str, Any], number: int) -> dict[str, Any]:
    """Returns fields of `MachineSpeed` from CPU times or from times that passed."""
    return {
        name: [(at, float(value[number])) for at, value in found]
        if isinstance(found, list)
        else float(found[number])
        for name, found in speeds.items()
    }


class Probes:
    """The probes.

    Args:
      copies: number of copies of a probe that run at the same time.
    """

    def __init__(self, copies: int) -> None:
        self._copies, self._alone = copies, copies == 1
        self._copy = 0  # the one that is being traced

    def speeds(self) -> dict[str, Any]:
        """Returns fields of `MachineSpeed`, with an array for each number.

        Those that are missing are measured by `step_probes` only.
        """
        import tensorflow as tf

        elements = 1 << 20
        big, small = _ones(elements), _ones(4)
        cluster = self._compiled(lambda x: x * 0.5 + 1.0)
        simple = self._compiled(_chain(lambda x: x * 0.99 + 0.01, _SIMPLE))
        functions = self._compiled(lambda x: tf.math.erf(tf.exp(tf.tanh(x))))
        sums = self._compiled(lambda x: x - tf.reduce_sum(x * x, -1, keepdims=True))
        cluster_s = self.of_nothing(cluster, small)
        # In the cache, since reading and writing memory would hide the time of the elements.
        few = _ones(_IN_CACHE)
        few_s = self.of_chain(cluster, few)
        rows = _ones(_IN_CACHE // 128, 128)
        more = {
            name: _rest(self.of_chain(function, x), few_s, least=0.25)
            for name, function, x in (
                ("simple", simple, few), ("functions", functions, few), ("sums", sums, rows)
            )
        }  # fmt: skip
        images = _ones(8, 64, 8, 64)
        moved_s = self.of_each(lambda _, x: tf.transpose(x, [0, 2, 1, 3]), small, images)
        tiny = _ones(4, 4)
        product_s = self.of_nothing(lambda x: tf.matmul(x, tiny), tiny)
        filters, pixels = _ones(1, 1, 4, 4), _ones(_IMAGES if self._alone else 1, 4, 4, 4)
        convolution_s = self.of_nothing(lambda x: tf.nn.conv2d(x, filters, 1, "SAME"), pixels)
        convolutions, filter_gradients = self._convolutions(convolution_s)
        op_s = self.of_nothing(lambda x: x + small, small)
        streams = self.streams(tf.multiply, op_s, 12)
        return {
            "products": self._products(product_s, streams),
            "convolutions": convolutions,
            "filter_gradients": filter_gradients,
            "streams": streams,
            "functions_per_s": elements / self.of_chain(tf.tanh, big),
            "moved_bytes_per_s": 8 * images.shape.num_elements() / moved_s,
            "cluster_streams": self.streams(lambda a, _: cluster(a), cluster_s, 8),
            "cluster_elements_per_s": 2 * (_SIMPLE - 1) * _IN_CACHE / more["simple"],
            "cluster_functions_per_s": 3 * _IN_CACHE / more["functions"],
            "cluster_sums_per_s": _IN_CACHE / more["sums"],
            "loop_products_per_s": 2 * _ROWS[1] * _MATRIX**2 / self._of_product(_ROWS[1], _MATRIX),
            "loop_matrices": [
                (4.0 * size**2, 4 * size**2 / self._of_product(_ROWS[0], size))
                for size in (_MATRIX, *_LARGER)
            ],
            "op_s": op_s,
            "product_s": product_s,
            "convolution_s": convolution_s,
        }

    def _compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that XLA compiles, once for each copy."""
        import tensorflow as tf

        own: dict[int, Any] = {}

        def call(*tensors: Any) -> Any:
            if self._copy not in own:
                own[self._copy] = tf.function(function, jit_compile=True, autograph=False)
            return own[self._copy](*tensors)

        return call

    def streams(
        self, function: Callable[[Any, Any], Any], op_s: Seconds, moved: int
    ) -> list[tuple[float, Seconds]]:
        """Returns [(bytes of an op, bytes per second)] of an op that moves bytes for every element.

        The first point is a chain of ops on one small array. The second one is from ops on
        different arrays of two sizes, so that the time of an op and of its arguments does not
        count. The third one is of few large arrays.
        """
        few = _ones(_IN_CACHE)
        size = float(moved * _IN_CACHE)
        whole = self.of_chain(lambda x: function(x, few), few)
        seconds = _rest(whole, op_s, least=0.5)
        times = [self.of_each(function, _ones(n), _ones(n)) for n in _FROM_MEMORY]
        more = float(moved * (_FROM_MEMORY[1] - _FROM_MEMORY[0]))
        memory = more / _rest(times[1], times[0], least=0.5)
        large = self.of_each(function, _ones(_LARGE), _ones(_LARGE), times=_FEW_TIMES)
        return [
            (size, np.maximum(size / seconds, memory)),
            (float(moved * _FROM_MEMORY[0]), memory),
            (float(moved * _LARGE), np.minimum(moved * _LARGE / large, memory)),
        ]

    def _products(
        self, product_s: Seconds, streams: Sequence[tuple[float, Seconds]]
    ) -> list[tuple[float, Seconds]]:
        import tensorflow as tf

        from tekso.framework.primitives.fusion import XlaFusion
        from tekso.framework.primitives.products import product

        fusions = [XlaFusion() for _ in range(self._copies)]

        def own(a: Any, b: Any) -> Any:
            return product(a, b, fuse=fusions[self._copy])  # XLA may compile it

        found = []
        for batch, m, k, n in (
            (64, 64, 32, 64), (32, 128, 32, 128), (16, 512, 32, 512), (32, 128, 64, 128),
            (8, 512, 64, 512), (1, 512, 128, 128), (1, 1024, 128, 512), (1, 1024, 512, 512),
            (1, 1024, 1024, 1024),
        ):  # fmt: skip
            a, b = _ones(batch, m, k), _ones(batch, k, n)
            if batch == 1:
                a, b = a[0], b[0]
            flops = 2.0 * batch * m * k * n
            moved = 4.0 * batch * (m * k + k * n + m * n)
            times = _FEW_TIMES if moved > 1e7 else _TIMES
            whole = self.of_each(tf.matmul if batch > 1 else own, a, b, times=times) - product_s
            rates = [rate([(x, float(y[i])) for x, y in streams], moved) for i in range(2)]
            moving = moved / np.array(rates)
            found.append((flops / moved, flops / _rest(whole, moving, least=0.25)))
        return sorted(found, key=operator.itemgetter(0))

    def _convolutions(
        self, convolution_s: Seconds
    ) -> tuple[list[tuple[float, Seconds]], list[tuple[float, Seconds]]]:
        import tensorflow as tf

        def convolved(x: Any, w: Any) -> Any:
            return tf.nn.conv2d(x, w, 1, "SAME")

        forward: list[tuple[float, Seconds]] = []
        backward: list[tuple[float, Seconds]] = []
        for size, before, after in ((32, 8, 16), (32, 32, 32), (16, 64, 64), (8, 128, 256)):
            x, w = _ones(8, size, size, before), _ones(3, 3, before, after)
            y = _ones(8, size, size, after)
            flops = 2.0 * 8 * size * size * 9 * before * after
            moved = 4.0 * sum(t.shape.num_elements() for t in (x, w, y))
            filters = functools.partial(_filters, sizes=list(w.shape))
            times = [self.of_each(convolved, x, w), self.of_each(filters, x, y)]
            for points, whole in zip((forward, backward), times, strict=True):
                speed = flops / _rest(whole, convolution_s, least=0.5)
                points.append((flops / moved, speed))
        return sorted(forward, key=operator.itemgetter(0)), sorted(
            backward, key=operator.itemgetter(0)
        )

    def _of_product(self, rows: int, size: int) -> Seconds:
        """Returns the time of a product with the same matrix in every iteration of a loop."""
        import tensorflow as tf

        def loop(x: Any, w: Any) -> Any:
            return tf.while_loop(
                lambda i, _: i < _ITERATIONS,
                lambda i, x: (i + 1, tf.matmul(x, w)),
                (tf.constant(0), x),
                maximum_iterations=_ITERATIONS,
            )[1]

        # Orthogonal rows, so that the numbers neither grow nor vanish.
        matrix = tf.linalg.eye(size)[::-1]
        return self.seconds(self._compiled(loop), _ones(rows, size), matrix) / _ITERATIONS

    def of_chain(self, function: Callable[[Any], Any], x: Any) -> Seconds:
        """Returns the time of a function from a tensor to one of the same number of elements."""
        return self.seconds(_chain(function, _TIMES), x) / _TIMES

    def of_nothing(self, function: Callable[[Any], Any], x: Any) -> Seconds:
        """Returns the time of a function that has next to nothing to compute.

        There is one copy: TensorFlow runs such ops one after the other.
        """
        import tensorflow as tf

        whole = _mean(
            tf.function(_chain(function, _MANY_TIMES), autograph=False), (x,), least_s=_RUN_S
        )
        return _rest(whole, _call_s(), least=_LEAST) / _MANY_TIMES

    def of_each(
        self, function: Callable[[Any, Any], Any], a: Any, b: Any, *, times: int = _TIMES
    ) -> Seconds:
        """Returns the time of a function of two tensors, which are not in the cache."""
        whole = self._of_pairs(function, a, b, times)
        return np.maximum(whole - self._arguments_s(), _TINY)

    @functools.cache  # noqa: B019  # the process ends after the probes
    def _arguments_s(self) -> Seconds:
        """Returns the time that passing a pair of arguments, and returning a tensor, takes."""
        import tensorflow as tf

        small = tf.ones([4])
        one = self.of_chain(lambda x: x + small, small)
        return np.maximum(self._of_pairs(tf.add, small, small, _TIMES) - one, 0.0)

    def _of_pairs(self, function: Callable[[Any, Any], Any], a: Any, b: Any, times: int) -> Seconds:
        pairs = [(a * (1.0 + 0.01 * i), b * (1.0 + 0.01 * i)) for i in range(times)]
        return self.seconds(functools.partial(self._each, function), *pairs) / times

    def _each(self, function: Callable[[Any, Any], Any], *pairs: Any) -> list[Any]:
        """Returns the results of all pairs; alone, one is computed after the other."""
        import tensorflow as tf

        made: list[Any] = []
        for a, b in pairs:
            with tf.control_dependencies(made[-1:] if self._alone else []):
                made.append(function(a, b))
        return made

    def seconds(self, function: Callable[..., Any], *inputs: Any) -> Seconds:
        """Returns the time of the ops of a copy of a function."""
        import tensorflow as tf

        def copies(*each: Any) -> Any:
            found = []
            for number, own in enumerate(each):
                self._copy = number
                found.append(function(*own))
            return found

        each = [
            tf.nest.map_structure(lambda x, i=i: x * (1.0 + 0.001 * i), list(inputs))
            for i in range(self._copies)
        ]
        whole = _mean(tf.function(copies, autograph=False), each, least_s=_RUN_S * self._copies)
        return _rest(whole, _call_s(), least=_LEAST) / self._copies


def _rest(whole: Seconds, part: Seconds, *, least: float) -> Seconds:
    """Returns whole - part, but at least a share: the two are measured one after the other."""
    return np.maximum(whole - part, least * whole)


def _chain(function: Callable[[Any], Any], times: int) -> Callable[[Any], Any]:
    def chained(x: Any) -> Any:
        for _ in range(times):
            x = function(x)
        return x

    return chained


def _ones(*shape: int) -> Any:
    import tensorflow as tf

    return tf.random.stateless_normal(shape, [1, 2])


def _filters(x: Any, y: Any, sizes: list[int]) -> Any:
    import tensorflow as tf

    return tf.raw_ops.Conv2DBackpropFilter(
        input=x, filter_sizes=sizes, out_backprop=y, strides=[1, 1, 1, 1], padding="SAME"
    )


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
