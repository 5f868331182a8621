"""Threads that run graphs of which all times are known."""

from __future__ import annotations

import random
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import tensorflow as tf

from tekso.framework.costs import executor, graph_memory, step_memory
from tekso.framework.costs.executor import OpEvent, TimedOps
from tekso.framework.costs.graph_memory import Tensors

BYTES = 40_000  # of the result of a product
COUNT = 4


def of_chain(reader: str) -> Any:
    """Returns the graph of a chain of products; another op reads each of their results."""

    def function(x: tf.Tensor, w: tf.Tensor, row: tf.Tensor) -> list[tf.Tensor]:
        read = []
        for _ in range(COUNT):
            before, x = x, x @ w  # the first op that reads `before`
            if reader == "product":
                read.append(row @ before)
            elif reader == "rows":
                read.append(tf.gather(before, [3, 5]))
            else:
                read += tf.raw_ops.ShapeN(input=[before, before])
        return [x, *read]

    specs = [tf.TensorSpec(shape) for shape in ([100, 100], [100, 100], [1, 100])]
    return tf.function(function, autograph=False).get_concrete_function(*specs).graph


def timed(tensors: Tensors, *, of_reader: float = 1.0) -> TimedOps:
    """Returns ops: a product of the chain takes a second, one that reads a result `of_reader`."""

    def seconds(op: Any) -> float:
        if op.type != "MatMul":
            return 0.0
        return 1.0 if op.outputs[0].shape == [100, 100] else of_reader

    times = {op.name: seconds(op) for op in tensors.ops}
    collectives = executor.collectives_of(tensors.ops)
    return TimedOps(tensors.ops, tensors.merged, times, collectives)


def held(ops: list[OpEvent], tensors: Tensors) -> float:
    """Returns how many results of the chain of one graph exist at once."""
    run, sizes, most = tensors.run(), {}, 0.0
    for _, op, ends in ops:
        if ends:
            for name in run.end(op):
                sizes.pop(name, None)
        else:
            sizes |= run.begin(op).takes
            most = max(most, sum(sizes.values()))
    return most / BYTES


def results(reader: str, *, graphs: int, threads: int, of_reader: float = 1.0) -> float:
    tensors = graph_memory.tensors_of(of_chain(reader), least=1000)
    ops = [timed(tensors, of_reader=of_reader)] * graphs
    events = executor.events(ops, threads=threads, chance=random.Random(0))
    return held([event for event in events if event.graph == 0], tensors)


def test_a_thread_ends_a_chain_of_products_before_it_runs_the_other_readers() -> None:
    assert results("product", graphs=1, threads=1) == COUNT


@pytest.mark.parametrize("reader", ["rows", "shapes"])
def test_a_thread_runs_short_readers_at_once(reader: str) -> None:
    assert results(reader, graphs=1, threads=1) == 2


@pytest.mark.parametrize(("seconds", "stays"), [(1e-6, True), (5e-6, False)])
def test_only_its_time_decides_whether_an_op_stays_on_a_thread(seconds: float, stays: bool) -> None:
    """Also of a tensor of a few bytes."""
    graph = tf.function(lambda x: x[2:5] * x[0]).get_concrete_function(tf.TensorSpec([8])).graph
    tensors = graph_memory.tensors_of(graph)
    ops = TimedOps(tensors.ops, tensors.merged, {op.name: seconds for op in tensors.ops})
    found = {op.name in ops.staying for op in tensors.ops if op.type in ("Mul", "StridedSlice")}
    assert found == {stays}


def test_an_idle_thread_runs_the_readers_meanwhile() -> None:
    """If they take as long as the chain; if they take longer, they fall behind."""
    assert results("product", graphs=1, threads=2, of_reader=0.9) == 2
    assert results("product", graphs=1, threads=2, of_reader=5.0) == COUNT


def test_threads_that_are_busy_with_other_graphs_run_no_readers() -> None:
    assert results("product", graphs=2, threads=2) == COUNT
    assert results("product", graphs=2, threads=4, of_reader=0.9) == 2


def test_a_busy_thread_runs_the_gradient_of_a_filter_before_that_of_the_input() -> None:
    """So a saved activation is free before the gradient of the next one exists."""

    def function(x: tf.Tensor, *filters: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch((x, *filters))
            y = x
            for w in filters:
                y = tf.nn.conv2d(y, w, 1, "SAME")
        return tape.gradient(y, [x, *filters])

    specs = [tf.TensorSpec(shape) for shape in ([1, 8, 8, 4], *[[3, 3, 4, 4]] * COUNT)]
    graph = tf.function(function, autograph=False).get_concrete_function(*specs).graph
    tensors = graph_memory.tensors_of(graph)
    times = {op.name: float("Conv2D" in op.type) for op in tensors.ops}
    ops = TimedOps(tensors.ops, tensors.merged, times)
    events = executor.events([ops], threads=1, chance=random.Random(0))
    kinds = [op.type for _, op, ends in events if ends and "Backprop" in op.type]
    assert kinds == ["Conv2DBackpropFilter", "Conv2DBackpropInput"] * COUNT


def test_an_idle_thread_takes_what_has_waited_longest() -> None:
    tensors = graph_memory.tensors_of(of_chain("product"), least=1000)
    ops = [timed(tensors, of_reader=1.7)]
    events = executor.events(ops, threads=2, chance=random.Random(0))
    begun = [op.name for _, op, ends in events if not ends and op.type == "MatMul"]
    readers = [op.name for op in tensors.ops if op.outputs[0].shape == [1, 100]]
    in_order = [name for name in readers if name in begun]
    assert [name for name in begun if name in readers] == in_order and len(in_order) == COUNT


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(
    st.lists(st.sets(st.integers(1, 6), max_size=3), min_size=1, max_size=14),
    st.lists(st.sampled_from([0.0, 1e-6, 1e-4, 1e-3]), min_size=14, max_size=14),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_every_op_runs_once_after_its_inputs_on_a_thread_of_its_own(
    edges: list[set[int]], times: list[float], threads: int, graphs: int, seed: int
) -> None:
    with tf.Graph().as_default() as graph:
        made: list[tf.Tensor] = []
        for number, back in enumerate(edges):
            given = [made[number - n] for n in back if n <= number]
            made.append(
                tf.raw_ops.AddN(inputs=given) if given else tf.raw_ops.Fill(dims=[2], value=0.0)
            )
    tensors = graph_memory.Tensors(graph, graph.get_operations(), made)
    seconds = {op.name: 0.0 for op in tensors.ops}
    seconds |= {t.op.name: time for t, time in zip(made, times, strict=False)}
    ops = TimedOps(tensors.ops, tensors.merged, seconds)
    running: set[tuple[int, str]] = set()
    ended: set[tuple[int, str]] = set()
    for number, op, ends in executor.events(
        [ops] * graphs, threads=threads, chance=random.Random(seed)
    ):
        key = number, op.name
        if ends:
            running.remove(key)
            ended.add(key)
        else:
            assert key not in ended | running
            assert all((number, tensors.merged.op_name(t.op)) in ended for t in op.inputs)
            running.add(key)
            assert len(running) <= threads
    assert len(ended) == graphs * len(tensors.ops) and not running


def test_devices_that_share_the_threads_hold_more_than_one_with_all_threads() -> None:
    tensors = graph_memory.tensors_of(of_chain("product"), least=1000)
    graph = step_memory.Graph(tensors, timed(tensors, of_reader=0.9))
    alone = step_memory.peak_of_copies(graph, copies=1, threads=2)
    shared = step_memory.peak_of_copies(graph, copies=2, threads=2)
    assert (alone / BYTES, shared / BYTES) == (2, COUNT)


def test_a_collective_ends_when_all_graphs_have_begun_it() -> None:
    """One thread, so one graph begins it long before the other one."""

    def function(x: tf.Tensor) -> tf.Tensor:
        keys = {"group_size": 2, "group_key": 1, "instance_key": 1, "ordering_token": []}
        y = tf.raw_ops.CollectiveReduceV2(input=x @ x, **keys, merge_op="Add", final_op="Id")
        return y @ y

    graph = tf.function(function).get_concrete_function(tf.TensorSpec([100, 100])).graph
    tensors = graph_memory.tensors_of(graph)
    events = executor.events([timed(tensors)] * 2, threads=1, chance=random.Random(0))
    kinds = [
        (op.type, ends) for _, op, ends in events if op.type in ("MatMul", "CollectiveReduceV2")
    ]
    one, other = ("MatMul", False), ("MatMul", True)
    begun, ended = ("CollectiveReduceV2", False), ("CollectiveReduceV2", True)
    assert kinds[:6] == [one, other, begun, one, other, begun]
    assert sorted(kinds[6:]) == sorted([ended, ended, one, other, one, other])
    assert kinds[6] == ended
