"""A cut by measured times goes by what the timer says, and each kind of piece is timed once."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tensorflow as tf

from tekso.framework.costs.piece_costs import REPEATS, measured_costs
from tekso.framework.costs.piece_traces import trace_all
from tekso.framework.execution import Pipelined
from tekso.framework.pieces import LOSS_SUM, METRICS, Flow, Piece
from tekso.framework.task import Task
from tekso.framework.theta import Theta
from tekso.models.layers.linear import Linear

BATCH = {"x": ((8, 5), "float32"), "ids": ((8, 2), "int32"), "on": ((8,), "bool")}


class Chain(Task):
    """Four linear maps; `kinds` says which of them are declared alike."""

    kinds: tuple[str | None, ...] = (None,) * 4

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child_list("maps", [Linear.Params(input_dim=5, output_dim=5)] * 4)

    def pieces(self) -> list[Piece]:
        found = [
            Piece(f"maps/{i}", {f"maps/{i}": own}, functools.partial(self._map, i), kind=kind)
            for i, (own, kind) in enumerate(zip(self.maps, self.kinds, strict=True))
        ]
        return [*found, Piece("last", {}, self._last)]

    def _map(self, i: int, theta: Theta, flow: Flow, ctx: Any) -> Flow:
        return {**flow, "x": self.maps[i].fprop(theta.maps[str(i)], flow["x"], ctx)}

    def _last(self, theta: Theta, flow: Flow, ctx: Any) -> Flow:
        chosen = tf.where(flow["on"], flow["x"][:, 0], tf.cast(flow["ids"][:, 0], tf.float32))
        return {**flow, LOSS_SUM: tf.reduce_sum(chosen), METRICS: {}}


def timer(durations: Iterator[float]) -> Callable[[], float]:
    """Every second call is later than the one before by the next duration."""
    waits = (wait for duration in durations for wait in (100.0, duration))
    times = itertools.accumulate(waits)
    return lambda: next(times)


def runs(*least: float) -> Iterator[float]:
    """The durations of `REPEATS` runs of pieces, of which the least are given."""
    for number, each in enumerate(least):
        yield from (each + (run + number) % REPEATS for run in range(REPEATS))


def task(*kinds: str | None) -> Chain:
    found = Chain.Params().instantiate()
    found.kinds = kinds or found.kinds
    return found


def plan(durations: Iterator[float], **params: Any) -> Any:
    execution = Pipelined.Params(num_stages=2, num_micro_batches=2, **params).instantiate()
    execution.timer = timer(durations)
    return execution.plan(task(), BATCH, parts=1, devices=None)


def test_least_time_of_every_piece_is_its_cost_and_stages_are_cut_by_it() -> None:
    found = plan(runs(1.0, 1.5, 6.0, 1.0, 0.5), costs="measured")
    assert found.costs == "measured"
    assert found.piece_costs == pytest.approx([1.0, 1.5, 6.0, 1.0, 0.5])
    assert [len(stage.piece_names) for stage in found.stage_plan.stages] == [2, 3]
    found = plan(runs(6.0, 1.5, 1.0, 1.0, 0.5), costs="measured")
    assert [len(stage.piece_names) for stage in found.stage_plan.stages] == [1, 4]


def test_traced_costs_ask_no_timer() -> None:
    found = plan(iter(()))
    assert found.costs == "traced" and len(found.piece_costs) == 5


def test_given_balance_is_kept() -> None:
    found = plan(runs(6.0, 1.0, 1.0, 1.0, 1.0), costs="measured", balance=[4, 1])
    assert [len(stage.piece_names) for stage in found.stage_plan.stages] == [4, 1]


def test_pieces_that_are_declared_alike_are_measured_once() -> None:
    chain = task("a", "a", None, "a")
    specs, pieces = chain.specs(), chain.pieces()
    micro = {name: ((4, *shape[1:]), dtype) for name, (shape, dtype) in BATCH.items()}
    traces = trace_all(pieces, specs, micro)
    found = measured_costs(
        pieces, traces, specs, micro, device="CPU:0", timer=timer(runs(1.0, 2.0, 3.0))
    )
    assert found == pytest.approx([1.0, 1.0, 2.0, 1.0, 3.0])


def test_forward_and_backward_are_what_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Noted(Chain):
        def _map(self, i: int, theta: Theta, flow: Flow, ctx: Any) -> Flow:
            @tf.custom_gradient
            def noted(x: Any) -> Any:
                tf.numpy_function(lambda _: seen.append("forward"), [x], [])

                def gradient(dy: Any) -> Any:
                    tf.numpy_function(lambda _: seen.append("backward"), [dy], [])
                    return dy

                return tf.identity(x), gradient

            return super()._map(i, theta, {**flow, "x": noted(flow["x"])}, ctx)

    chain = Noted.Params().instantiate()
    specs, pieces = chain.specs(), chain.pieces()
    traces = trace_all(pieces, specs, BATCH)
    measured_costs(pieces[:1], traces[:1], specs, BATCH, device=None)
    assert seen == ["forward", "backward"] * (REPEATS + 1)
