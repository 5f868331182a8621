"""Tests of the measured speed of a machine, and of the time of a graph on it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from priced_graphs import POINTS, SLOWER, SPEED, STREAMS, graph

from tekso.framework.costs import (
    executor,
    graph_time,
    reference_work,
    stored_speeds,
    this_machine,
)
from tekso.framework.costs.reference_work import Reference
from tekso.framework.costs.this_machine import ThisMachine, rate
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.run.step_graphs import StepGraphs

OF_REAL_STEPS = ("cluster_s", "argument_s", "loop_s")
"""Times that are measured in real steps only."""
STARTS = {
    "op_s": 10.0, "product_s": 20.0, "cluster_s": 30.0, "convolution_s": 40.0, "argument_s": 50.0,
    "loop_s": 60.0, "call_s": 70.0, "array_s": 80.0, "variable_s": 90.0,
}  # fmt: skip
"""What the probes of real steps print."""


def test_a_rate_lies_between_the_measured_points() -> None:
    assert rate(POINTS, 0.5) == 1e9 and rate(POINTS, 9.0) == 3e9
    assert rate(POINTS, 1.0) == 1e9 and rate(POINTS, 2.5) == pytest.approx(2.5e9)


def test_time_is_the_sum_over_the_ops() -> None:
    found = graph_time.seconds(graph(lambda a, b: a @ b, [10, 20], [20, 30]), SPEED)
    flops, moved = 2 * 10 * 20 * 30, 4 * (200 + 600 + 300)
    assert found == pytest.approx(0.25 + 0.5 + moved / 1e8 + flops / rate(POINTS, flops / moved))
    found = graph_time.seconds(graph(lambda a: tf.exp(a) + a, [1000]), SPEED)
    assert found == pytest.approx((0.25 + 1000 / 1e6) + (0.25 + 12000 / 1e8))
    assert graph_time.seconds(graph(lambda a: (tf.exp(a), a)[1], [1000]), SPEED) == 0  # unused


def test_a_product_with_few_operations_per_byte_computes_at_the_least_rate() -> None:
    found = graph_time.seconds(graph(lambda a, b: a @ b, [1, 100], [100, 50]), SPEED)
    moved = 4 * (100 + 5000 + 50)  # 10,000 operations, half of one per byte
    slow = 10_000 / POINTS[0][1]
    assert found == pytest.approx(0.25 + 0.5 + moved / rate(STREAMS, moved) + slow, rel=1e-9)


def test_an_op_that_repeats_an_input_takes_the_time_of_its_elements() -> None:
    scaled = graph_time.seconds(graph(lambda x, w: x * w, [50, 20], [20]), SPEED)
    assert scaled == pytest.approx(0.25 + 1000 / 2e6)
    of_rows = graph_time.seconds(graph(lambda x, w: w - x, [50, 20], [50, 1]), SPEED)
    assert of_rows == pytest.approx(0.25 + 1000 / 2e6)
    compared = graph_time.seconds(graph(lambda x, w: tf.equal(x, w), [50, 20], [50, 1]), SPEED)
    assert compared == pytest.approx(0.25 + 1000 / 2e6)
    for same in (lambda x, w: x * 2.0, lambda x, w: x * x, lambda x, w: x + tf.zeros([])):
        assert graph_time.seconds(graph(same, [50, 20], [20]), SPEED) < 0.25 + 13000 / 1e8


def test_many_small_products_have_their_own_rate() -> None:
    found = graph_time.seconds(graph(lambda a, b: a @ b, [5, 10, 20], [5, 20, 30]), SPEED)
    flops, moved = 5 * 2 * 10 * 20 * 30, 5 * 4 * (200 + 600 + 300)
    moving = moved / rate(STREAMS, moved)
    assert found == pytest.approx(0.25 + 0.5 + moving + flops / rate(SLOWER, flops / moved))


def test_a_convolution_has_its_own_fixed_time_and_the_rate_for_its_operations_per_byte() -> None:
    convolve = graph(lambda x, w: tf.nn.conv2d(x, w, 1, "SAME"), [2, 8, 8, 1], [3, 3, 1, 4])
    flops, moved = 2 * (2 * 8 * 8 * 4) * 9, 4 * (2 * 8 * 8 * 5 + 9 * 4)
    found = graph_time.seconds(convolve, dataclasses.replace(SPEED, streams=[(1.0, 1e12)]))
    assert found == pytest.approx(0.25 + 3.0 + flops / rate(POINTS, flops / moved))


def test_long_attention_takes_the_time_of_streams_from_memory() -> None:
    """An elementwise op on 3 x 64 x 64 attention weights, and a cluster."""
    moved = 2 * 4 * 3 * 64 * 64  # read and written: beyond the largest measured stream
    found = graph_time.seconds(graph(lambda x: x * x, [3, 64, 64]), SPEED)
    assert found == pytest.approx(0.25 + 1.5 * moved / 5e7)  # an operand is read twice
    softmax, doubled = (
        tf.function(function, jit_compile=True, autograph=False)
        for function in (lambda x: tf.exp(x * 2.0), lambda x: x * 2.0)
    )
    found = graph_time.seconds(graph(lambda x: softmax(x), [3, 64, 64]), SPEED)
    assert found == pytest.approx(2.0 + 3 * 64 * 64 * (1 / 1e6 + 1 / 1e9))  # the exponentials
    found = graph_time.seconds(graph(lambda x: doubled(x), [3, 64, 64]), SPEED)
    assert found == pytest.approx(2.0 + moved / 5e7)
    half = graph_time.seconds(graph(lambda x: x + 1.0, [3750]), SPEED)
    assert half == pytest.approx(0.25 + 30004 / rate(STREAMS, 30004))  # between the two


def test_ops_that_pick_elements_read_as_many_as_they_write() -> None:
    for pick in (
        lambda x: tf.gather_nd(x, [[7], [8]]),
        lambda x: tf.gather(x, [7, 8]),
        lambda x: x[7:9],
    ):
        made = graph(pick, [1000, 50])
        moved = graph_time.moved_bytes(made)
        assert 2 * 400 <= moved <= 2 * 400 + 3 * 8  # and at most three pairs of indices
        assert graph_time.seconds(made, SPEED) == pytest.approx(0.25 + moved / 1e7)


def test_a_loop_counts_once_per_iteration() -> None:
    def looped(x: tf.Tensor) -> tf.Tensor:
        return tf.while_loop(
            lambda i, x: i < 7, lambda i, x: (i + 1, x @ x), (0, x), maximum_iterations=7
        )[1]

    once = graph_time.seconds(graph(lambda x: x @ x, [20, 20]), SPEED)
    found = graph_time.seconds(graph(looped, [20, 20]), SPEED)
    assert 7 * once < found < 7 * once + 20 * 7 * 0.25


def test_ops_that_do_not_depend_on_each_other_run_on_several_cores() -> None:
    whole = graph(lambda a, b: (a @ a @ a, b @ b), [100, 100], [100, 100])
    one = graph_time.seconds(graph(lambda a: a @ a, [100, 100]), SPEED)
    for cores, expected in ((1, 3 * one), (2, 2 * one), (5, 2 * one)):
        found = graph_time.elapsed_seconds(whole, SPEED, cores=cores)
        assert found == pytest.approx(expected)


def test_a_short_op_runs_on_the_core_of_its_input() -> None:
    fast = dataclasses.replace(SPEED, op_s=1e-6, product_s=0.0, streams=[(1.0, 1e15)])
    both = graph(lambda a: (tf.negative(a @ a), tf.abs(a @ a)), [100, 100])  # two products
    split = graph(lambda a: [f(y) for y in [a @ a] for f in (tf.negative, tf.abs)], [100, 100])
    one = graph_time.seconds(graph(lambda a: a @ a, [100, 100]), fast)
    assert one > 1e-4
    found = [graph_time.elapsed_seconds(g, fast, cores=2) for g in (both, split)]
    assert found == pytest.approx([one + 1e-6, one + 2e-6], rel=1e-5)


def test_short_ops_of_parallel_graphs_run_one_after_the_other() -> None:
    fast = dataclasses.replace(SPEED, op_s=1e-6, product_s=0.0)
    machine = ThisMachine(fast, SPEED, SPEED, call_s=0.5, array_s=0.25, variable_s=0.125)
    tower = graph(lambda a: tf.reduce_sum(tf.abs(tf.negative(a @ a))), [100, 100])
    # The product takes 7e-4 s, each of the three other ops 1e-6 s.
    short = graph_time.short_seconds(tower, dataclasses.replace(fast, streams=[(1.0, 1e15)]))
    assert short == pytest.approx(3e-6, rel=0.1)
    graphs = StepGraphs(
        2, 1, tower, graph(lambda a: -a, [4]), [], variables=8, arrays=3, uses_all_threads=False
    )
    one = graph_time.seconds(tower, fast)
    update = graph_time.seconds(graphs.update, fast)
    step, of_cores, of_calls = graphs.step_time(machine)
    assert of_calls == 0.5 + 3 * 0.25 + 8 * 0.125
    assert of_cores == pytest.approx(2 * one + update + of_calls)
    assert step == pytest.approx(one + graph_time.short_seconds(tower, fast) + update + 2.25)
    alone = dataclasses.replace(graphs, towers=1, uses_all_threads=True)
    assert alone.step_time(machine).seconds > graph_time.seconds(tower, SPEED)
    cpu = dataclasses.replace(SPEED, op_s=1.0)  # 0.75 s more for each of 5 ops
    found = alone.step_time(dataclasses.replace(machine, alone_cpu=cpu))
    assert found.core_seconds - found.seconds == pytest.approx(5 * 0.75)


def test_the_update_moves_bytes_between_two_steps_and_not_between_their_parts() -> None:
    near, far = 1e9, 1e-3  # bytes/s, of what is used again after 100 others and after more
    speed = dataclasses.replace(SPEED, op_s=0.0, streams=[(100.0, near), (101.0, far)])
    machine = ThisMachine(speed, speed, speed, call_s=0.0, array_s=0.0, variable_s=0.0)
    tower, update = (graph(lambda x: -x, [size]) for size in (2, 3))
    graphs = StepGraphs(2, 3, tower, update, [], variables=0, arrays=0, uses_all_threads=False)
    found = dataclasses.replace(graphs, parts=1).step_time(machine)
    assert found == pytest.approx((56 / near, 56 / near, 0.0))  # all ops are short
    # An update of 200 bytes: the first part of a step reads and writes memory, and is not short.
    large = dataclasses.replace(graphs, update=graph(lambda x: -x, [25]))
    found = large.step_time(machine)
    assert found.seconds == pytest.approx(16 / far + 2 * 16 / near + 2 * 16 / near + 200 / far)
    assert found.core_seconds == pytest.approx(2 * (16 / far + 2 * 16 / near) + 200 / far)


def test_a_loop_whose_ops_are_all_short_is_short_however_long_it_runs() -> None:
    fast = dataclasses.replace(SPEED, op_s=1e-6, product_s=0.0, streams=[(1.0, 1e15)])

    def looped(function: Any) -> Any:
        def run(x: tf.Tensor) -> tf.Tensor:
            return tf.while_loop(
                lambda i, _: i < 7, lambda i, x: (i + 1, function(x)), (0, x), maximum_iterations=7
            )[1]

        return graph(run, [100, 100])

    short, long = looped(tf.negative), looped(lambda x: x @ x)
    assert graph_time.seconds(short, fast) > executor.SHORT_S
    assert graph_time.short_seconds(short, fast) == graph_time.seconds(short, fast)
    assert graph_time.short_seconds(long, fast) == 0.0


def test_the_speed_is_that_of_four_programs_and_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls: list[str] = []

    def run(module: str, *args: str) -> Any:
        calls.append(module)
        speed = {k: v for k, v in dataclasses.asdict(SPEED).items() if k not in OF_REAL_STEPS}
        if "step_probes" in module:
            return STARTS
        if "convolution_probes" in module:
            return {kind: {"convolution_s": at} for kind, at in (("cpu", 45.0), ("elapsed", 35.0))}
        return json.loads(json.dumps({"cpu": speed, "elapsed": {**speed, "op_s": 15.0}}))

    monkeypatch.setattr(stored_speeds, "printed_by", run)
    monkeypatch.setattr(stored_speeds, "_read", {})
    monkeypatch.setattr(stored_speeds, "_reference", lambda: Reference(1.0, 1.0))
    monkeypatch.setattr(reference_work, "measure", lambda: Reference(1.0, 1.0))
    measure = this_machine.measured.__wrapped__
    found = measure()
    assert found == measure() and len(calls) == 4
    assert (found.call_s, found.array_s, found.variable_s) == (70.0, 80.0, 90.0)
    towers = dataclasses.replace(SPEED, **{k: STARTS[k] for k in this_machine.STARTS})
    assert found.side_by_side == towers
    # An op in a step takes longer than one that is repeated.
    assert found.alone_cpu == dataclasses.replace(towers, convolution_s=45.0)
    assert found.alone == dataclasses.replace(towers, op_s=15.0, convolution_s=35.0)
    assert this_machine.find("cpu").name == "cpu"
    with pytest.raises(ExecutionError, match="did you mean this_machine"):
        this_machine.find("this_machin")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("products", []), ("products", [[1.0, 0.0]]), ("streams", [[float("nan"), 1e9]]),
        ("convolutions", [[1.0, float("inf")]]), ("functions_per_s", 0.0), ("op_s", -1e-6),
        ("op_s", float("nan")),
    ],
)  # fmt: skip
def test_speeds_by_which_a_plan_would_be_no_number_are_refused(name: str, value: Any) -> None:
    speed = dataclasses.asdict(SPEED)
    record = {**STARTS, "side_by_side": speed, "alone": speed, "alone_cpu": speed}
    assert this_machine._of_record(record).alone == SPEED
    with pytest.raises(ValueError, match=r"is no speed|is no time|there is no speed of products"):
        this_machine._of_record({**record, "alone": {**speed, name: value}})
