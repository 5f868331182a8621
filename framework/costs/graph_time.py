"""Estimates the time of a traced graph, op by op, from speeds that were measured on this machine.

The speeds are those of one core, or of all cores if one op at a time uses them.

    product                 operations / rate at its operations per byte, plus its tensors, and
                            the copies that an Einsum makes of them: bytes / bandwidth at the
                            distance, which is small for the copy itself
    convolution             operations / rate at its operations per byte, or its tensors, whichever
                            is longer; the operations are those for whole vectors of channels
    depthwise convolution   operations / rate at its operations per byte
    copy                    bytes read and written / bandwidth
    gradient of a slice     its tensors, and the elements of the slice / rate at the dims
    cross-entropy           elements / rate
    running sum             elements / rate
    Fourier transform       elements times the binary logarithm of their number / rate
    exponential, power, …   elements / rate of this function, or its tensors, whichever is longer
    op that repeats an      elements / rate, or its tensors, whichever is longer
    input (broadcast)
    other                   its tensors
    a tensor                bytes / bandwidth at the distance of its uses: tensor_reuse.py
    cluster of XLA          its inputs and outputs, and its loops; a loop takes the time of its
                            tensors, or of the elements of its ops, whichever is longer
    product in a loop of    operations / rate at its rows (columns, if the matrix is on the left),
    a cluster               which is lower if 8 does not divide them; or the bytes of its matrix /
                            bandwidth for a matrix that every iteration reads, whichever is longer
    every op                plus the time of an op that does nothing

A product or convolution of fewer operations per byte than were measured computes at the rate of
the fewest that were measured, because its tensors count apart: a filter of one pixel is multiplied
as fast as others. A depthwise convolution, whose tensors do not count apart, is limited by its
bytes: its rate falls with them.

The kernel of a convolution keeps a vector of channels in a register. If there are fewer channels
than it has numbers, or the last vector is not full, the rest of it is computed for nothing: an
image of 3 channels takes as long as one of 16 with AVX-512. The channels are those of the result in
one group, and of a filter's gradient the last ones of the filter.

TensorFlow hands an op to another thread only if it takes more than some microseconds. So of graphs
that run side by side, long ops run at the same time, and short ones one after the other.

The body of a loop counts once per iteration. Ops without a path to an output do not count.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tekso.framework.costs import einsum_copies, executor, graph_walks, graph_work, op_kinds
from tekso.framework.costs.equal_ops import Merged
from tekso.framework.costs.executor import TimedOps
from tekso.framework.costs.graph_clusters import ClusterLoop, CompiledCluster
from tekso.framework.costs.tensor_reuse import Move, distances
from tekso.framework.costs.this_machine import MachineSpeed, filled, rate

_VECTOR = 8  # rows or columns that XLA computes at once
_SIMPLE_POWERS = (-1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0)  # Grappler replaces them
_WITH_RATES = op_kinds.MATRIX_PRODUCTS | op_kinds.CONVOLUTIONS | op_kinds.FILTER_GRADIENTS
Uses = Sequence[tuple[float, float]]
"""[(bytes, distance)] of the tensors of an op; see tensor_reuse.py."""


def seconds(graph: Any, machine: MachineSpeed, *, between: float = 0.0) -> float:
    """Returns the estimated time of all ops of a graph, one after the other."""
    return math.fsum(op_seconds(graph_walks.needed(graph), machine, between=between).values())


def op_seconds(
    ops: Sequence[Any], machine: MachineSpeed, *, between: float = 0.0
) -> dict[str, float]:
    """Returns {name: estimated time} of ops of a graph, which run one after the other.

    Args:
      ops: the ops.
      machine: the speeds.
      between: bytes that other graphs move from one run of this one to the next.
    """
    works = [work for op in ops for work in _works(op)]
    uses = distances([work.move for work in works], between=between)
    found = {op.name: 0.0 if op.type in op_kinds.INSTANT else machine.op_s for op in ops}
    for work, each in zip(works, uses, strict=True):
        found[work.op.name] += work.seconds(machine, each)
    for op in ops:
        if graph_walks.is_cluster(op, graph_work.inside(op)[1]):
            arguments = len(op.inputs) + len(op.outputs)
            found[op.name] += machine.cluster_s + arguments * machine.argument_s - machine.op_s
    return found


def moved_by_others(graphs: Sequence[tuple[int, Any]]) -> list[float]:
    """Returns for each graph of a step the bytes that the others move in a step.

    Args:
      graphs: [(number of runs in a step, graph)].
    """
    moved = [times * moved_bytes(graph) for times, graph in graphs] if len(graphs) > 1 else [0.0]
    return [math.fsum(moved) - own for own in moved]


def of_runs(
    price: Callable[..., float], graph: Any, machine: MachineSpeed, *, runs: int, between: float
) -> float:
    """Returns the price of all runs of a graph in a step.

    The first run finds in the caches what other graphs left, the next ones what the graph did.

    Args:
      price: `seconds` or `short_seconds`.
      graph: the graph.
      machine: the speeds.
      runs: number of runs.
      between: bytes that other graphs move before the first run.
    """
    first = price(graph, machine, between=between)
    return first + (runs - 1) * price(graph, machine) if runs > 1 else first


def short_seconds(graph: Any, machine: MachineSpeed, *, between: float = 0.0) -> float:
    """Returns the time of the ops of a graph that are too short for a thread of their own.

    A loop is short if no op of an iteration is long: the thread that starts it runs all of it.
    """
    found, ops = 0.0, graph_walks.needed(graph)
    of_op = op_seconds(ops, machine, between=between)
    for op in ops:
        time = of_op[op.name]
        times, inner = graph_work.inside(op)
        if inner and not graph_walks.is_cluster(op, inner):
            short = machine.op_s + times * max(short_seconds(one, machine) for one in inner)
            found += short if math.isclose(short, time, rel_tol=1e-3) else 0.0
        elif time < executor.SHORT_S:
            found += time
    return found


def elapsed_seconds(
    graph: Any, machine: MachineSpeed, *, cores: int, between: float = 0.0
) -> float:
    """Returns the time of a graph whose ops run side by side, one on each core."""
    ops = graph_walks.needed(graph)
    seconds_of = op_seconds(ops, machine, between=between)
    return executor.elapsed_seconds([TimedOps(ops, Merged({}), seconds_of)], threads=cores)


class _Work(NamedTuple):
    """An op, an op with graphs of its own, or a loop of a cluster."""

    op: Any  # of the graph
    move: Move
    seconds: Callable[[MachineSpeed, Uses], float]
    """Time, without starting the op."""


def _works(op: Any) -> Iterator[_Work]:
    times, inner = graph_work.inside(op)
    if graph_walks.is_cluster(op, inner):
        names = _outer_names(op, inner[0])
        for loop in CompiledCluster(inner[0]).loops:
            yield _loop_work(loop, op, lambda name: names.get(name, f"{op.name}/{name}"))
    elif inner:
        moved = max(map(moved_bytes, inner))
        yield _Work(
            op,
            _move(op).by_others(times * moved),
            lambda machine, _: times * max(seconds(one, machine) for one in inner),
        )
    elif op.type in op_kinds.COLLECTIVES:
        yield _Work(op, _move(op), lambda *_: 0.0)  # mesh_time.py has its time
    elif op.type not in op_kinds.INSTANT and not graph_work.shared_inputs(op):
        yield _Work(op, _move(op), functools.partial(_plain_seconds, op))


def _move(op: Any) -> Move:
    reads = [(graph_work.root(t).name, _read_bytes(op, t)) for t in op.inputs]
    return Move(reads, [(t.name, graph_work.size_bytes(t)) for t in op.outputs])


def _outer_names(op: Any, graph: Any) -> dict[str, str]:
    """Returns {tensor in the graph of a cluster: tensor of the graph that it is part of}."""
    outer = [graph_work.root(t).name for t in op.inputs]
    names = {t.name: name for t, name in zip(graph.inputs, outer, strict=False)}
    for inside, outside in zip(graph.outputs, op.outputs, strict=False):
        names.setdefault(graph_work.root(inside).name, outside.name)
    return names


def _loop_work(
    loop: ClusterLoop, op: Any, name_of: Callable[[str], str], *, repeated: bool = False
) -> _Work:
    """Returns the work of a loop of a cluster, or of an iteration of a loop over time in one."""
    times, inner = graph_work.inside(loop.op)
    reads, writes = ([(name_of(n), size) for n, size in each] for each in loop.move[:2])
    move = Move(reads, writes)
    if inner:
        move = move.by_others(times * max(moved_bytes(one, in_cluster=True) for one in inner))

    def time(machine: MachineSpeed, uses: Uses) -> float:
        computing = loop.elements / machine.cluster_elements_per_s
        for kind, elements in loop.functions.items():
            speed = machine.cluster_functions.get(kind, machine.cluster_functions_per_s)
            computing += elements / speed
        computing += loop.sums / machine.cluster_sums_per_s
        computing += loop.column_sums / machine.cluster_column_sums_per_s
        if inner:
            repeats = repeated or loop.op.type in op_kinds.LOOPS
            every = (_loops_seconds(one, machine, repeated=repeats) for one in inner)
            return computing + times * max(every)
        start = machine.loop_s if repeated else 0.0
        if repeated and loop.op.type in op_kinds.MATRIX_PRODUCTS:
            return start + computing + _loop_product_seconds(loop.op, machine)
        if loop.op.type in _WITH_RATES:
            return start + computing + _plain_seconds(loop.op, machine, uses)
        return start + max(computing, _moving_seconds(uses, machine.cluster_streams))

    return _Work(op, move, time)


def _loop_product_seconds(op: Any, machine: MachineSpeed) -> float:
    """Returns the time of a product with a matrix that every iteration of a loop reads."""
    left, right = map(graph_work.size_bytes, op.inputs)
    matrix = max(left, right)
    points = machine.loop_products_left if left > right else machine.loop_products_right
    # The matrix has as many elements as the product has operations for each row, halved.
    flops = graph_work.op_flops(op)
    rows = flops * op.inputs[0].dtype.size / (2 * max(matrix, 1))
    is_full = rows % _VECTOR == 0  # otherwise XLA computes the last ones one by one
    points = [point for point in points if (point[0] % _VECTOR == 0) == is_full] or points
    return max(flops / rate(points, rows), matrix / rate(machine.loop_matrices, matrix))


def _loops_seconds(graph: Any, machine: MachineSpeed, *, repeated: bool) -> float:
    """Returns the time of the loops of a graph in a cluster, for a loop: of an iteration."""
    works = _inner_works(graph, repeated=repeated)
    uses = distances([work.move for work in works])
    return math.fsum(work.seconds(machine, each) for work, each in zip(works, uses, strict=True))


def _inner_works(graph: Any, *, repeated: bool) -> list[_Work]:
    loops = CompiledCluster(graph).loops
    return [_loop_work(loop, loop.op, str, repeated=repeated) for loop in loops]


def moved_bytes(graph: Any, *, in_cluster: bool = False) -> float:
    """Returns the bytes that the ops of a graph read and write."""
    if in_cluster:
        works = _inner_works(graph, repeated=False)
    else:
        works = [work for op in graph_walks.needed(graph) for work in _works(op)]
    return math.fsum(work.move.bytes + work.move.others for work in works)


def _plain_seconds(op: Any, machine: MachineSpeed, uses: Uses) -> float:
    """Returns the time of an op without graphs of its own, without its start."""
    if op.type in op_kinds.MATRIX_PRODUCTS:
        is_of_batch = op.type in op_kinds.BATCH_PRODUCTS
        points = machine.batch_products if is_of_batch else machine.products
        copying, uses = _copying(op, machine, uses)
        return (
            machine.product_s
            + _moving_seconds(uses, machine.streams)
            + graph_work.op_flops(op) / rate(points, _intensity(op))
            + copying
        )
    if op.type in op_kinds.CONVOLUTIONS | op_kinds.FILTER_GRADIENTS:
        return machine.convolution_s + _convolving_seconds(op, machine, uses)
    if op.type in op_kinds.SLICE_GRADIENTS:
        copied, made = graph_work.size(op.inputs[-1]), op.outputs[0]
        if copied == graph_work.size(made):  # TensorFlow copies a slice that is the whole tensor
            return _moving_seconds(uses, machine.streams)
        speed = rate(machine.slice_gradients, made.shape.rank or 1)
        return _moving_seconds(uses, machine.streams) + copied / speed
    if op.type in op_kinds.CROSS_ENTROPIES:
        return graph_work.size(op.inputs[0]) / machine.cross_entropies_per_s
    if op.type in op_kinds.RUNNING_SUMS:
        return _elements(op.outputs) / machine.running_sums_per_s
    if op.type in op_kinds.TRANSFORMS:
        return _transformed(op) / machine.transforms_per_s
    if op.type in op_kinds.COPIES:
        return _moving_seconds(uses, machine.copy_streams)
    found = _moving_seconds(uses, machine.streams)
    if op.type in op_kinds.FUNCTIONS | machine.functions.keys() and not _is_simple_power(op):
        speed = machine.functions.get(op.type, machine.functions_per_s)
        found = max(found, _elements(op.outputs) / speed)
    if op.type in op_kinds.BROADCASTS and _repeats_an_input(op):
        found = max(found, _elements(op.outputs) / machine.broadcasts_per_s)
    return found


def _is_simple_power(op: Any) -> bool:
    """Returns whether TensorFlow computes a power by products or roots."""
    exponent = tf.get_static_value(op.inputs[1]) if op.type == "Pow" else None
    return exponent is not None and exponent.size == 1 and float(exponent) in _SIMPLE_POWERS


def _transformed(op: Any) -> float:
    """Returns the elements of a Fourier transform, times the binary logarithm of their length."""
    x, y = op.inputs[0], op.outputs[0]
    dims = {"2D": 2, "3D": 3}.get(op.type[-2:], 1)
    # Of a real transform, one side has only half of the frequencies.
    longer = max((x, y), key=graph_work.size)
    length = math.prod(dim or 1 for dim in longer.shape[-dims:].as_list())
    return graph_work.size(longer) * math.log2(max(length, 2))


def _copying(op: Any, machine: MachineSpeed, uses: Uses) -> tuple[float, Uses]:
    """Returns the time of the copies around a product, and the tensors that the product uses.

    The product of an Einsum reads the copy of an input that was just made. It writes a result that
    is copied next.
    """
    if op.type != "Einsum":
        return 0.0, uses
    seconds, of_product = 0.0, list(uses)
    for copy in einsum_copies.copies(op):
        points = machine.turned_streams if copy.turns else machine.copy_streams
        # A loop of a cluster reads a tensor once that is both inputs.
        at = -1 if copy.input is None else min(copy.input, len(uses) - 2)
        near = 2.0 * copy.bytes
        seconds += copy.bytes / rate(points, uses[at][1]) + copy.bytes / rate(points, near)
        of_product[at] = copy.bytes, near
    return seconds, of_product


def _convolving_seconds(op: Any, machine: MachineSpeed, uses: Uses) -> float:
    """Returns the time of a convolution, or a gradient of one, without its start."""
    is_of_filter = op.type in op_kinds.FILTER_GRADIENTS
    if op.type in op_kinds.DEPTHWISE:
        gradients = machine.depthwise_filter_gradients
        points = gradients if is_of_filter else machine.depthwise
        limit = min(1.0, _intensity(op) / points[0][0])
        return graph_work.op_flops(op) / max(rate(points, _intensity(op)) * limit, 1.0)
    points = machine.filter_gradients if is_of_filter else machine.convolutions
    flops = graph_work.op_flops(op)
    computed = flops * filled(graph_work.summed_channels(op), machine.lanes)
    computing = computed / rate(points, _intensity(op))
    return max(computing, _moving_seconds(uses, machine.streams))


def _intensity(op: Any) -> float:
    """Returns the operations of an op per byte of its tensors."""
    return graph_work.op_flops(op) / max(_bytes(op.inputs) + _bytes(op.outputs), 1)


def _repeats_an_input(op: Any) -> bool:
    """Returns whether an op repeats an input that is more than one number."""
    return any(1 < graph_work.size(x) < graph_work.size(op.outputs[0]) for x in op.inputs)


def _moving_seconds(uses: Uses, points: Sequence[tuple[float, float]]) -> float:
    """Returns the time of reading and writing tensors; `points`: [(distance, bytes per second)]."""
    return math.fsum(size / rate(points, distance) for size, distance in uses)


def _read_bytes(op: Any, tensor: Any) -> float:
    read = graph_work.size_bytes(tensor)
    return min(read, _bytes(op.outputs)) if op.type in op_kinds.SLICES else read


def _bytes(tensors: Any) -> float:
    return math.fsum(map(graph_work.size_bytes, tensors))


def _elements(tensors: Any) -> float:
    return float(sum(graph_work.size(t) for t in tensors))
