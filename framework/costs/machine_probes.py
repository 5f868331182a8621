"""Probes of the speed of this machine: small graphs whose time is measured.

    side_by_side   a graph has a copy of the probe for each core, on one thread each
    alone          a graph has one copy, and an op may use all threads; the next one waits for it,
                   so the time contains the hand-over to other threads and the wait for them.
                   Between two such ops, there are small ones, as in a step: the other threads
                   fall asleep, and waking them takes time

Probes of products and copies read and write many different arrays. Together these are larger than
a cache. Probes of streams also read arrays that were just written, as most ops of a step do.
probe_runs.py measures them.
"""

from __future__ import annotations

import functools
import json
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tekso.framework.cores import num_cores
from tekso.framework.costs import function_probes, kernel_probes
from tekso.framework.costs.probe_runs import (
    TIMES,
    ProbeRuns,
    Seconds,
    Speeds,
    array,
    chain,
    rest,
)
from tekso.framework.costs.tensor_reuse import Move, distances
from tekso.framework.costs.this_machine import filled, rate

_FEW_TIMES = 4  # repetitions of an op on large arrays
_MOST_COPIES = 8
_SIMPLE = 16  # multiplications and additions in a cluster
_SUMS = 8  # sums in a cluster; a single one takes less time than two measurements differ
_IN_CACHE = 1 << 15  # elements of an array that stays in the cache of a core
_SUMMED = 1 << 17  # elements of rows that are summed
_LARGER_ARRAYS = (1 << 17, 1 << 19, 1 << 21, 1 << 22)  # of arrays that it cannot hold
_LARGE = 1 << 22  # of arrays of which no cache holds one until it is read
_PRODUCTS = (
    (8, 1024, 1024), (32, 1024, 1024), (512, 128, 128), (1024, 128, 512), (1024, 512, 512),
    (1024, 1024, 1024),
)  # fmt: skip
_BATCH_PRODUCTS = (
    (64, 64, 32, 64), (32, 128, 32, 128), (16, 512, 32, 512), (32, 128, 64, 128), (8, 512, 64, 512),
)  # fmt: skip
_CONVOLUTIONS = (
    (8, 32, 8, 16), (64, 8, 16, 16), (8, 32, 32, 32), (8, 16, 64, 64), (8, 8, 128, 256),
)  # fmt: skip
"""[images, height and width, channels before and after]."""
_IMAGES = (8, 32, 32, 32)  # images, height, width and channels, of other convolutions
_DEPTHWISE = (3, 5)  # height and width of filters
_MOST_LANES = 64
_SAME = {"strides": [1, 1, 1, 1], "padding": "SAME"}
_ITERATIONS = 32  # of a loop that XLA compiles
_MATRIX = 512  # rows and columns of a matrix that stays in the cache of a core
_LARGER = (1024, 2048)  # of matrices that do not
_ROWS = (2, 8, 12, 16)  # few: the time is that of reading the matrix; more: that of the operations


def main(kind: str) -> None:
    """Measures this machine; prints the speeds as JSON.

    Args:
      kind: "side_by_side" or "alone"; see the module.
    """
    import tensorflow as tf

    cores = num_cores()
    tf.config.threading.set_intra_op_parallelism_threads(1 if kind == "side_by_side" else cores)
    tf.config.threading.set_inter_op_parallelism_threads(cores)
    probes = _probes(kind, cores)
    speeds = probes.median_of_passes(probes.speeds)
    print(json.dumps({"cpu": _column(speeds, 0), "elapsed": _column(speeds, 1)}))


def _probes(kind: str, cores: int) -> Probes:
    is_alone = kind == "alone"
    return Probes(1 if is_alone else min(cores, _MOST_COPIES), is_alone=is_alone)


def _column(speeds: dict[str, Any], number: int) -> dict[str, Any]:
    """Returns fields of `MachineSpeed` from CPU times or from times that passed."""
    return {
        name: [(at, float(value[number])) for at, value in found]
        if isinstance(found, list)
        else float(found[number])
        for name, found in speeds.items()
    }


class Probes(ProbeRuns):
    """The probes; see `ProbeRuns` for the arguments."""

    def speeds(self) -> dict[str, Any]:
        """Returns fields of `MachineSpeed`, with an array for each number.

        Those that are missing are measured in steps only: by `step_probes`, and convolutions that
        use all threads by `convolution_probes`.
        """
        import tensorflow as tf

        small, tiny = array(4), array(4, 4)
        clusters = self._clusters()
        product_s = self.of_nothing(lambda x: tf.matmul(x, tiny), tiny)
        # Of a chain of equal ops, TensorFlow makes one: x * y * y * y becomes x * (y * y * y).
        op_s = self.of_nothing(lambda x: x * small + small, small) / 2
        streams = self.streams(tf.subtract, op_s, 12, (_IN_CACHE, *_LARGER_ARRAYS))
        return {
            "products": self._products(_PRODUCTS, product_s, streams),
            "batch_products": self._products(_BATCH_PRODUCTS, product_s, streams),
            "streams": streams,
            **kernel_probes.speeds(self),
            **function_probes.speeds(self),
            **clusters,
            **self._loop_products(),
            "op_s": op_s,
            "product_s": product_s,
            **self._depthwise(),
            **self._convolutions(),
        }

    def _clusters(self) -> dict[str, Any]:
        """Returns fields of `MachineSpeed`: of clusters that XLA compiles."""
        import tensorflow as tf

        def add_sum(x: Any, axes: Sequence[int]) -> Any:
            return x * 0.99 + 1e-3 * tf.reduce_sum(x, axes, keepdims=True)

        cluster = self.compiled(lambda x: x * 0.5 + 1.0)
        simple, fewer = (
            self.compiled(chain(lambda x: x * 0.99 + 0.01, times)) for times in (_SIMPLE, _SUMS)
        )
        functions = self.compiled(lambda x: tf.math.erf(tf.exp(tf.tanh(x))))
        sums, column_sums = (
            self.compiled(chain(functools.partial(add_sum, axes=axes), _SUMS))
            for axes in ([-1], [0, 1])
        )
        # In the cache, since reading and writing memory would hide the time of the elements.
        few, rows = array(_IN_CACHE), array(8, _SUMMED // 1024, 128)
        few_s, rows_s = self.of_chain(cluster, few), self.of_chain(fewer, rows)
        simple_s = rest(self.of_chain(simple, few), few_s, least=0.25)
        functions_s = rest(self.of_chain(functions, few), few_s, least=0.25)
        sums_s = rest(self.of_chain(sums, rows), rows_s, least=0.1)
        column_sums_s = rest(self.of_chain(column_sums, rows), rows_s, least=0.1)
        cluster_s = self.of_nothing(cluster, array(4))
        return {
            "cluster_streams": self.streams(lambda a, _: cluster(a), cluster_s, 8, _LARGER_ARRAYS),
            "cluster_elements_per_s": 2 * (_SIMPLE - 1) * _IN_CACHE / simple_s,
            "cluster_functions_per_s": 3 * _IN_CACHE / functions_s,
            "cluster_sums_per_s": _SUMS * _SUMMED / sums_s,
            "cluster_column_sums_per_s": _SUMS * _SUMMED / column_sums_s,
        }

    def streams(
        self,
        function: Callable[[Any, Any], Any],
        op_s: Seconds,
        moved: int,
        sizes: Sequence[int],
    ) -> Speeds:
        """Returns [(distance, bytes per second)] of an op; see tensor_reuse.py for distances.

        An op reads what the ones before it wrote. In the last point, it reads and writes arrays
        that were not used for long.

        Args:
          function: the op.
          op_s: time of the op on a very small array.
          moved: bytes that it moves for every element.
          sizes: elements of the arrays of the series.
        """
        found = []
        for size in sizes:
            whole = self.of_series(function, array(size))
            found.append((float(moved * size), moved * size / rest(whole, op_s, least=0.25)))
        large = self.of_each(function, array(_LARGE), array(_LARGE), times=_FEW_TIMES)
        found.append((float(_FEW_TIMES * moved * _LARGE), moved * _LARGE / large))
        # Memory that is nearer is at least as fast; if not, its measurement was disturbed.
        speeds = np.maximum.accumulate([speed for _, speed in found[::-1]])[::-1]
        return [(distance, speed) for (distance, _), speed in zip(found, speeds, strict=True)]

    def _products(
        self, shapes: Sequence[tuple[int, ...]], product_s: Seconds, streams: Speeds
    ) -> Speeds:
        """Returns [(operations per byte, operations per second)] of products of some shapes.

        Each is the mean of a product and of the products that its gradients are, of which one
        operand is transposed.

        Args:
          shapes: [m, k, n], or [batch, m, k, n].
          product_s: time of a product of very small matrices.
          streams: speeds of the tensors, which do not count as part of the product.
        """
        import tensorflow as tf

        from tekso.framework.primitives.fusion import XlaFusion
        from tekso.framework.primitives.products import product

        fusions = [XlaFusion() for _ in range(self.copies)]

        def of_layers(a: Any, b: Any, **transposes: bool) -> Any:
            return product(a, b, fuse=fusions[self.copy], **transposes)  # XLA may compile it

        def measured(shape: Sequence[int]) -> tuple[float, Seconds]:
            *batch, m, k, n = shape
            multiply: Any = tf.matmul if batch else of_layers

            def all_three(a: Any, b: Any) -> Any:
                y = multiply(a, b)
                da = multiply(y, b, transpose_b=True)
                return multiply(da, y, transpose_a=True)

            a, b = array(*batch, m, k), array(*batch, k, n)
            count = math.prod(batch)
            flops, moved = 2.0 * count * m * k * n, 4.0 * count * (m * k + k * n + m * n)
            times = _FEW_TIMES if moved > 1e7 else TIMES // 2
            one = self.of_each(all_three, a, b, times=times) / 3
            whole = rest(one, product_s, least=0.25)
            moving = _moving_seconds(shape, times, streams)
            return flops / moved, flops / rest(whole, moving, least=0.25)

        return sorted((measured(shape) for shape in shapes), key=operator.itemgetter(0))

    def _convolutions(self) -> dict[str, Any]:
        """Returns fields of `MachineSpeed`: of convolutions with their gradients."""
        import tensorflow as tf

        convolution_s = self._convolution_s()
        lanes = self._lanes(convolution_s)
        if self.is_alone:  # the others are measured in steps
            return {"lanes": lanes}
        forward: Speeds = []
        backward: Speeds = []
        for images, size, before, after in _CONVOLUTIONS:
            x, w = array(images, size, size, before), array(3, 3, before, after)
            y = array(images, size, size, after)

            def both(x: Any, w: Any) -> Any:
                """Returns the gradient of the input, which takes longer than the convolution."""
                y = tf.nn.conv2d(x, w, 1, "SAME")
                return tf.raw_ops.Conv2DBackpropInput(
                    input_sizes=x.shape, filter=w, out_backprop=y, **_SAME
                )

            def filters(x: Any, y: Any, sizes: Any = w.shape) -> Any:
                return tf.raw_ops.Conv2DBackpropFilter(
                    input=x, filter_sizes=sizes, out_backprop=y, **_SAME
                )

            flops = 2.0 * images * size * size * 9 * before * after
            moved = 4.0 * sum(t.shape.num_elements() for t in (x, w, y))
            of_after, of_before = (
                np.array([filled(channels, one) for one in lanes]) for channels in (after, before)
            )
            times = [self.of_each(both, x, w) / 2, self.of_each(filters, x, y)]
            computed = [flops * (of_after + of_before) / 2, flops * of_after]
            for points, whole, each in zip((forward, backward), times, computed, strict=True):
                points.append((flops / moved, each / rest(whole, convolution_s, least=0.5)))
        return {
            "lanes": lanes,
            "convolution_s": convolution_s,
            "convolutions": sorted(forward, key=operator.itemgetter(0)),
            "filter_gradients": sorted(backward, key=operator.itemgetter(0)),
        }

    def _convolution_s(self) -> Seconds:
        """Returns the time of a convolution of a very small image."""
        import tensorflow as tf

        def measure() -> Seconds:
            small = array(1, 1, 4, 4)
            return self.of_nothing(lambda x: tf.nn.conv2d(x, small, 1, "SAME"), array(1, 4, 4, 4))

        return self.once("convolution", measure)

    def _lanes(self, convolution_s: Seconds) -> Seconds:
        """Returns the channels of a vector, a power of 2.

        A convolution to a single channel takes as long as one to a vector of them.
        """
        import tensorflow as tf

        channels = _IMAGES[-1]
        one_s, all_s = (
            rest(
                self.of_each(
                    lambda x, w: tf.nn.conv2d(x, w, 1, "SAME"),
                    array(*_IMAGES),
                    array(3, 3, channels, after),
                ),
                convolution_s,
                least=0.5,
            )
            for after in (1, channels)
        )
        found: Seconds = np.exp2(np.round(np.log2(channels * one_s / all_s)))
        return np.clip(found, 1.0, _MOST_LANES)

    def _depthwise(self) -> dict[str, Any]:
        """Returns fields of `MachineSpeed`: of depthwise convolutions with their gradients."""
        import tensorflow as tf

        forward: Speeds = []
        backward: Speeds = []
        x, y = array(*_IMAGES), array(*_IMAGES)
        for size in _DEPTHWISE:
            w = array(size, size, _IMAGES[-1], 1)

            def both(x: Any, w: Any) -> Any:
                """Returns the gradient of the input."""
                y = tf.nn.depthwise_conv2d(x, w, **_SAME)
                return tf.raw_ops.DepthwiseConv2dNativeBackpropInput(
                    input_sizes=x.shape, filter=w, out_backprop=y, **_SAME
                )

            def filters(x: Any, y: Any, sizes: Any = w.shape) -> Any:
                return tf.raw_ops.DepthwiseConv2dNativeBackpropFilter(
                    input=x, filter_sizes=sizes, out_backprop=y, **_SAME
                )

            flops = 2.0 * math.prod(_IMAGES) * size**2
            moved = 4.0 * (2 * math.prod(_IMAGES) + w.shape.num_elements())
            times = [self.of_each(both, x, w) / 2, self.of_each(filters, x, y)]
            for points, whole in zip((forward, backward), times, strict=True):
                speed = flops / rest(whole, self._convolution_s(), least=0.5)
                points.append((flops / moved, speed))
        return {"depthwise": forward, "depthwise_filter_gradients": backward}

    def _loop_products(self) -> dict[str, Any]:
        """Returns fields of `MachineSpeed`: of products in a loop over time."""
        right = [(rows, self._of_product(rows, _MATRIX)) for rows in _ROWS]
        left = [(rows, self._of_product(rows, _MATRIX, on_left=True)) for rows in _ROWS]
        few = _ROWS[0]
        times = [(_MATRIX, right[0][1]), *((size, self._of_product(few, size)) for size in _LARGER)]
        return {
            **{
                f"loop_products_{side}": [
                    (float(rows), 2 * rows * _MATRIX**2 / time) for rows, time in found
                ]
                for side, found in (("left", left), ("right", right))
            },
            "loop_matrices": [(4.0 * size**2, 4 * size**2 / time) for size, time in times],
        }

    def _of_product(self, rows: int, size: int, *, on_left: bool = False) -> Seconds:
        """Returns the time of a product with the same matrix in every iteration of a loop."""
        import tensorflow as tf

        def loop(x: Any, w: Any) -> Any:
            return tf.while_loop(
                lambda i, _: i < _ITERATIONS,
                lambda i, x: (i + 1, tf.matmul(w, x) if on_left else tf.matmul(x, w)),
                (tf.constant(0), x),
                maximum_iterations=_ITERATIONS,
            )[1]

        # Orthogonal rows, so that the numbers neither grow nor vanish.
        matrix = tf.linalg.eye(size)[::-1]
        x = array(size, rows) if on_left else array(rows, size)
        return self.seconds(self.compiled(loop), x, matrix) / _ITERATIONS


def _moving_seconds(shape: Sequence[int], times: int, streams: Speeds) -> Seconds:
    """Returns the time of the tensors of a product: a mean over those of `_products`."""
    count, (m, k, n) = 4.0 * math.prod(shape[:-3]), shape[-3:]
    sizes = {"a": count * m * k, "b": count * k * n, "y": count * m * n}
    sizes |= {"da": sizes["a"], "db": sizes["b"]}
    moves = []
    for pair in range(times):
        a, b, y, da, db = ((f"{name}{pair}", size) for name, size in sizes.items())
        moves += [Move([a, b], [y]), Move([y, b], [da]), Move([da, y], [db])]
    uses = [use for of_move in distances(moves) for use in of_move]
    points = [[(x, float(y[i])) for x, y in streams] for i in range(2)]
    sums = [math.fsum(size / rate(each, distance) for size, distance in uses) for each in points]
    return np.array(sums) / len(moves)
