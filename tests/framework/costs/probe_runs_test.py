"""Tests of the probes that measure the speed of a machine."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tekso.framework.costs import graph_work, machine_probes, probe_runs, this_machine
from tekso.framework.costs.machine_probes import Probes
from tekso.framework.run import step_probes


def test_a_measurement_that_no_other_confirms_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    def least(*times: float) -> tuple[float, int]:
        left = [np.array([t, t]) for t in times]
        found = probe_runs._least(lambda: left.pop(0))
        return float(found[0]), len(times) - len(left)

    assert least(3.0, 3.1, 3.2, 0.0) == (3.0, 3)
    assert least(9.0, 3.0, 6.0, 5.0, 3.1, 0.0) == (3.0, 5)  # 3.1 confirms 3.0
    monkeypatch.setattr(probe_runs, "_MOST_REPEATS", 4)
    assert least(9.0, 3.0, 6.0, 5.0, 0.0) == (3.0, 4)


@given(st.integers(0, 2**32 - 1))
def test_disturbed_measurements_change_the_least_by_less_than_a_factor_of_2(seed: int) -> None:
    random = np.random.default_rng(seed)
    factors = list(random.uniform(1.0, 3.0, probe_runs._MOST_REPEATS))
    factors[random.integers(probe_runs._REPEATS)] = 1.0  # others may all be disturbed
    found = probe_runs._least(lambda: np.full(2, 1e-3 * factors.pop(0)))
    assert found.min() >= 1e-3 and found.max() < 2e-3


def test_a_disturbed_measurement_of_a_call_does_not_make_ops_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = np.array([5e-5, 4e-5])
    monkeypatch.setattr(probe_runs, "_mean", lambda function, inputs, least_s: both)
    for call, ops in ((3e-5, (2e-5, 1e-5)), (6e-5, (5e-6, 4e-6))):
        monkeypatch.setattr(probe_runs, "_call_s", lambda call=call: np.array([call, call]))
        assert list(Probes(1).seconds(abs, tf.ones([]))) == pytest.approx(ops)
        assert list(Probes(2).seconds(abs, tf.ones([]))) == pytest.approx([t / 2 for t in ops])


def test_memory_that_is_nearer_is_at_least_as_fast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chains = {1 << 10: 5e-7, 1 << 12: 9e-6, 1 << 14: 12e-6}  # the second one was disturbed
    probes, both = Probes(1), np.ones(2)
    monkeypatch.setattr(machine_probes, "array", lambda n: n)
    monkeypatch.setattr(probes, "of_chain", lambda function, x: chains[x] * both)
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

    def trace(self: Any, function: Any, *inputs: Any) -> Any:
        traced = tf.function(function, autograph=False).get_concrete_function(*inputs)
        graphs.append(traced.graph)
        return np.zeros(2)

    monkeypatch.setattr(Probes, "seconds", trace)
    for copies in (1, 2):
        Probes(copies).of_each(tf.matmul, tf.ones([2, 2]), tf.ones([2, 2]), times=3)
    alone, side_by_side = (
        [op for op in graph.get_operations() if op.type == "MatMul"]
        for graph in graphs
        if "MatMul" in {op.type for op in graph.get_operations()}
    )
    assert [op.control_inputs for op in side_by_side] == [[], [], []]

    assert not alone[0].control_inputs
    for op, before in zip(alone[1:], alone, strict=False):
        (pause,) = op.control_inputs
        (small,) = graph_work.inside(op.graph, pause)[1]
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


@pytest.mark.slow
def test_the_probes_give_plausible_speeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert machine_probes.__name__ == this_machine._PROBES
    assert step_probes.__name__ == this_machine._STEP_PROBES
    monkeypatch.setattr(this_machine, "_PROBES", "brief_probes")
    monkeypatch.setattr(this_machine, "_STEP_PROBES", "brief_step_probes")
    paths = [str(Path(__file__).parent), os.environ["PYTHONPATH"]]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    machine = this_machine.measured.__wrapped__()
    for found in (machine.side_by_side, machine.alone, machine.alone_cpu):
        assert 1e9 < found.products[-1][1] < 1e13
        assert all(found.products[i][0] < found.products[i + 1][0] for i in range(4))
        assert all(1e7 < speed < 1e14 for _, speed in [*found.streams, *found.cluster_streams])
        assert 1e-8 < found.op_s < 1e-3
        assert 1e9 < found.loop_products_per_s < 1e13
        assert all(1e8 < speed < 1e13 for _, speed in found.loop_matrices)
    assert 1e-6 < machine.call_s < 0.1
    assert 0 <= machine.array_s < 0.01 and 0 <= machine.variable_s < 0.001
    assert machine.side_by_side.cluster_s + machine.side_by_side.argument_s > 1e-7
