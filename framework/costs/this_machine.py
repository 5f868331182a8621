"""The measured speed of this machine, for estimates of the time of a step.

    machine_probes (speeds of ops)              ─►  ThisMachine  ─►  stored_speeds.py
    step_probes (fixed costs of a real step)
    convolution_probes (convolutions in a step, on all threads)

The probes run as the ops of a step do: side by side on one thread per core, as towers do, which
share caches and memory; and alone, with all threads for each op. `measured()` runs each kind in a
new process, because the number of threads of a process cannot be changed after its first op.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from tekso.framework.costs import device_types, memory_limit, stored_speeds
from tekso.framework.costs.device_types import DeviceType

THIS_MACHINE = "this_machine"

_PROBES = "tekso.framework.costs.machine_probes"  # a program, which imports this module
_STEP_PROBES = "tekso.framework.run.step_probes"  # the same
_CONVOLUTION_PROBES = "tekso.framework.run.convolution_probes"  # the same
_FAST = 1e30  # operations, elements or bytes per second


@dataclasses.dataclass(frozen=True)
class MachineSpeed:
    """Speeds of ops.

    Attributes:
      products: [(operations per byte, operations per second)] of matrix products, ascending; the
        time in which `streams` moves their bytes is not part of it.
      batch_products: the same of products of many small matrices.
      convolutions: the same of convolutions; operations count for whole vectors of channels.
      filter_gradients: the same of gradients of filters of convolutions.
      depthwise: the same of depthwise convolutions, whose operations count as they are.
      depthwise_filter_gradients: the same of gradients of their filters.
      streams: [(distance, bytes per second)] of tensors that elementwise ops read and write,
        ascending; `tensor_reuse` has the distance.
      functions_per_s: elements of functions that are not in `functions`.
      functions: {op: elements of this elementwise function per second}.
      broadcasts_per_s: elements of an elementwise op of tensors of different shapes, such as images
        times a scale for each channel.
      copy_streams: `streams` of transpositions and copies.
      turned_streams: `streams` of copies of an Einsum in which another dim comes last.
      slice_gradients: [(dims, elements of a slice per second)] of gradients of slices.
      cross_entropies_per_s: logits of softmax cross-entropies.
      running_sums_per_s: elements of running sums and products.
      transforms_per_s: elements of Fourier transforms, times the binary logarithm of their length.
      cluster_streams: `streams` of a cluster compiled by XLA.
      cluster_elements_per_s: elements of simple ops inside such a cluster.
      cluster_functions_per_s: elements of exponentials and similar functions inside one.
      cluster_functions: {op: elements of this elementwise function per second} inside one.
      cluster_sums_per_s: elements that a sum of rows inside one adds.
      cluster_column_sums_per_s: the same of a sum of columns.
      loop_products_left: [(columns, operations per second)] of products in a loop that XLA
        compiles, ascending; the matrix, which is the same in every iteration, is on the left, and
        the columns are those of the other tensor.
      loop_products_right: [(rows, operations per second)] of those with the matrix on the right.
      loop_matrices: [(bytes, bytes per second)] of a matrix that every iteration of such a loop
        reads, ascending.
      lanes: channels of a vector, which a convolution computes at the same time.
      op_s: time of an op that does nothing.
      product_s: time of a product of very small matrices.
      cluster_s: time of a cluster that does nothing and has no arguments.
      convolution_s: time of a convolution of a very small image; of one that uses all cores, with
        the waits for other threads and for the ops beside it.
      argument_s: time of an input or an output of a cluster.
      loop_s: time of a loop in an iteration of a loop over time in a cluster, of very few elements.
    """

    products: Sequence[tuple[float, float]]
    batch_products: Sequence[tuple[float, float]]
    convolutions: Sequence[tuple[float, float]]
    filter_gradients: Sequence[tuple[float, float]]
    depthwise: Sequence[tuple[float, float]]
    depthwise_filter_gradients: Sequence[tuple[float, float]]
    streams: Sequence[tuple[float, float]]
    functions_per_s: float
    functions: Mapping[str, float]
    broadcasts_per_s: float
    copy_streams: Sequence[tuple[float, float]]
    turned_streams: Sequence[tuple[float, float]]
    slice_gradients: Sequence[tuple[float, float]]
    cross_entropies_per_s: float
    running_sums_per_s: float
    transforms_per_s: float
    cluster_streams: Sequence[tuple[float, float]]
    cluster_elements_per_s: float
    cluster_functions_per_s: float
    cluster_functions: Mapping[str, float]
    cluster_sums_per_s: float
    cluster_column_sums_per_s: float
    loop_products_left: Sequence[tuple[float, float]]
    loop_products_right: Sequence[tuple[float, float]]
    loop_matrices: Sequence[tuple[float, float]]
    lanes: float
    op_s: float
    product_s: float
    cluster_s: float
    convolution_s: float
    argument_s: float
    loop_s: float


POINTS = (
    "products", "batch_products", "convolutions", "filter_gradients", "depthwise",
    "depthwise_filter_gradients", "streams", "copy_streams", "turned_streams",
    "cluster_streams", "loop_products_left", "loop_products_right", "loop_matrices",
    "slice_gradients",
)  # fmt: skip
"""Fields of `MachineSpeed` that are a speed at several points."""

BY_OP = ("functions", "cluster_functions")
"""Fields of `MachineSpeed` that are a speed for each of several ops."""

STARTS = ("op_s", "product_s", "cluster_s", "convolution_s", "argument_s", "loop_s")
"""Fields of `MachineSpeed` that are the time of something that computes nothing."""

OF_STEP = ("call_s", "array_s", "variable_s")
"""Fields of `ThisMachine` that are times, in their order."""


@dataclasses.dataclass(frozen=True)
class ThisMachine:
    """Speeds of this machine.

    Attributes:
      side_by_side: of one core, while the others do the same.
      alone: of one op at a time, which may use all cores.
      alone_cpu: the same in CPU time: operations per second of one core.
      call_s: time of calling a step from Python, and of reading its loss.
      array_s: time of passing an array of a batch to a step.
      variable_s: time to read and to assign a variable.
    """

    side_by_side: MachineSpeed
    alone: MachineSpeed
    alone_cpu: MachineSpeed
    call_s: float
    array_s: float
    variable_s: float


def only(**given: Any) -> MachineSpeed:
    """Returns a machine on which nothing takes time except for what is given.

    Args:
      **given: fields of `MachineSpeed`.
    """
    fields: dict[str, Any] = {
        **{field.name: _FAST for field in dataclasses.fields(MachineSpeed)},
        **{name: [(1.0, _FAST)] for name in POINTS},
        **{name: {} for name in BY_OP},
        **dict.fromkeys(STARTS, 0.0),
        "lanes": 1.0,
    }
    return MachineSpeed(**fields | given)


def device_type() -> DeviceType:
    """Returns one core of this machine as a device type, for layouts on several devices."""
    speed = measured().side_by_side
    peak = speed.products[-1][1]
    return DeviceType(
        THIS_MACHINE, {"float32": peak, "bfloat16": peak / 2}, memory_limit.memory_bytes(),
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


def rate(points: Sequence[tuple[float, float]], at: float) -> float:
    """Returns the speed at a number of operations per byte, at a distance or at a size.

    Args:
      points: [(the same number, speed)], ascending; between two, the speed is interpolated.
      at: the number.
    """
    before = points[0]
    for point in points:
        if at <= point[0]:
            if point[0] == before[0]:
                return point[1]
            share = (at - before[0]) / (point[0] - before[0])
            return before[1] + share * (point[1] - before[1])
        before = point
    return before[1]


def filled(channels: int, lanes: float) -> float:
    """Returns how many times the operations of some channels whole vectors of them take.

    Args:
      channels: number of channels; 0: unknown.
      lanes: channels of a vector.
    """
    return math.ceil(channels / lanes) * lanes / channels if channels else 1.0


@functools.cache
def measured() -> ThisMachine:
    """Returns the speed of this machine, from the cache if it was measured before.

    Raises:
      ExecutionError: the process of the probes ended with an error.
    """
    return stored_speeds.stored("machine", _measure, _of_record, cost="about 2 min")


def _measure(run: stored_speeds.Run) -> dict[str, Any]:
    """Runs the probes; returns the fields of `ThisMachine` as they are stored."""
    side_by_side, alone = run(_PROBES, "side_by_side"), run(_PROBES, "alone")
    step, convolutions = run(_STEP_PROBES), run(_CONVOLUTION_PROBES)
    starts = {name: step[name] for name in STARTS}

    def speeds_alone(kind: Literal["elapsed", "cpu"]) -> dict[str, Any]:
        # A step of the probes runs each op on one thread. An op that uses all threads costs more to
        # start, which only the probes of `alone` show. They repeat the op, which may make it
        # cheaper.
        of_ops = alone[kind]
        larger = {name: max(time, of_ops.get(name, time)) for name, time in starts.items()}
        return {**of_ops, **larger, **convolutions[kind]}

    return {
        **{name: step[name] for name in OF_STEP},
        "side_by_side": {**side_by_side["cpu"], **starts},
        "alone": speeds_alone("elapsed"),
        "alone_cpu": speeds_alone("cpu"),
    }


def _of_record(values: Any) -> ThisMachine:
    return ThisMachine(
        _speed(values["side_by_side"]),
        _speed(values["alone"]),
        _speed(values["alone_cpu"]),
        *(stored_speeds.time_of(values[name]) for name in OF_STEP),
    )


def _speed(fields: dict[str, Any]) -> MachineSpeed:
    values: dict[str, Any] = {}
    for name, value in fields.items():
        if name in POINTS:
            values[name] = [tuple(map(stored_speeds.speed_of, point)) for point in value]
            if not values[name]:
                raise ValueError(f"there is no speed of {name}")
        elif name in BY_OP:
            values[name] = {str(op): stored_speeds.speed_of(speed) for op, speed in value}
        elif name in STARTS:
            values[name] = stored_speeds.time_of(value)
        else:
            values[name] = stored_speeds.speed_of(value)
    return MachineSpeed(**values)
