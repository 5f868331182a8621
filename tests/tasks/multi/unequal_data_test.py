"""Two tasks of which one has ten times the data: their steps, epochs and evaluations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import small_tasks

from tekso.framework.experiment import Run
from tekso.framework.input.task_inputs import TaskInputs
from tekso.framework.input.task_mixing import ByTemperature
from tekso.framework.params import Params, param
from tekso.framework.run.session import Session


class FewFlowers(small_tasks.Flowers):
    """Every tenth of the training flowers; all of the others."""

    class Params(small_tasks.Flowers.Params):
        """Params of FewFlowers."""

        every: int = param("Distance of the rows.", default=10)

    def load(self, split: Any) -> Any:
        """Returns features and classes."""
        found = super().load(split)
        every = self.params.every if split == "train" else 1
        return {name: array[::every] for name, array in found.items()}


def inputs(temperature: float) -> TaskInputs.Params:
    return TaskInputs.Params(
        inputs={
            "kind": small_tasks.Flowers.Params(batch_size=6),
            "virginica": FewFlowers.Params(batch_size=6, two_classes=True),
        },
        mixing=ByTemperature.Params(temperature=temperature),
    )


class Unequal(small_tasks.Iris):
    """120 flowers for one task and 12 for the other, at temperature 5."""

    def input(self) -> Params:
        """Mixed by the amount of data."""
        return inputs(5.0)

    def run(self) -> Params:
        """As long as the losses need to fall."""
        return Run.Params(steps=150)


@pytest.mark.parametrize("temperature", [1.0, 2.0, 5.0, 100.0])
def test_the_number_of_steps_of_a_task_is_that_of_the_formula(temperature: float) -> None:
    """p_i = n_i^(1 / T) / sum_j n_j^(1 / T), at the end of every prefix of the run."""
    mixed: Any = inputs(temperature).instantiate(seed=5)
    sizes = {name: one.num_examples for name, one in mixed.inputs.items()}
    assert sizes == {"kind": 120, "virginica": 12}
    share = 12 ** (1 / temperature) / (12 ** (1 / temperature) + 120 ** (1 / temperature))
    few = np.cumsum([mixed.place(step)[0] == "virginica" for step in range(1100)])
    expected = share * np.arange(1, 1101)
    assert np.abs(few - expected).max() < 3


def test_every_example_of_a_task_is_used_once_per_epoch_of_that_task() -> None:
    mixed: Any = inputs(1.0).instantiate(seed=5)
    few: list[bytes] = []
    for step in range(44):  # 4 of them of the task with few examples: two epochs
        batch = mixed.batch(step)
        few += [row.tobytes() for row in batch.get("virginica/x", ())]
    assert len(few) >= 18
    first = {*few[:12]}
    assert len(first) == 12 and {*few[12:]} <= first


@pytest.mark.slow
def test_both_tasks_are_learned_and_each_is_evaluated_on_its_own_data() -> None:
    session = Session(Unequal)
    before = {task: session.evaluate(f"{task}_dev") for task in ("kind", "virginica")}
    session.train(150)
    for task, old in before.items():
        figures = session.evaluate(f"{task}_dev")
        assert set(figures) == {"loss", f"{task}/loss", f"{task}/accuracy"}
        assert figures["loss"] == pytest.approx(figures[f"{task}/loss"])
        assert figures[f"{task}/loss"] < 0.6 * old[f"{task}/loss"], task
        assert figures[f"{task}/accuracy"] > 0.8, task
