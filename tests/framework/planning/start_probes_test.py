"""The time of a usual step is found among disturbed ones; clocks and pauses are replaced."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tekso.framework.planning import start_probes
from tekso.framework.planning.start_probes import Equation, StepTimes
from tekso.framework.run import step_probes
from tekso.framework.run.step_probes import ARRAYS, DEEP, EQUATIONS, SMALL, WIDE, StepProbe

PROBES = list(dict.fromkeys(probe for _, *both in EQUATIONS for probe in both))
TIMES = {"call_s": 6e-4, "array_s": 7e-5, "op_s": 1e-6, "variable_s": 8e-6}
TIMES |= {"product_s": 1e-5, "convolution_s": 1e-4, "cluster_s": 3e-5, "argument_s": 3e-6}
TIMES |= {"loop_s": 1e-7}


def counts(probe: StepProbe) -> dict[str, float]:
    """Returns counts like those of real steps: a step that has more of one has more ops too."""
    found = dict.fromkeys(TIMES, 0.0) | {"call_s": 1, "array_s": 1, "variable_s": 6, "op_s": 60}
    more = {
        DEEP: {"op_s": 600},
        ARRAYS: {"array_s": 8, "op_s": 32},
        WIDE: {"variable_s": 48, "op_s": 609},
        step_probes.APART: {"op_s": 64},
        step_probes.PRODUCTS: {"product_s": 32, "op_s": 136},
        step_probes.CONVOLUTIONS: {"convolution_s": 48, "op_s": 264},
        step_probes.CLUSTERS: {"cluster_s": 16, "argument_s": 32, "op_s": 96},
        step_probes.ARGUMENTS: {"cluster_s": 16, "argument_s": 160, "op_s": 96},
        step_probes.LOOPS: {"cluster_s": 4, "argument_s": 8, "op_s": 8, "loop_s": 4 * 64 * 5},
    }
    for name, number in more.get(probe, {}).items():
        found[name] += number
    return found


@given(st.integers(0, 2**32 - 1))
def test_single_disturbed_steps_change_no_time_by_a_factor_of_2(seed: int) -> None:
    """A step in ten takes up to three times as long."""
    random = np.random.default_rng(seed)
    exact = np.array([sum(TIMES[n] * k for n, k in counts(p).items()) for p in PROBES])
    turns = np.tile(exact, [150, 1]) * random.uniform(0.995, 1.005, [150, len(PROBES)])
    disturbed = random.uniform(size=turns.shape) < 0.1
    turns[disturbed] *= random.uniform(1.0, 3.0, [int(disturbed.sum())])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start_probes, "_turns", lambda *_: np.stack([turns, 2 * turns], axis=-1))
        times = start_probes.typical_times([], warmup_steps=0, repeats=150)
    measured = {p: (time.cpu_s, counts(p)) for p, time in zip(PROBES, times, strict=True)}
    found = start_probes.solve(measured, EQUATIONS, SMALL)
    for name, value in TIMES.items():
        assert value / 2 < found[name] < 2 * value, name


def test_equations_are_solved_one_after_the_other_and_no_time_is_negative() -> None:
    """An a takes 3 s, a b 7 s and a call 10 s."""
    measured = {
        "least": (23.0, {"a": 2, "b": 1}),
        "more of a": (32.0, {"a": 5, "b": 1}),
        "more of b": (47.0, {"a": 3, "b": 4}),
    }
    equations = [Equation("a", "more of a", "least"), Equation("b", "more of b", "least")]
    found = start_probes.solve(measured, equations, "least")
    assert found == pytest.approx({"a": 3, "b": 7, "call_s": 10})
    disturbed = {**measured, "more of a": (20.0, {"a": 5, "b": 1})}
    found = start_probes.solve(disturbed, equations, "least")
    assert found == pytest.approx({"a": 0, "b": 8, "call_s": 15})
    disturbed = {**measured, "more of b": (100.0, {"a": 3, "b": 4})}
    assert start_probes.solve(disturbed, equations, "least")["call_s"] == 0


def test_steps_wait_some_milliseconds_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    start_probes.typical_times([lambda: None] * 2, warmup_steps=1, repeats=3)
    assert pauses == [2e-3] * 6


def test_a_pause_that_does_not_count_precedes_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now, done = [0.0], []

    def spend(name: str, seconds: float) -> None:
        done.append(name)
        now[0] += seconds

    monkeypatch.setattr(time, "process_time", lambda: now[0])
    monkeypatch.setattr(time, "perf_counter", lambda: now[0] / 2)
    found = start_probes.typical_times(
        [lambda: spend("a", 1.0), lambda: spend("b", 2.0)],
        warmup_steps=2, repeats=3, pause=lambda: spend("pause", 100.0),
    )  # fmt: skip
    assert found == [StepTimes(cpu_s=1.0, elapsed_s=0.5), StepTimes(cpu_s=2.0, elapsed_s=1.0)]
    assert done == ["a", "a", "b", "b"] + 3 * ["pause", "a", "pause", "b"]


def test_the_time_of_short_steps_is_a_median_of_means(monkeypatch: pytest.MonkeyPatch) -> None:
    now, left = [0.0], [0.0] + 8 * [3.0] + 8 * [2.0] + 7 * [4.0] + [50.0]  # the first is a warm-up

    def step() -> None:
        now[0] += left.pop(0)

    monkeypatch.setattr(time, "process_time", lambda: now[0])
    assert start_probes.mean_seconds([step], warmup_steps=1, repeats=3) == [3.0]
