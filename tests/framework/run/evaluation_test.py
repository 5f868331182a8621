"""Evaluations whose figures are not finite name the array and the example."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tekso.framework.run.evaluation import evaluate
from tekso.framework.task import Task


class Program:
    """Sums "x" by NumPy; its second metric has the square root."""

    def eval_step(self, batch: Any) -> dict[str, tuple[Any, Any]]:
        x, weight = batch["x"], float(len(batch["x"]))
        with np.errstate(invalid="ignore"):
            return {"loss": (x.sum(), weight), "root": (np.sqrt(x).sum(), weight)}


def warnings_of(*arrays: list[float]) -> tuple[list[str], dict[str, float]]:
    found: list[str] = []
    batches = [{"ids": np.arange(len(x)), "x": np.array(x, np.float32)} for x in arrays]
    program: Any = Program()
    task = Task.Params().instantiate()
    values = evaluate(program, task, iter(batches), name="dev", warn=found.append)
    return found, values


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_evaluation_names_the_first_example_that_is_not_finite(value: float) -> None:
    found, values = warnings_of([1.0, 2.0, 3.0], [1.0, value], [math.nan, 1.0])
    assert found == [
        "'loss', 'root' of eval_inputs.dev.batch(1) are not finite: 'x' (example 1 of "
        f"eval_inputs.dev.batch(1)) has {value}"
    ]
    assert not math.isfinite(values["loss"])


def test_a_metric_that_is_not_finite_for_finite_data_says_so() -> None:
    found, values = warnings_of([1.0], [-4.0])
    assert len(found) == 1 and values["loss"] == -1.5
    assert found[0].startswith(
        "'root' of eval_inputs.dev.batch(1) is not finite, although the arrays of the batch are "
    )


def test_finite_figures_are_no_warning() -> None:
    found, values = warnings_of([1.0, 2.0], [4.0])
    assert found == [] and all(map(math.isfinite, values.values()))
