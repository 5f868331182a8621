"""Tests of the probes that measure the speed of a machine."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
import tensorflow as tf
from sampling import sample
from tensorflow.python.eager import context

from tekso.framework.costs import (
    graph_work,
    kernel_probes,
    machine_probes,
    op_kinds,
    probe_runs,
    this_machine,
)
from tekso.framework.costs.machine_probes import Probes
from tekso.framework.run import convolution_probes, step_probes
from tekso.framework.run.convolution_probes import STACKS


def test_the_time_is_the_median_of_several_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is of as many calls as take long enough."""
    now = [0.0]
    left = [100.0, 100.0, 3.0, 1.0, 1.0, 1.0, 9.0]  # the first two trace and compile

    def call() -> None:
        now[0] += left.pop(0)

    monkeypatch.setattr(probe_runs, "_now", lambda: np.array([now[0], now[0] / 2]))
    assert list(probe_runs._typical(call, (), least_s=2.5)) == [3.0, 1.5]  # of 3, 1 and 9
    assert not left


def test_a_pass_that_was_disturbed_changes_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = [30.0, 29.0, 5.0, 31.0, 29.0, 28.0]
    times = [np.array([1.0 / speed, 0.5 / speed]) for speed in speeds]
    traced: list[str] = []
    measured: list[Any] = []

    def typical(function: Any, inputs: Any, *, least_s: float) -> Any:
        function(*inputs)
        measured.append(function)
        return times.pop(0)

    def note(name: str, x: Any) -> Any:
        traced.append(name)
        return x

    monkeypatch.setattr(probe_runs, "_typical", typical)
    monkeypatch.setattr(Probes, "_call_s", lambda _: np.zeros(2))
    probes = Probes(1)

    def speeds_of_a_pass() -> dict[str, Any]:
        a, b = (probes.seconds(functools.partial(note, name), tf.ones([2])) for name in "ab")
        again = probes.once("a", lambda: a)
        return {"rate": 1.0 / probes.once("a", lambda: b), "points": [(2.0, 1.0 / b)], "a": again}

    found = probes.median_of_passes(speeds_of_a_pass)
    assert list(found["rate"]) == pytest.approx([29.0, 58.0])  # of 30, 5 and 29
    ((at, speed),) = found["points"]
    assert at == 2.0 and list(speed) == pytest.approx([29.0, 58.0])  # of 29, 31 and 28
    assert traced == ["a", "b"]  # by the first pass
    assert measured == 3 * measured[:2]


def test_a_disturbed_measurement_of_a_call_does_not_make_ops_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = np.array([5e-5, 4e-5])
    monkeypatch.setattr(probe_runs, "_typical", lambda function, inputs, least_s: both)
    for call, ops in ((3e-5, (2e-5, 1e-5)), (6e-5, (5e-6, 4e-6))):
        monkeypatch.setattr(Probes, "_call_s", lambda _, call=call: np.array([call, call]))
        assert list(Probes(1).seconds(abs, tf.ones([]))) == pytest.approx(ops)
        assert list(Probes(2).seconds(abs, tf.ones([]))) == pytest.approx([t / 2 for t in ops])


def test_memory_that_is_nearer_is_at_least_as_fast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chains = {1 << 10: 5e-7, 1 << 12: 9e-6, 1 << 14: 12e-6}  # the second one was disturbed
    probes, both = Probes(1), np.ones(2)
    monkeypatch.setattr(machine_probes, "array", lambda n: n)
    monkeypatch.setattr(probes, "of_series", lambda function, x: chains[x] * both)
    monkeypatch.setattr(probes, "of_each", lambda function, a, b, **_: 1e-2 * both)
    found = probes.streams(max, 0.0 * both, 12, list(chains))
    assert [distance for distance, _ in found] == [12 << 10, 12 << 12, 12 << 14, 4 * 12 << 22]
    speeds = [(12 << 10) / 5e-7, (12 << 14) / 12e-6, (12 << 14) / 12e-6, (12 << 22) / 1e-2]
    assert [list(speed) for _, speed in found] == [pytest.approx([s, s]) for s in speeds]
    without = probes.streams(max, 8e-7 * both, 12, [1 << 10])[0][1]  # at least a quarter counts
    assert list(without) == pytest.approx([(12 << 10) / 1.25e-7] * 2)


def test_ops_that_use_all_threads_wait_for_each_other_and_for_small_ops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two at a time would hide that an op waits for its slowest thread, and wakes it."""
    graphs = []

    def trace(self: Any, function: Any, *inputs: Any, **_: Any) -> Any:
        traced = tf.function(function, autograph=False).get_concrete_function(*inputs)
        graphs.append(traced.graph)
        return np.zeros(2)

    monkeypatch.setattr(Probes, "seconds", trace)
    for copies in (1, 2):
        Probes(copies, is_alone=copies == 1).of_each(
            tf.matmul, tf.ones([2, 2]), tf.ones([2, 2]), times=3
        )
    alone, side_by_side = (
        [op for op in graph.get_operations() if op.type == "MatMul"]
        for graph in graphs
        if "MatMul" in {op.type for op in graph.get_operations()}
    )
    assert [op.control_inputs for op in side_by_side] == [[], [], []]

    assert not alone[0].control_inputs
    for op, before in zip(alone[1:], alone, strict=False):
        (pause,) = op.control_inputs
        (small,) = graph_work.inside(pause)[1]
        assert sum(one.type == "Mul" for one in small.get_operations()) == probe_runs._PAUSE_OPS
        reads = pause.inputs[0].op
        while reads.type != "MatMul":  # so the pause is no constant
            reads = reads.inputs[0].op
        assert reads is before


def test_the_tensors_of_a_product_are_those_of_its_gradients_too() -> None:
    both = np.ones(2)
    near_and_far = [(100.0, 1.0 * both), (101.0, 1e-3 * both)]
    seconds = functools.partial(machine_probes._moving_seconds, streams=near_and_far)
    m, k, n = 1, 2, 3
    a, b, y = 4 * m * k, 4 * k * n, 4 * m * n
    near = 3 * (a + b + y)  # y = a b, da = y b^T and db = da^T y move three tensors each
    # In one pair of 132 bytes, only a is used again after more than 100.
    assert list(seconds([m, k, n], 1)) == pytest.approx([(near + 999 * a) / 3] * 2)
    # In ten pairs, a comes from far, b does once, and nine times db is written there.
    few, many = seconds([m, k, n], 10), seconds([4, m, k, n], 10)
    assert list(few) == pytest.approx([(near + 999 * (a + 1.9 * b)) / 3] * 2)
    assert (many > 4 * few).all()


def _all_ops(graph: Any) -> list[Any]:
    """Returns the ops of a graph and of the functions that it calls, as often as it calls them."""
    found = []
    for op in graph.get_operations():
        found += [one for inner in graph_work.inside(op)[1] for one in _all_ops(inner)]
        found.append(op)
    return found


_SIMPLE = ("Mul", "AddV2")
_FUNCTIONS = ("Tanh", "Exp", "Erf")


def test_the_time_of_an_op_is_found_among_those_of_calls_arguments_and_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def typical(function: Any, inputs: Any, *, least_s: float) -> Any:
        """A call takes 5 s, an argument 0.1 s, a product 3 s and a small op 1 s."""
        traced = function.get_concrete_function(*inputs).graph
        types = [op.type for op in _all_ops(traced)]
        small, products = sum(map(types.count, _SIMPLE)), types.count("MatMul")
        return np.full(2, 5.0 + 0.1 * len(traced.inputs) + small + 3.0 * products)

    monkeypatch.setattr(probe_runs, "_typical", typical)
    monkeypatch.setattr(Probes, "_call_s", lambda _: np.full(2, 5.0))
    x = tf.ones([2, 2])
    for copies in (1, 2):
        probes = Probes(copies, is_alone=copies == 1)
        found = [
            (probes.of_nothing(lambda x: x + 1.0, x), 1.0),
            (probes.of_chain(lambda x: x + 1.0, x), 1.0),
            (probes.of_each(tf.matmul, x, x), 3.0),
        ]
        for seconds, expected in found:
            assert list(seconds) == pytest.approx([expected] * 2, rel=0.01)


def test_an_op_beside_a_disturbed_pause_keeps_a_share_of_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or else it would count as one that takes no time, at a speed without limits."""
    probes = Probes(1, is_alone=True)
    monkeypatch.setattr(Probes, "seconds", lambda *_, **__: np.full(2, 16.0))  # 16 pairs
    monkeypatch.setattr(Probes, "_pause_s", lambda _: np.full(2, 5.0))
    monkeypatch.setattr(Probes, "_arguments_s", lambda _: np.zeros(2))
    x = tf.ones([2, 2])
    assert list(probes.of_each(tf.matmul, x, x)) == pytest.approx([0.02, 0.02])


def _ops_that_run(function: Any, x: Any) -> Counter[str]:
    """Returns {type: number} of the ops of a function after TensorFlow has optimized its graph."""
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})
    traced = tf.function(function, autograph=False)
    traced(x)
    context.enable_run_metadata()
    try:
        traced(x)
        graphs = context.export_run_metadata().partition_graphs
    finally:
        context.disable_run_metadata()
    return Counter(node.op for graph in graphs for node in graph.node)


def test_tensorflow_does_not_merge_the_ops_of_a_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    chains: list[tuple[Any, Any]] = []

    def note(self: Any, function: Any, x: Any, **_: Any) -> Any:
        chains.append((function, x))
        return np.ones(2)

    def note_series(self: Any, function: Any, x: Any) -> Any:
        chains.append((lambda pair: (pair[1], function(pair[1], pair[0])), (x, x * 1.5)))
        return np.ones(2)

    monkeypatch.setattr(Probes, "compiled", lambda self, one: tf.identity)  # by XLA, as it is
    monkeypatch.setattr(Probes, "of_series", note_series)
    monkeypatch.setattr(Probes, "of_chain", note)
    monkeypatch.setattr(Probes, "of_nothing", note)
    monkeypatch.setattr(Probes, "of_each", lambda *_, **__: np.ones(2))
    monkeypatch.setattr(Probes, "seconds", lambda *_: np.ones(2))
    monkeypatch.setattr(Probes, "_convolutions", lambda _: {})
    Probes(1).speeds()
    before = tf.config.optimizer.get_experimental_options()
    try:
        _ops_that_run(tf.negative, tf.ones([2]))  # the first metadata may be empty
        for function, x in chains:
            once = tf.function(function, autograph=False).get_concrete_function(x).graph
            types = [op.type for op in once.get_operations() if op.type != "Placeholder"]
            found = _ops_that_run(probe_runs.chain(function, 4), x)
            for kind in set(types) & {"Mul", "AddV2", "Sub"}:
                assert found[kind] == 4 * types.count(kind), (kind, x, found)
    finally:
        tf.config.optimizer.set_experimental_options(before)


@pytest.mark.parametrize("cores", sample([1, 2, 64], quick=[1, 64]))
def test_all_speeds_are_measured_on_any_number_of_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int
) -> None:
    for name in ("of_chain", "of_series", "of_nothing", "of_each", "seconds"):
        monkeypatch.setattr(Probes, name, lambda *_, **__: np.ones(2))
    monkeypatch.setattr(machine_probes, "_LARGER_ARRAYS", (1 << 17,))
    monkeypatch.setattr(machine_probes, "_LARGER", (8,))
    side_by_side, alone = (
        machine_probes._probes(kind, cores).speeds().keys() for kind in ("side_by_side", "alone")
    )
    fields = {field.name for field in dataclasses.fields(this_machine.MachineSpeed)}
    assert fields == side_by_side | set(this_machine.STARTS)
    of_steps = convolution_probes.speeds_of([2.0] * len(STACKS), [1.0] * len(STACKS))
    assert fields == alone | set(this_machine.STARTS) | of_steps.keys()


def test_a_copy_of_what_was_just_written_is_at_least_as_fast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("of_chain", "of_each"):
        monkeypatch.setattr(Probes, name, lambda *_, **__: np.ones(2))
    monkeypatch.setattr(
        Probes, "of_series", lambda self, f, x: (1.0 if f is tf.subtract else 9.0) * np.ones(2)
    )
    found = kernel_probes.speeds(Probes(1))
    for name in ("copy_streams", "turned_streams"):
        (_, near), (_, far) = found[name]
        assert list(near) == list(far)


def test_the_speeds_of_a_machine_follow_from_the_times_of_its_ops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simple, function, row_sum, column_sum = 1e-9, 1e-7, 1e-6, 2e-6
    copied, cached = 1e-10, 2e-11
    both = np.ones(2)

    def of_series(self: Any, called: Any, x: Any) -> Any:
        traced = tf.function(called, autograph=False).get_concrete_function(x, x).graph
        types = Counter(op.type for op in traced.get_operations())
        copies = types["Transpose"] + types["Einsum"]
        seconds = simple * types["Sub"] + 8 * cached * copies
        return graph_work.size(x) * seconds * both

    def of_chain(self: Any, called: Any, x: Any) -> Any:
        traced = tf.function(called, autograph=False).get_concrete_function(x).graph
        ops = [op for op in _all_ops(traced) if op.outputs and op.type not in ("Placeholder",)]
        numbers = {one: graph_work.size(x) for one in _SIMPLE + _FUNCTIONS}
        times = dict.fromkeys(_SIMPLE, simple) | dict.fromkeys(_FUNCTIONS, function)
        found = sum(times[op.type] * numbers[op.type] for op in ops if op.type in times)
        for op in ops:
            if op.type == "Sum":
                rows = op.outputs[0].shape[0] == x.shape[0]
                found += graph_work.size(x) * (row_sum if rows else column_sum)
        return found * both

    nothing: Any = {"streams": [], "_products": []}
    for name, value in nothing.items():
        monkeypatch.setattr(Probes, name, lambda *_, value=value: value)
    monkeypatch.setattr(Probes, "compiled", lambda self, one: tf.function(one, autograph=False))
    monkeypatch.setattr(Probes, "of_nothing", lambda *_: 0.0 * both)
    monkeypatch.setattr(Probes, "of_chain", of_chain)
    monkeypatch.setattr(Probes, "of_series", of_series)
    monkeypatch.setattr(
        Probes, "of_each", lambda self, one, a, b, **_: copied * 2 * 4 * graph_work.size(b) * both
    )
    monkeypatch.setattr(Probes, "seconds", lambda self, one, x, w: 32 * 1e-3 * both)
    found = Probes(1).speeds()
    assert list(found["functions_per_s"]) == pytest.approx([1 / function] * 2)
    assert list(found["broadcasts_per_s"]) == pytest.approx([1 / simple] * 2)
    for name in ("copy_streams", "turned_streams"):
        (near, of_near), (far, of_far) = found[name]
        assert near < far and list(of_far) == pytest.approx([1 / copied] * 2)
        assert list(of_near) == pytest.approx([1 / cached] * 2)
    assert [dims for dims, _ in found["slice_gradients"]] == [2, 3, 4, 5, 6]
    for _, speed in found["slice_gradients"]:
        assert list(speed) == pytest.approx([1 / (8 * copied)] * 2)
    assert list(found["cross_entropies_per_s"]) == pytest.approx([1 / (8 * copied)] * 2)
    functions, of_clusters = (dict(found[name]) for name in ("functions", "cluster_functions"))
    assert list(functions["Erfc"]) == pytest.approx([1 / (8 * copied)] * 2, rel=1e-3)
    assert functions["RandomUniform"] is functions["StatelessRandomUniformV2"]
    # Less the cluster without a function, but at least a fifth.
    assert list(of_clusters["Cos"]) == pytest.approx([1 / (8 * copied) / 0.2] * 2)
    assert list(found["running_sums_per_s"]) == pytest.approx([1 / (8 * copied)] * 2)
    assert list(found["transforms_per_s"]) == pytest.approx([9 / (8 * copied)] * 2)  # of 2^9
    assert list(found["cluster_elements_per_s"]) == pytest.approx([1 / simple] * 2)
    # Less the two simple ops of the cluster without them.
    assert list(found["cluster_functions_per_s"]) == pytest.approx([1 / function] * 2, rel=0.01)
    assert list(found["cluster_sums_per_s"]) == pytest.approx([1 / row_sum] * 2, rel=0.01)
    assert list(found["cluster_column_sums_per_s"]) == pytest.approx([1 / column_sum] * 2, rel=0.01)
    # 32 iterations of a product, and of matrices of 512, 1024 and 2048 rows.
    for side in ("left", "right"):
        rows, speeds = zip(*found[f"loop_products_{side}"], strict=True)
        assert rows == (2, 8, 12, 16)
        assert [list(speed) for speed in speeds] == [
            pytest.approx([2 * count * 512**2 / 1e-3] * 2) for count in rows
        ]
    assert [size for size, _ in found["loop_matrices"]] == [1 << 20, 1 << 22, 1 << 24]
    assert [speed[0] * 1e-3 for _, speed in found["loop_matrices"]] == pytest.approx(
        [1 << 20, 1 << 22, 1 << 24]
    )


def test_rates_of_products_and_convolutions_are_those_of_a_machine_with_such_rates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = np.ones(2)
    monkeypatch.setattr(machine_probes, "_moving_seconds", lambda *_: 2e-9 * both)
    probes = Probes(1)
    # [batch, 4, 6] x [batch, 6, 8] and the two products of its gradients.
    monkeypatch.setattr(
        probes,
        "of_each",
        lambda one, a, b, **_: 3 * (1e-9 + 2e-9 + 5 * 2 * 4 * 6 * 8 / 1e11) * both,
    )
    ((intensity, speed),) = probes._products([(5, 4, 6, 8)], 1e-9 * both, [])
    assert intensity == pytest.approx(2 * 4 * 6 * 8 / (4 * (4 * 6 + 6 * 8 + 4 * 8)))
    assert list(speed) == pytest.approx([1e11] * 2)

    # 3 x 3 convolutions of 2 images of 4 x 4 pixels, of 3 and 5 channels.
    flops = 2 * (2 * 4 * 4 * 5) * (3 * 3 * 3)
    times = [2 * (1e-9 + flops / 1e11) * both, (1e-9 + flops / 5e10) * both]
    monkeypatch.setattr(machine_probes, "_CONVOLUTIONS", ((2, 4, 3, 5),))
    monkeypatch.setattr(probes, "of_each", lambda one, a, b: times.pop(0))
    monkeypatch.setattr(probes, "of_nothing", lambda one, x: 1e-9 * both)
    monkeypatch.setattr(probes, "_lanes", lambda _: both)
    found = probes._convolutions()
    ((at, forward),), ((_, backward),) = found["convolutions"], found["filter_gradients"]
    assert at == pytest.approx(flops / (4 * (2 * 4 * 4 * 3 + 2 * 4 * 4 * 5 + 3 * 3 * 3 * 5)))
    assert list(forward) == pytest.approx([1e11] * 2)
    assert list(backward) == pytest.approx([5e10] * 2)


def test_operations_of_convolutions_count_for_whole_vectors_of_channels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    probes = Probes(1)
    vector, ones = 16.0, np.ones(2)

    def of_each(one: Any, a: Any, b: Any) -> Any:
        """Two vectors of channels take twice as long as one, or as a single channel."""
        graph = tf.function(one, autograph=False).get_concrete_function(a, b).graph
        seconds = 0.0
        for op in graph.get_operations():
            if op.type in op_kinds.CONVOLUTIONS | op_kinds.FILTER_GRADIENTS:
                vectors = math.ceil(graph_work.summed_channels(op) / vector)
                part = vectors * vector / graph_work.summed_channels(op)
                seconds += graph_work.op_flops(op) * part / 1e11
        return seconds * ones

    monkeypatch.setattr(probes, "of_each", of_each)
    monkeypatch.setattr(probes, "of_nothing", lambda one, x: 0.0 * ones)
    found = probes._convolutions()
    assert list(found["lanes"]) == [16.0, 16.0]
    for name in ("convolutions", "filter_gradients"):
        assert [speed[0] for _, speed in found[name]] == pytest.approx([1e11] * 5)


@pytest.mark.slow
def test_the_probes_give_plausible_speeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert machine_probes.__name__ == this_machine._PROBES
    assert step_probes.__name__ == this_machine._STEP_PROBES
    assert convolution_probes.__name__ == this_machine._CONVOLUTION_PROBES
    monkeypatch.setattr(this_machine, "_PROBES", "brief_probes")
    monkeypatch.setattr(this_machine, "_STEP_PROBES", "brief_step_probes")
    monkeypatch.setattr(this_machine, "_CONVOLUTION_PROBES", "brief_convolution_probes")
    paths = [str(Path(__file__).parent), os.environ["PYTHONPATH"]]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    # Forks have imported TensorFlow, and LLVM takes longer to optimize than the clusters take.
    monkeypatch.setattr(sys, "executable", processes.interpreter(tmp_path / "python"))
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    machine = this_machine.measured.__wrapped__()
    for found in (machine.side_by_side, machine.alone, machine.alone_cpu):
        assert 1e9 < found.products[-1][1] < 1e13
        assert all(found.products[i][0] < found.products[i + 1][0] for i in range(4))
        assert all(1e7 < speed < 1e14 for _, speed in [*found.streams, *found.cluster_streams])
        assert 1e-8 < found.op_s < 1e-3
        assert 0 <= found.convolution_s < 0.1 and 1e7 < found.broadcasts_per_s < 1e12
        assert all(1e8 < speed < 1e13 for _, speed in found.convolutions)
        loops = (found.loop_products_left, found.loop_products_right, found.loop_matrices)
        assert all(1e8 < speed < 1e13 for points in loops for _, speed in points)
        assert all(1e7 < speed < 1e14 for _, speed in found.copy_streams)
        assert all(1e7 < speed < 1e13 for _, speed in found.turned_streams)
        assert all(1e6 < speed < 1e12 for _, speed in found.slice_gradients)
        assert 1e6 < found.cross_entropies_per_s < 1e12
        rates = (found.running_sums_per_s, found.transforms_per_s)
        functions = [*found.functions.values(), *found.cluster_functions.values()]
        assert all(1e5 < rate < 1e12 for rate in [*rates, *functions])
        assert found.functions["Tanh"] > 3 * found.functions["Betainc"]
    assert 1e-6 < machine.call_s < 0.1
    assert 0 <= machine.array_s < 0.01 and 0 <= machine.variable_s < 0.001
    assert machine.side_by_side.cluster_s + machine.side_by_side.argument_s > 1e-7
