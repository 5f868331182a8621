"""Measures the speed of one core of this machine, for estimates of the time of a step.

    probes (about 3 s of one core)  ─►  MachineSpeed  ─►  cached by processor and TensorFlow version

Every probe is a small graph that runs on one thread. Its CPU time counts, not the time that passes,
so other programs on the machine hardly change the result. Probes of products, copies and streams
read and write many different arrays. Together these are larger than a cache, as are the tensors of
a step, of which the backward pass reads many. `measured()` runs the probes in a new process,
because the number of threads of a process cannot be changed after its first op.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from tekso.framework import files
from tekso.framework.costs import device_types
from tekso.framework.costs.device_types import DeviceType
from tekso.framework.execution.errors import ExecutionError

THIS_MACHINE = "this_machine"

_VERSION = 7
_RUN_S = 0.06  # CPU time of a measurement
_REPEATS = 3
_LEAST = 0.1  # least share of a call that its ops take, if other programs disturb a measurement
_TIMES = 16  # repetitions of an op in a probe, so that the call of the function hardly counts
_SIMPLE = 16  # multiplications and additions in a cluster
_IN_CACHE = 1 << 15  # elements of an array that stays in the cache of a core
_FROM_MEMORY = (1 << 16, 1 << 18)  # of arrays that together do not
_CPUINFO = Path("/proc/cpuinfo")


@dataclasses.dataclass(frozen=True)
class MachineSpeed:
    """Speed of one core.

    Attributes:
      products: [(operations per byte, operations per second)] of matrix products, ascending.
      convolutions: the same of convolutions.
      filter_gradients: the same of gradients of filters of convolutions.
      streams: [(bytes of an op, bytes per second)] that elementwise ops read and write, ascending.
      functions_per_s: elements of exponentials and similar functions.
      moved_bytes_per_s: bytes that transpositions and copies read and write.
      cluster_streams: the same of a cluster compiled by XLA.
      cluster_elements_per_s: elements of simple ops inside such a cluster.
      cluster_functions_per_s: elements of exponentials and similar functions inside one.
      op_s: time of an op that does nothing.
      product_s: time of a product of very small matrices.
      cluster_s: time of a cluster that does nothing.
      convolution_s: time of a convolution of a very small image.
    """

    products: Sequence[tuple[float, float]]
    convolutions: Sequence[tuple[float, float]]
    filter_gradients: Sequence[tuple[float, float]]
    streams: Sequence[tuple[float, float]]
    functions_per_s: float
    moved_bytes_per_s: float
    cluster_streams: Sequence[tuple[float, float]]
    cluster_elements_per_s: float
    cluster_functions_per_s: float
    op_s: float
    product_s: float
    cluster_s: float
    convolution_s: float


def device_type() -> DeviceType:
    """Returns one core of this machine as a device type, for layouts on several devices."""
    speed = measured()
    peak = speed.products[-1][1]
    return DeviceType(
        THIS_MACHINE, {"float32": peak, "bfloat16": peak / 2}, float(psutil.virtual_memory().total),
        speed.streams[-1][1], 4e9, 3e-5, reached=0.75,
    )  # fmt: skip


def find(name: str) -> DeviceType:
    """Returns the device type with a name, which may be that of this machine.

    Raises:
      ExecutionError: the name is unknown, or this machine cannot be measured.
    """
    if name == THIS_MACHINE:
        return device_type()
    return device_types.find(name, also=(THIS_MACHINE,))


def rate(points: Sequence[tuple[float, float]], intensity: float) -> float:
    """Returns operations per second at a number of operations per byte, between the points."""
    before = points[0]
    for point in points:
        if intensity <= point[0]:
            if point[0] == before[0]:
                return point[1]
            share = (intensity - before[0]) / (point[0] - before[0])
            return before[1] + share * (point[1] - before[1])
        before = point
    return before[1]


@functools.cache
def measured() -> MachineSpeed:
    """Returns the speed of this machine, from the cache if it was measured before.

    Raises:
      ExecutionError: the process of the probes ended with an error.
    """
    path = _cache()
    if path.exists():
        try:
            return _of_json(path.read_text())
        except (ValueError, TypeError, KeyError):
            pass  # damaged: measure again
    program = [sys.executable, "-c", f"from {__name__} import main; main()"]
    done = subprocess.run(
        program, capture_output=True, text=True, check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"},
    )  # fmt: skip
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        raise ExecutionError(f"the speed of this machine could not be measured: {last}")
    text = done.stdout.strip().splitlines()[-1]
    found = _of_json(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_atomically(str(path), text + "\n")
    except OSError:
        pass  # it is measured again next time
    return found


def _cache() -> Path:
    from importlib.metadata import PackageNotFoundError, version

    found = ""
    for name in ("tensorflow", "tensorflow-cpu"):
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        break
    try:
        lines = re.findall(r"^(?:model name|flags)\s*:.*$", _CPUINFO.read_text(), re.MULTILINE)[:2]
    except OSError:
        lines = [platform.processor(), platform.machine()]
    key = hashlib.sha256("\n".join([str(_VERSION), found, *lines]).encode()).hexdigest()[:16]
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root) / "tekso" / f"machine_{key}.json"


def _of_json(text: str) -> MachineSpeed:
    fields = json.loads(text)
    points = ("products", "convolutions", "filter_gradients", "streams", "cluster_streams")
    values: dict[str, Any] = {
        name: [(float(a), float(b)) for a, b in value] if name in points else float(value)
        for name, value in fields.items()
    }
    return MachineSpeed(**values)


# --- the probes, in a process of their own ---


def main() -> None:
    """Measures this machine, and prints the speed as JSON."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    print(json.dumps(dataclasses.asdict(_probe())))


def _probe() -> MachineSpeed:
    import tensorflow as tf

    def ones(*shape: int) -> Any:
        return tf.random.stateless_normal(shape, [1, 2])

    elements = 1 << 20
    big, small = ones(elements), ones(4)
    cluster = tf.function(lambda x: x * 0.5 + 1.0, jit_compile=True)
    simple = tf.function(_many_simple, jit_compile=True)
    functions = tf.function(lambda x: tf.math.erf(tf.exp(tf.tanh(x))), jit_compile=True)
    cluster_s = _of_chain(cluster, small)
    # In the cache, since reading and writing memory would hide the time of the elements.
    few = ones(_IN_CACHE)
    few_s = _of_chain(cluster, few)
    simple_s = max(_of_chain(simple, few) - few_s, 1e-9)
    functions_s = max(_of_chain(functions, few) - few_s, 1e-9)
    images = ones(8, 64, 8, 64)
    moved_s = _of_each(lambda _, x: tf.transpose(x, [0, 2, 1, 3]), small, images)
    tiny = ones(4, 4)
    product_s = _of_chain(lambda x: tf.matmul(x, tiny), tiny)
    filters = ones(3, 3, 4, 4)
    convolution_s = _of_chain(lambda x: tf.nn.conv2d(x, filters, 1, "SAME"), ones(1, 4, 4, 4))
    convolutions, filter_gradients = _convolutions(ones, convolution_s)
    op_s = _of_chain(lambda x: x + small, small)
    return MachineSpeed(
        products=_products(ones, product_s),
        convolutions=convolutions,
        filter_gradients=filter_gradients,
        streams=_streams(ones, tf.multiply, op_s, 12),
        functions_per_s=elements / _of_chain(tf.tanh, big),
        moved_bytes_per_s=8 * images.shape.num_elements() / moved_s,
        cluster_streams=_streams(ones, lambda a, _: cluster(a), cluster_s, 8),
        cluster_elements_per_s=2 * (_SIMPLE - 1) * _IN_CACHE / simple_s,
        cluster_functions_per_s=3 * _IN_CACHE / functions_s,
        op_s=op_s,
        product_s=product_s,
        cluster_s=cluster_s,
        convolution_s=convolution_s,
    )


def _many_simple(x: Any) -> Any:
    for _ in range(_SIMPLE):
        x = x * 0.99 + 0.01
    return x


def _streams(
    ones: Callable[..., Any], function: Callable[[Any, Any], Any], op_s: float, moved: int
) -> list[tuple[float, float]]:
    """Returns [(bytes of an op, bytes per second)] of an op that moves bytes for every element.

    The first point is a chain of ops on one small array. The second one is from ops on different
    arrays of two sizes, so that the time of an op and of its arguments does not count.
    """
    few = ones(_IN_CACHE)
    size = float(moved * _IN_CACHE)
    whole = _of_chain(lambda x: function(x, few), few)
    seconds = max(whole - op_s, whole / 2)  # the two are measured one after the other
    times = [_of_each(function, ones(n), ones(n)) for n in _FROM_MEMORY]
    more = float(moved * (_FROM_MEMORY[1] - _FROM_MEMORY[0]))
    memory = more / max(times[1] - times[0], times[1] / 2)  # as above
    return [(size, max(size / seconds, memory)), (float(moved * _FROM_MEMORY[0]), memory)]


def _products(ones: Callable[..., Any], product_s: float) -> list[tuple[float, float]]:
    import tensorflow as tf

    found = []
    for batch, m, k, n in (
        (64, 64, 32, 64), (32, 128, 32, 128), (32, 128, 64, 128), (8, 512, 64, 512),
        (1, 512, 128, 128), (1, 1024, 128, 512), (1, 1024, 512, 512), (1, 1024, 1024, 1024),
    ):  # fmt: skip
        a, b = ones(batch, m, k), ones(batch, k, n)
        if batch == 1:
            a, b = a[0], b[0]
        flops = 2.0 * batch * m * k * n
        moved = 4.0 * batch * (m * k + k * n + m * n)
        found.append((flops / moved, flops / max(_of_each(tf.matmul, a, b) - product_s, 1e-9)))
    return sorted(found)


def _convolutions(
    ones: Callable[..., Any], convolution_s: float
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    import tensorflow as tf

    def convolved(x: Any, w: Any) -> Any:
        return tf.nn.conv2d(x, w, 1, "SAME")

    forward: list[tuple[float, float]] = []
    backward: list[tuple[float, float]] = []
    for size, before, after in ((32, 8, 16), (32, 32, 32), (16, 64, 64), (8, 128, 256)):
        x, w, y = ones(8, size, size, before), ones(3, 3, before, after), ones(8, size, size, after)
        flops = 2.0 * 8 * size * size * 9 * before * after
        moved = 4.0 * sum(t.shape.num_elements() for t in (x, w, y))
        filters = functools.partial(_filters, sizes=list(w.shape))
        times = [_of_each(convolved, x, w), _of_each(filters, x, y)]
        for points, whole in zip((forward, backward), times, strict=True):
            points.append((flops / moved, flops / max(whole - convolution_s, whole / 2)))
    return sorted(forward), sorted(backward)


def _filters(x: Any, y: Any, sizes: list[int]) -> Any:
    import tensorflow as tf

    return tf.raw_ops.Conv2DBackpropFilter(
        input=x, filter_sizes=sizes, out_backprop=y, strides=[1, 1, 1, 1], padding="SAME"
    )


def _of_chain(function: Callable[[Any], Any], x: Any) -> float:
    """Returns the time of a function from a tensor to one of the same number of elements."""
    import tensorflow as tf

    def chained(x: Any) -> Any:
        for _ in range(_TIMES):
            x = function(x)
        return x

    return _seconds(tf.function(chained, autograph=False), x) / _TIMES


def _of_each(function: Callable[[Any, Any], Any], a: Any, b: Any) -> float:
    """Returns the time of a function of two tensors, which are not in the cache."""
    return max(_of_pairs(function, a, b) - _arguments_s(), 1e-9)


@functools.cache
def _arguments_s() -> float:
    """Returns the time that passing a pair of arguments, and returning a tensor, takes."""
    import tensorflow as tf

    small = tf.ones([4])
    return max(_of_pairs(tf.add, small, small) - _of_chain(lambda x: x + small, small), 0.0)


def _of_pairs(function: Callable[[Any, Any], Any], a: Any, b: Any) -> float:
    import tensorflow as tf

    pairs = [(a * (1.0 + 0.01 * i), b * (1.0 + 0.01 * i)) for i in range(_TIMES)]
    each = tf.function(lambda *pairs: [function(a, b) for a, b in pairs], autograph=False)
    return _seconds(each, *pairs) / _TIMES


def _seconds(function: Any, *inputs: Any) -> float:
    """Returns the CPU time of the ops of a call: the smallest mean of several measurements."""
    whole = _mean(function, inputs)
    return max(whole - _call_s(), _LEAST * whole)


@functools.cache
def _call_s() -> float:
    """Returns the CPU time of calling a function that does nothing."""
    import tensorflow as tf

    return _mean(tf.function(lambda x: x), (tf.zeros([4]),))


def _mean(function: Any, inputs: Sequence[Any]) -> float:
    function(*inputs)  # traces and compiles
    function(*inputs)
    best = float("inf")
    for _ in range(_REPEATS):
        calls, start = 0, time.process_time()
        while time.process_time() - start < _RUN_S:
            function(*inputs)
            calls += 1
        best = min(best, (time.process_time() - start) / calls)
    return best
