"""Inputs of several tasks: the order of tasks, their own batches, what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from input_parts import part_of

from tekso.framework.input.arrays import Arrays
from tekso.framework.input.errors import InputError
from tekso.framework.input.task_inputs import OneTask, TaskInputs
from tekso.framework.input.task_mixing import (
    BySteps,
    ByTemperature,
    ByWeight,
    Mixing,
    TaskOrder,
)
from tekso.framework.params import param


class Numbers(Arrays):
    """The numbers from `first` on, in order; their count is the size of the task."""

    class Params(Arrays.Params):
        """Params of Numbers."""

        first: int = param("First number.", default=0)
        count: int = param("Number of examples.", default=40)

    def load(self, split: Any) -> Any:
        """Returns the numbers."""
        p = self.params
        held_out = 0 if split == "train" else 10_000
        return {"x": held_out + np.arange(p.first, p.first + p.count)}


def inputs(**changes: Any) -> TaskInputs.Params:
    small = Numbers.Params(batch_size=4, count=40)
    large = Numbers.Params(batch_size=8, first=1000, count=400)
    return TaskInputs.Params(inputs={"small": small, "large": large}, **changes)


def test_the_nth_batch_of_a_task_is_the_one_it_has_alone() -> None:
    params = inputs(mixing=ByWeight.Params(weights={"large": 3.0}))
    mixed = params.instantiate(seed=3)
    alone = {name: own.instantiate(seed=3) for name, own in params.inputs.items()}
    seen = dict.fromkeys(alone, 0)
    for step in range(60):
        batch = mixed.batch(step)
        (name,) = {key.partition("/")[0] for key in batch}
        want = alone[name].batch(seen[name])
        np.testing.assert_array_equal(batch[f"{name}/x"], want["x"])
        assert set(batch) == {f"{name}/{key}" for key in want}
        assert mixed.num_rows(step) == len(want["x"])
        seen[name] += 1
    assert seen == {"small": 15, "large": 45}


def test_the_largest_batch_is_of_the_task_with_most_bytes_or_of_all_tasks() -> None:
    small = Numbers.Params(batch_size=4)
    params = TaskInputs.Params(inputs={"small": small, "wide": Rows.Params(batch_size=4)})
    assert list(params.instantiate().largest_batch()) == ["wide/x"]
    found = {name: len(one["x"]) for name, one in params.instantiate().largest_batches().items()}
    assert found == {"small": 4, "wide": 4}
    joined = params.copy().set(unit="all_tasks").instantiate().largest_batch()
    assert (joined["small/x"].shape, joined["wide/x"].shape) == ((4,), (4, 3))
    with pytest.raises(InputError, match="the largest batches have different numbers of examples"):
        inputs(unit="all_tasks").instantiate().largest_batch()
    mixing = ByWeight.Params(weights={"large": 3.0})
    shares = inputs(mixing=mixing).instantiate().shares(60)
    assert shares["large"] == pytest.approx(0.75, abs=0.03) and sum(shares.values()) == 1.0


class Rows(Numbers):
    """Rows of three numbers; the first batch has fewer examples."""

    def load(self, split: Any) -> Any:
        """Returns the rows."""
        return {"x": np.ones([self.params.count, 3], np.int64)}

    def batch(self, step: int) -> Any:
        """Returns one row."""
        return {"x": np.ones([1, 3], np.int64)}

    def largest_batch(self) -> Any:
        """Returns four rows."""
        return {"x": np.ones([4, 3], np.int64)}


def test_steps_can_be_asked_in_any_order_and_by_parts() -> None:
    params = inputs(mixing=BySteps.Params(steps=[0, 50], weights=[{"small": 1}, {"large": 1}]))
    forward = [params.instantiate(seed=1).batch(step) for step in range(30)]
    other = params.instantiate(seed=1)
    for step in (29, 3, 17, 0):
        for key, array in forward[step].items():
            np.testing.assert_array_equal(other.batch(step)[key], array)
            parts = [part_of(other, step, i, 2, even=True)[key] for i in range(2)]
            np.testing.assert_array_equal(np.concatenate(parts), array)


def shares(mixing: Mixing.Params, steps: range, sizes: dict[str, int | None]) -> dict[str, float]:
    order = TaskOrder(mixing.instantiate(), sizes, seed=2)
    tasks = [order.place(step)[0] for step in steps]
    return {name: tasks.count(name) / len(tasks) for name in sizes}


def test_temperature_is_between_the_data_and_equal_shares() -> None:
    sizes = {"small": 100, "large": 1000}
    for temperature, want in ((1.0, 1 / 11), (5.0, 1 / (1 + 10**0.2)), (1e9, 0.5)):
        found = shares(ByTemperature.Params(temperature=temperature), range(2000), sizes)
        assert found["small"] == pytest.approx(want, abs=0.005)


def test_the_small_task_never_waits_long() -> None:
    order = TaskOrder(
        ByTemperature.Params(temperature=1.0).instantiate(), {"s": 10, "l": 100}, seed=0
    )
    places = [step for step in range(2000) if order.place(step)[0] == "s"]
    assert max(np.diff(places)) <= 2 * 11


def test_a_schedule_moves_the_shares_and_counts_across_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mixing = BySteps.Params(steps=[100, 300], weights=[{"a": 1.0}, {"a": 1.0, "b": 3.0}])
    assert shares(mixing, range(100), {"a": None, "b": None}) == {"a": 1.0, "b": 0.0}
    late = shares(mixing, range(300, 700), {"a": None, "b": None})
    assert late["b"] == pytest.approx(0.75, abs=0.01)

    monkeypatch.setattr("tekso.framework.input.task_mixing._BLOCK", 64)
    order = TaskOrder(mixing.instantiate(), {"a": None, "b": None}, seed=4)
    counts = {"a": 0, "b": 0}
    for step in range(500):
        name, earlier = order.place(step)
        assert earlier == counts[name]
        counts[name] += 1
    again = TaskOrder(mixing.instantiate(), {"a": None, "b": None}, seed=4)
    assert again.place(499) == (name, counts[name] - 1)


def test_all_tasks_join_one_batch_of_each() -> None:
    params = inputs(unit="all_tasks").set({"inputs.large.batch_size": 4})
    batch = params.instantiate(seed=0).batch(7)
    alone = params.inputs["large"].instantiate(seed=0).batch(7)
    np.testing.assert_array_equal(batch["large/x"], alone["x"])
    assert len(batch["small/x"]) == 4


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mixing": ByWeight.Params(weights={"small": 0.0})}, "'small' is 0, so it would never"),
        ({"mixing": ByWeight.Params(weights={"big": 1.0})}, "names 'big', but the tasks are small"),
        ({"mixing": ByWeight.Params(weights={"small": -1.0})}, "must be a number from 0"),
        ({"mixing": ByTemperature.Params(temperature=0.0)}, "is 0.0, but must be above 0"),
        (
            {"mixing": BySteps.Params(steps=[0], weights=[{"small": 1.0}])},
            "'large' is 0 at every point",
        ),
        (
            {"mixing": BySteps.Params(steps=[5, 0], weights=[{"small": 1.0}, {"large": 1.0}])},
            "in ascending order",
        ),
        (
            {"mixing": BySteps.Params(steps=[0, 9], weights=[{"small": 1.0, "large": 1.0}, {}])},
            "all weights are 0 at step 9",
        ),
        ({"inputs": {}}, "is empty: give the input of every task"),
        ({"inputs": {"a": Numbers.Params(batch_size=4, order="once")}}, "must be endless"),
    ],
)
def test_wrong_settings_are_named_in_one_line(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason) as caught:
        inputs().set(changes).instantiate()
    assert "\n" not in str(caught.value)


def test_all_tasks_refuse_batches_of_different_sizes() -> None:
    with pytest.raises(InputError, match=r"different numbers of examples: small 4, large 8"):
        inputs(unit="all_tasks").instantiate().batch(0)


def test_an_evaluation_input_has_the_held_out_data_of_its_task() -> None:
    train = inputs()
    one = OneTask.Params(task="small").instantiate(train=train)
    batch = one.batch(0)
    assert set(batch) == {"small/x", "small/weights"}
    assert batch["small/x"].min() == 10_000
    assert one.num_batches == 10
    with pytest.raises(InputError, match=r"is 'tiny', but the tasks with a training input are"):
        OneTask.Params(task="tiny").instantiate(train=train)
