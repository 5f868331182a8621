"""Checkpoints by name: RUN/last, RUN/best and RUN/STEP mean the same to every reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tekso.framework import registry
from tekso.framework.run import checkpoint_files, checkpoint_paths
from tekso.framework.run.checkpoint_description import Description
from tekso.framework.run.checkpoint_errors import CheckpointError
from tekso.framework.run.opened import open_run
from tekso.framework.run.stored_state import open_stored
from tekso.framework.run.warm_start_sources import open_source
from tekso.framework.warm_start import WarmStart

LOSSES = {10: 1.5, 20: 1.25, 30: 1.75}


def save(run: Path, *, stored_goal: str = "", **rule: Any) -> None:
    """Writes a run with three checkpoints, of which the one of step 20 has the smallest loss."""
    folder = run / "checkpoints"
    folder.mkdir(parents=True)
    tree = registry.get("lm.gpt.Gpt2")().tree()
    tree.run.keep_best.set(rule)
    (run / "params.txt").write_text(f"# model: lm.Some\n{tree.to_text()}")
    for step, loss in LOSSES.items():
        metrics = {"dev/loss": loss, "dev/perplexity": loss}
        about = Description(step, "lm.Some", tree.to_text(), metrics=metrics, goal=stored_goal)
        values = {"weights/w": np.full(2, float(step), np.float32)}
        checkpoint_files.write(str(folder / f"step_{step:08d}"), values, about)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run in the working directory."""
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("path", "step"),
    [
        ("run", 30), ("run/last", 30), ("run/best", 20), ("run/10", 10), ("run/step_10/", 10),
        ("run/checkpoints/best", 20), ("./run/checkpoints/00000010", 10),
    ],
)  # fmt: skip
def test_a_name_means_the_same_to_every_reader(run: Path, path: str, step: int) -> None:
    assert open_run(path).checkpoint.step == step
    assert open_run(path).logdir.model() == "lm.Some"
    stored = open_stored(path).description
    assert stored is not None and stored.step == step
    source = WarmStart.Params(checkpoint=path)
    assert open_source("start", source, print)[0].step == step
    assert open_run("run", path).checkpoint.step == step if path != "run" else True


def test_the_names_are_also_names_of_a_given_run(run: Path) -> None:
    assert [open_run("run", which).checkpoint.step for which in ("last", "best", "10")] == [
        30, 20, 10,
    ]  # fmt: skip


def test_what_exists_comes_first(run: Path) -> None:
    (run / "best").mkdir()
    assert checkpoint_paths.split("run/best") == ("run/best", None)
    assert checkpoint_paths.split("run/last/") == ("run", "last")
    assert checkpoint_paths.split("other/500") == ("other/500", None)  # no run
    assert checkpoint_paths.split("500") == ("500", None)


def test_the_best_is_the_one_of_the_goal_also_without_classes(tmp_path: Path) -> None:
    save(tmp_path / "run", metric="perplexity", goal="max")
    assert open_run(f"{tmp_path}/run/best").checkpoint.step == 30
    stored = open_stored(f"{tmp_path}/run/best").description
    assert stored is not None and stored.step == 30
    save(tmp_path / "declared", metric="perplexity")  # its goal is an attribute of the task's class
    assert open_run(f"{tmp_path}/declared/best").checkpoint.step == 20
    with pytest.raises(CheckpointError, match=r"of an earlier version.*Give the step instead"):
        open_stored(f"{tmp_path}/declared/best")
    for goal, step in {"max": 30, "min": 20}.items():
        save(tmp_path / goal, metric="perplexity", stored_goal=goal)
        found = open_stored(f"{tmp_path}/{goal}/best").description
        assert found is not None and found.step == step
    save(tmp_path / "other", metric="bleu", goal="max")
    for opened in (open_run, open_stored):
        with pytest.raises(CheckpointError, match=r"no checkpoint.* was evaluated by dev/bleu"):
            opened(f"{tmp_path}/other/best")


def test_a_step_that_is_not_there_is_reported_with_those_that_are(run: Path) -> None:
    for opened in (open_run, open_stored):
        with pytest.raises(CheckpointError, match=r"there is no checkpoint .*step_00000010, step"):
            opened("run/11")


def test_a_damaged_description_is_not_the_best(run: Path) -> None:
    (run / "checkpoints" / "step_00000020" / "checkpoint.json").write_text("{")
    assert open_run("run/best").checkpoint.step == 10
    stored = open_stored("run/best").description
    assert stored is not None and stored.step == 10


def test_the_best_is_one_of_those_evaluated_on_the_same_data_as_the_newest(run: Path) -> None:
    path = run / "checkpoints/step_00000030/checkpoint.json"
    described = json.loads(path.read_text())
    described["input"]["comparable_since"] = 20
    path.write_text(json.dumps(described))
    stored = open_stored("run/best").description
    assert stored is not None and stored.step == 30
    assert open_run("run/best").checkpoint.step == 30
