"""Sizes of a task that only its data determines, in modes that do not read the data."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tekso.framework.experiment import Experiment
from tekso.framework.initializers import Zeros
from tekso.framework.input.arrays import Arrays
from tekso.framework.input.input import Input
from tekso.framework.input.task_inputs import TaskInputs
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import Momentum
from tekso.framework.params import REQUIRED, Params, param
from tekso.framework.run import inspection
from tekso.framework.run.checkpoint_description import Description
from tekso.framework.run.logdir import Logdir
from tekso.framework.schedules import Constant
from tekso.framework.task import Task
from tekso.tasks.multi.task import MultiTask


class Flats(Arrays):
    """Has a list of its own after its data was read."""

    def load(self, split: str) -> dict[str, Any]:
        self.cities = ["Ulm", "Jena", "Kiel"]
        return {"x": np.ones((8, 2), np.float32)}


class Known(Flats):
    """Knows some of itself without its data."""

    class Params(Flats.Params):
        """Params of Known."""

    @classmethod
    def known(cls, params: Input.Params, *, assets_dir: str | None) -> object:
        return object()


class Rent(Task):
    """Has a weight for each city of the data."""

    class Params(Task.Params):
        """Params of Rent."""

        num_cities: int = param("Number of cities.", default=REQUIRED)

    @classmethod
    def complete(cls, params: Any, input: Any) -> Any:
        params = params.copy()
        if params.num_cities is REQUIRED:
            params.num_cities = len(input.cities)
        return params

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.weight("w", [self.params.num_cities], dims=(None,), init=Zeros.Params())


class Always(Rent):
    """Reads the data although the size is set."""

    class Params(Rent.Params):
        """Params of Always."""

    @classmethod
    def complete(cls, params: Any, input: Any) -> Any:
        return params.copy().set(num_cities=len(input.cities))


def tree_of(task: Any, input: Any) -> Any:
    class Some(Experiment):
        """An experiment."""

        def task(self) -> Any:
            return task

        def input(self) -> Any:
            return input

        def learner(self) -> Any:
            return Learner.Params(optimizer=Momentum.Params(), schedule=Constant.Params(value=0.1))

    return Some().tree()


def one(kind: Any = Rent, input: Any = Flats) -> Any:
    return tree_of(kind.Params(), input.Params(batch_size=4))


def two() -> Any:
    inputs = {name: Flats.Params(batch_size=4) for name in ("a", "b")}
    tasks = {name: Rent.Params() for name in ("a", "b")}
    return tree_of(MultiTask.Params(tasks=tasks), TaskInputs.Params(inputs=inputs))


def store(folder: Path, step: int, text: str) -> None:
    path = folder / "checkpoints" / f"step_{step:08d}"
    path.mkdir(parents=True)
    description = Description(step, "Some", "", text)
    (path / "checkpoint.json").write_text(description.to_json())


def test_the_error_about_an_open_size_says_what_to_set(tmp_path: Path) -> None:
    line = inspect.getsourcelines(Rent.complete)[1]
    for tree, assets in ((one(), None), (one(input=Known), str(tmp_path / "assets"))):
        with pytest.raises(ValueError) as error:
            inspection.task_of(tree, assets_dir=assets)
        assert str(error.value) == (
            f"task.num_cities is not set: Rent.complete ({__file__}:{line}) reads 'cities' of the "
            "training input, whose data is not read here. Set it, as in --set task.num_cities=10, "
            "or give the folder of a run with a checkpoint (--logdir)"
        )
    assert inspection.task_of(one().set({"task.num_cities": 5})).specs()["w"].shape == (5,)


def test_the_error_names_the_size_of_one_of_several_tasks() -> None:
    with pytest.raises(ValueError, match=r"task\.tasks\.a\.num_cities=10"):
        inspection.task_of(two())


def test_complete_may_read_the_data_only_for_an_open_size() -> None:
    with pytest.raises(ValueError, match=r"reads 'cities' .* although all sizes are set: read it"):
        inspection.task_of(one(Always).set({"task.num_cities": 5}))


def test_another_attribute_that_is_missing_is_no_open_size() -> None:
    class Misspelt(Rent):
        """Reads a field that there is not."""

        class Params(Rent.Params):
            """Params of Misspelt."""

        @classmethod
        def complete(cls, params: Any, input: Any) -> Any:
            return params.town

    with pytest.raises(AttributeError, match="town"):
        inspection.task_of(one(Misspelt))


def test_a_run_has_the_sizes_in_its_newest_checkpoint_that_can_be_read(tmp_path: Path) -> None:
    logdir, tree = Logdir(str(tmp_path)), one()
    store(tmp_path, 3, Rent.Params(num_cities=4).to_text())
    store(tmp_path, 7, Rent.Params(num_cities=6).to_text())
    store(tmp_path, 9, "damaged")
    assert inspection.task_of(tree, assets_dir=logdir.assets).specs()["w"].shape == (6,)
    assert tree.task.num_cities is REQUIRED
    given = one().set({"task.num_cities": 5})
    assert inspection.task_of(given, assets_dir=logdir.assets).specs()["w"].shape == (5,)


def test_a_run_of_several_tasks_has_the_sizes_of_each(tmp_path: Path) -> None:
    stored: Params = two().task
    stored.set({"tasks.a.num_cities": 2, "tasks.b.num_cities": 3})
    store(tmp_path, 1, stored.to_text())
    task = inspection.task_of(two(), assets_dir=Logdir(str(tmp_path)).assets)
    assert sorted(spec.shape for spec in task.specs().values()) == [(2,), (3,)]


def test_a_checkpoint_of_an_earlier_version_has_no_sizes(tmp_path: Path) -> None:
    store(tmp_path, 1, "")
    with pytest.raises(ValueError, match=r"task\.num_cities is not set"):
        inspection.task_of(one(), assets_dir=Logdir(str(tmp_path)).assets)
