"""The program that shards one dim of an experiment alone finds what differs from one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dims_program
import numpy as np
import processes
import pytest

PROGRAM = Path(dims_program.__file__)
MOMENT = "learner/model/w/first_moment"
AVERAGE = "learner/model/w/ema"
BIAS = "learner/model/keys/b/first_moment"
MEAN = "weights/model/norm/moving_mean"
GRADIENT = np.array([[0.3, -0.2], [0.1, 0.4]])


def results(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "sums": {"step 0 loss": 2.0, "accuracy sum": 3.0},
        "changes": {
            "weights/model/w": -GRADIENT,
            MEAN: GRADIENT,
            MOMENT: GRADIENT,
            AVERAGE: -GRADIENT,
            BIAS: np.full(2, 1e-9),
        },
        "decoded": [{"text": "a", "score": -1.5}],
    }
    return {name: changes.get(name, value) for name, value in found.items()}


def changes(**of_keys: Any) -> dict[str, Any]:
    return results()["changes"] | of_keys


@pytest.mark.parametrize(
    ("found", "difference"),
    [
        (results(), ""),
        # In another order, a gradient has the same norm.
        (results(changes=changes(**{MOMENT: GRADIENT.T})), f"{MOMENT} moved by 0.548"),
        # The optimizer scales up a gradient that is zero but for rounding.
        (results(changes=changes(**{BIAS: np.full(2, -1e-9), "weights/model/w": GRADIENT})), ""),
        (results(changes=changes(**{AVERAGE: GRADIENT.T})), ""),
        (results(changes=changes(**{MOMENT: np.full([2, 2], np.nan)})), MOMENT),
        # Weights that no optimizer changes have no moments.
        (results(changes=changes(**{MEAN: GRADIENT.T})), f"{MEAN} moved by 0.548"),
        (results(sums={"step 0 loss": 2.0, "accuracy sum": 4.0}), "accuracy sum 3 is 4"),
        (results(sums={"step 0 loss": 2.0001, "accuracy sum": 3.0}), ""),
        (results(decoded=[{"text": "b", "score": -1.5}]), "decoded"),
        (results(decoded=[{"text": "a", "score": -1.500001}]), ""),
        (results(decoded=[]), "decoded"),
    ],
)
def test_it_finds_what_differs(found: dict[str, Any], difference: str) -> None:
    said = "; ".join(dims_program.differences(results(), found))
    assert difference in said if difference else not said


def test_without_slots_the_weights_are_compared() -> None:
    alone = results(changes={"weights/w": GRADIENT})
    other = results(changes={"weights/w": GRADIENT.T})
    assert list(dims_program.differences(alone, other)) == [
        "weights/w moved by 0.548, and is 0.424 apart"
    ]


@pytest.mark.slow
def test_it_prints_a_line_for_each_layout() -> None:
    arguments = ["lm.python_source.Tiny", "mlp", "batch:a;experts:b", "embed:a;mlp:b"]
    done = processes.run([PROGRAM, *arguments])
    lines = [line.removeprefix("lm.python_source.Tiny ") for line in done.stdout.splitlines()]
    assert [line.partition(" (")[0][:70] for line in lines] == [
        "mlp: equal",
        "batch:a;experts:b: refused: execution.mesh 'a:2;b:2' and execution.rul",
        "embed:a;mlp:b: equal",
    ]
    assert done.returncode == 0
