"""Measured steps: which events are shown, and what they are compared with."""

from __future__ import annotations

import io
from typing import Any

import pytest
from matplotlib.image import imread

from tekso.framework.execution.pipeline.actions import FORWARD, Event
from tekso.framework.execution.pipelined import Pipelined
from tekso.framework.planning.measured_step import MeasuredStep, measured_step
from tekso.framework.planning.simulator import simulate
from tekso.models.layers.attention import MultiHeadAttention
from tekso.models.layers.feed_forward import FeedForward
from tekso.models.layers.stack import Stack
from tekso.models.layers.transformer import TransformerLayer
from tekso.models.transformer_lm import TransformerLm
from tekso.tasks.lm.task import LanguageModel

DEVICES, MICRO_BATCHES = 2, 3


def plan(**changes: Any) -> Any:
    attention = MultiHeadAttention.Params(num_heads=1, mask="causal")
    feed_forward = FeedForward.Params(hidden_dim=5)
    layer = TransformerLayer.Params(attention=attention, feed_forward=feed_forward)
    model = TransformerLm.Params(vocab_size=7, dim=2, stack=Stack.Params(num_layers=2, layer=layer))
    task = LanguageModel.Params(model=model).instantiate()
    shape = ((12, 4), "int32")
    batch = {"ids": shape, "labels": shape, "weights": ((12, 4), "float32")}
    params = Pipelined.Params(num_stages=DEVICES, num_micro_batches=MICRO_BATCHES, **changes)
    return params.instantiate().plan(task, batch, parts=2, devices=None)


def events(given: Any, *, forward_s: float, start_s: float = 100.0) -> dict[Any, list[Event]]:
    """As a device that takes 2 s for a backward would do it, without any delay."""
    found: dict[Any, list[Event]] = {}
    for replica in range(given.num_replicas):
        timeline = simulate(
            given.actions,
            num_devices=DEVICES,
            durations=lambda _, kind: forward_s if kind == FORWARD else 2.0,
        )
        for event in timeline.events:
            moved = Event(event.action, start_s + event.start, start_s + event.end)
            found.setdefault((replica, event.action.device), []).append(moved)
    return found


def measured(given: Any, of: dict[Any, list[Event]]) -> MeasuredStep:
    found = measured_step(of, given)
    assert found is not None
    return found


def test_step_without_delays_takes_as_long_as_predicted() -> None:
    given = plan()
    found = measured(given, events(given, forward_s=1.0))
    # 1F1B of equal stages: (M + K - 1) times forward and backward.
    assert found.predicted.makespan == pytest.approx((MICRO_BATCHES + DEVICES - 1) * 3000)
    assert found.ratio == pytest.approx(1)
    lines = found.lines(80)
    assert lines[0] == "measured: 1.2e+04 ms, 25.0 % idle"
    assert lines[-1].startswith("measured 12000.0 ms, predicted 12000.0 ms, ratio 1.000 (")
    assert all(len(line) <= 80 for line in lines)


def test_delay_is_what_the_prediction_does_not_know() -> None:
    given = plan()
    late = events(given, forward_s=1.0)
    last = late[0, 0][-1]
    late[0, 0][-1] = Event(last.action, last.start + 3, last.end + 3)
    assert measured(given, late).ratio == pytest.approx(15 / 12)


def test_of_several_parts_the_last_is_shown() -> None:
    given = plan()
    first, last = events(given, forward_s=7.0), events(given, forward_s=1.0, start_s=200.0)
    found = measured(given, {worker: first[worker] + last[worker] for worker in first})
    assert found.predicted.makespan == pytest.approx(12000)
    assert found.ratio == pytest.approx(1)


def test_replicas_are_shown_one_below_the_other_and_the_slowest_counts() -> None:
    given = plan(num_replicas=2)
    both = events(given, forward_s=1.0)
    last = both[1, 0][-1]
    both[1, 0][-1] = Event(last.action, last.start + 3, last.end + 3)
    found = measured(given, both)
    assert found.ratio == pytest.approx(15 / 12)
    headings = [line.partition(":")[0] for line in found.lines(80) if " idle" in line]
    assert headings[:3] == ["measured, replica 0", "measured, replica 1",
                            "simulated from its mean times"]  # fmt: skip
    assert imread(io.BytesIO(found.png("a title")), format="png").ndim == 3


def test_before_the_first_step_there_is_nothing() -> None:
    assert measured_step({}, plan()) is None
