from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tekso.framework.run.weight_figures import WeightFigures, by_layer, figures
from tekso.framework.weight_spec import WeightSpec

STACKED = WeightSpec(
    "stack/w", (2, 3), ("layers", "embed"), init=None,  # type: ignore[arg-type]
    stacked=1, template="stack/*/w",
)  # fmt: skip
FIXED = WeightSpec("fixed", (2,), ("embed",), init=None, trainable=False)  # type: ignore[arg-type]


class Program:
    def __init__(self) -> None:
        self.w = np.array([[3.0, 0.0, 4.0], [0.0, 0.0, 0.0]], np.float32)

    def specs(self) -> dict[str, WeightSpec]:
        return {"weights/stack/w": STACKED, "weights/fixed": FIXED}

    def state(self) -> dict[str, np.ndarray]:
        return {"weights/stack/w": self.w.copy(), "weights/fixed": np.ones(2), "learner/m": self.w}


def test_norms_and_update_ratios_are_those_of_each_layer_and_due_calls_alone() -> None:
    program, written = Program(), []

    def write(step: int, values: Any, layers: Any) -> None:
        written.append((step, dict(values), {path: w.tolist() for path, w in layers.items()}))

    watch = WeightFigures(program, 4, write)  # type: ignore[arg-type]
    for first, last in ((1, 2), (3, 4), (5, 5)):
        with watch.around(first, last):
            program.w[0] += 1.0
    ((step, values, layers),) = written
    assert step == 4 and layers == {"stack/0/w": [5.0, 2.0, 6.0], "stack/1/w": [0.0, 0.0, 0.0]}
    assert values == {
        "norm/stack/0/w": pytest.approx(math.sqrt(25 + 4 + 36)),
        # of a call of two steps that adds 1 to three elements; before, they were 4, 1 and 5
        "update_ratio/stack/0/w": pytest.approx(math.sqrt(3) / math.sqrt(16 + 1 + 25) / 2),
        "norm/stack/1/w": 0.0,
        "update_ratio/stack/1/w": 0.0,
    }


def test_a_weight_that_was_zero_has_an_infinite_ratio() -> None:
    found = figures({"w": np.zeros(2)}, {"w": np.array([0.0, 2.0])})
    assert found == {"norm/w": 2.0, "update_ratio/w": math.inf}


def test_a_weight_without_a_stack_stays_whole() -> None:
    assert list(by_layer(FIXED, np.ones(2))) == ["fixed"]
