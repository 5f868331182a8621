"""What a session keeps of its steps and evaluations."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tekso.framework.run.logdir import Logdir
from tekso.framework.run.session_records import SessionRecords

TASK: Any = SimpleNamespace(count=lambda batch: (2, "examples"))


def records() -> SessionRecords:
    return SessionRecords(TASK, begin=0.0, clock=lambda: 1.25)


def figures(step: int) -> dict[str, float]:
    return {"loss": 1.0 / step, "gradient_norm": 0.1 + step, "learning_rate": 0.2 + step}


def test_an_evaluation_replaces_an_earlier_one_of_the_same_step(tmp_path: Path) -> None:
    kept = records()
    for step in (1, 2):
        kept.step(step, {}, figures(step))
        kept.evaluation(step, "dev", {"loss": 3.0})
        kept.evaluation(step, "test", {"loss": 4.0, "accuracy": 0.5})
    kept.evaluation(2, "dev", {"loss": 5.0})
    kept.evaluation(2, "dev", {"loss": 6.0})
    kept.write(Logdir(str(tmp_path)), 2)
    found = list(map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines()))
    assert [(r["step"], r["split"], r["loss"]) for r in found] == [
        (1, "train", 1.0), (1, "dev", 3.0), (1, "test", 4.0),
        (2, "train", 0.5), (2, "test", 4.0), (2, "dev", 6.0),
    ]  # fmt: skip
    assert [r.get("examples_seen") for r in found] == [2, None, None, 4, None, None]
    assert {r["elapsed_seconds"] for r in found} == {r["seconds"]["start"] for r in found} == {1.25}
    assert found[2]["accuracy"] == 0.5 and found[0]["gradient_norm"] == 1.1


def test_time_of_a_call_in_no_activity_is_other(tmp_path: Path) -> None:
    now = [0.0]
    kept = SessionRecords(TASK, begin=0.0, clock=lambda: now[0])

    def wait(seconds: float) -> None:
        now[0] += seconds

    wait(100.0)  # between the calls
    with kept.rest():  # of a lab
        wait(1.0)
        with kept.rest():  # of a session
            with kept.during("step"):
                wait(2.0)
            wait(4.0)
        wait(8.0)
    wait(100.0)
    kept.write(Logdir(str(tmp_path)), 1)
    spent = json.loads((tmp_path / "progress.jsonl").read_text())["seconds"]
    assert {name: value for name, value in spent.items() if value} == {"step": 2.0, "other": 13.0}


def test_a_step_costs_little_memory_and_an_evaluation_does_not_copy_all_records() -> None:
    kept, steps = records(), 20_000
    history = [figures(step) for step in range(1, steps + 1)]
    tracemalloc.start()
    try:
        for step, one in enumerate(history, start=1):
            kept.step(step, {}, one)
        assert tracemalloc.get_traced_memory()[0] / steps < 500  # bytes; with dicts, 900
        peaks = []
        for _ in range(3):  # the list itself may grow in one of them
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            kept.evaluation(steps, "dev", {"loss": 1.0})
            peaks.append(tracemalloc.get_traced_memory()[1] - before)
        assert min(peaks) < 8 * steps / 10  # bytes; a copy has 8 for each step
    finally:
        tracemalloc.stop()
