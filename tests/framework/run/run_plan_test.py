"""The plan of a run: its state, checkpoints and disk, what it resumes, and its problems."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from planned_runs import MODEL, planned, tree

from tekso.framework import registry, schedules
from tekso.framework.costs import stored_speeds
from tekso.framework.costs.stored_speeds import Condition
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.input.errors import InputError
from tekso.framework.input.input import ExampleInput
from tekso.framework.input.text_files import TextFiles
from tekso.framework.params import param
from tekso.framework.run import (
    checkpoint_files,
    checkpoint_size,
    divided_plan,
    input_globs,
    inspection,
    plan_text,
    run_start,
)
from tekso.framework.run.checkpoint_description import Description
from tekso.framework.run.divided_losses import Division
from tekso.framework.state import State
from tekso.framework.warm_start import WarmStart
from tekso.tasks.detection.voc import VocBoxes
from tekso.tasks.image.sources import ImageArrays


def test_state_and_checkpoint_have_the_bytes_of_weights_and_two_slots(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    assert plan.step is not None and plan.problem == "" and plan.problems == []
    # Adam has two slots for each weight, all float32; a checkpoint has a few counters too.
    assert plan.step.memory["weights"] == 4 * plan.weights
    assert plan.step.memory["slots"] == pytest.approx(8 * plan.weights, rel=1e-4)
    assert plan.step.memory["gradients"] == 4 * plan.weights
    assert plan.checkpoint_bytes > 12 * plan.weights
    assert plan.resumes_from is None and plan.checkpoints == 3 + 1 + 1
    # 6 operations for each token and weight of a product, and elementwise ops.
    tokens = 8 * tree().input.length
    assert 5 * tokens * plan.weights < plan.step.flops < 9 * tokens * plan.weights


def test_a_run_in_the_logdir_is_resumed(tmp_path: Path) -> None:
    save_fitting(tmp_path, tree(**{"run.steps": 20}), 12)
    plan = planned(tmp_path, tree(**{"run.steps": 20}), logdir=str(tmp_path))
    assert plan.resumes_from == 12 and plan.problems == []
    assert plan.changes == () and plan.warnings == ()
    assert "resumes from step 12 in" in plan_text.text(plan)
    lines = plan_text.text(plan).split("\n")
    (run,) = [number for number, line in enumerate(lines) if line.endswith(": 8 steps are left")]
    after = r" {14}about \S+s, without start, compilation and evaluations"
    assert re.fullmatch(after, lines[run + 1])


def test_checkpoints_that_were_best_by_an_earlier_metric_take_disk_space_of_their_own(
    tmp_path: Path,
) -> None:
    # The evaluation data changed after step 20, at which the best checkpoint was that of step 10.
    for step, loss, since in ((10, 1.0, -1), (20, 2.0, -1), (30, 5.0, 20), (40, 6.0, 20)):
        about = Description(
            step,
            MODEL,
            params="",
            metrics={"dev/loss": loss},
            input={"comparable_since": since},
        )
        folder = tmp_path / "checkpoints" / f"step_{step:08d}"
        folder.mkdir(parents=True)
        (folder / "checkpoint.json").write_text(about.to_json())
    plan = planned(tmp_path, logdir=str(tmp_path))
    # Step 10, the three newest, the best since step 20, and the one that is being written.
    assert (plan.checkpoints, plan.existing_checkpoints) == (1 + 3 + 1 + 1, 4)
    assert plan.new_disk_bytes == 2 * plan.checkpoint_bytes
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir())[0].endswith("10")


@pytest.mark.parametrize("model", [MODEL, "image.digits.Mlp", "lm.text_files.Bytes"])
def test_the_size_of_a_checkpoint_has_that_of_its_description_and_its_index(
    model: str, tmp_path: Path
) -> None:
    found = registry.get(model)().tree().set({"*num_layers": 1} if "Mlp" not in model else {})
    task = inspection.task_of(found)
    learner = schedules.end_with_run(found.learner, found.run.steps).instantiate()
    specs = State(task.specs(), learner.slots(task.specs())).keyed()
    described = Description(
        step=1,
        model=model,
        params=found.to_text(),
        task=task.params.to_text(),
        metrics={"train/loss": 0.123},
        tensors={key: spec.described() for key, spec in specs.items()},
    )
    state = {key: np.zeros(spec.shape, spec.dtype) for key, spec in specs.items()}
    checkpoint_files.write(str(tmp_path / "checkpoint"), state, described)
    written = sum(path.stat().st_size for path in (tmp_path / "checkpoint").iterdir())
    tensors = sum(spec.size_bytes for spec in specs.values())
    size = checkpoint_size.size_bytes(model, found, task, specs)
    assert size - tensors == pytest.approx(written - tensors, rel=0.1)


def test_a_new_run_needs_the_checkpoints_of_its_warm_start(tmp_path: Path) -> None:
    found = tree(**{"run.warm_start": {"teacher": WarmStart.Params()}})
    assert planned(tmp_path, found).problems == [
        "run.warm_start.teacher.checkpoint is not set: name a run"
    ]
    found.set({"run.warm_start": {"teacher": WarmStart.Params(checkpoint="none")}})
    (problem,) = planned(tmp_path, found).problems
    assert problem.startswith("run.warm_start.teacher.checkpoint is 'none': there is no checkpoint")
    save_fitting(tmp_path, found, 12)  # a resumed run reads its own
    assert planned(tmp_path, found, logdir=str(tmp_path)).problems == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"metric": "nope", "goal": "max"},
            r"'nope', but an evaluation of eval_inputs.dev reports ",
        ),
        ({"metric": "perplexty", "goal": "min"}, r"; did you mean perplexity\?"),
        ({"metric": "nope"}, "does not declare whether larger or smaller values are better"),
        ({"metric": "loss"}, ""),
        ({"metric": "bits_per_byte"}, ""),
    ],
)
def test_the_metric_of_early_stopping_is_checked(
    settings: dict[str, str], said: str, tmp_path: Path
) -> None:
    paths = {f"run.early_stopping.{name}": value for name, value in settings.items()}
    plan = planned(tmp_path, tree(**{"run.early_stopping.patience": 2, **paths}))
    assert bool(plan.problems) == bool(said)
    assert all("run.early_stopping.metric" in problem for problem in plan.problems)
    assert re.search(said, "".join(plan.problems))


def test_the_checkpoints_of_a_resumed_run_are_on_the_disk_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = planned(tmp_path).checkpoint_bytes
    monkeypatch.setattr(
        shutil, "disk_usage", lambda folder: SimpleNamespace(total=1, free=3 * size)
    )
    assert "5 checkpoints need" in planned(tmp_path).problems[0]
    save_fitting(tmp_path, tree(), 4)
    assert ", 1 exists; " in plan_text.text(planned(tmp_path, logdir=str(tmp_path)))
    save_fitting(tmp_path, tree(), 8, 12)
    plan = planned(tmp_path, logdir=str(tmp_path))
    assert plan.problems == [] and plan.new_disk_bytes == 2 * size
    assert ", 3 exist; " in plan_text.text(plan)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(total=1, free=size))
    assert "5 checkpoints need" in planned(tmp_path, logdir=str(tmp_path)).problems[0]
    # Without an evaluation there is no best checkpoint.
    assert planned(tmp_path, tree(eval_inputs={})).checkpoints == 3 + 1


def save_fitting(tmp_path: Path, found: Any, *steps: int) -> list[Path]:
    """Writes checkpoints of zeros that fit a tree; returns their folders."""
    task = inspection.task_of(found)
    learner = schedules.end_with_run(found.learner, found.run.steps).instantiate()
    specs = State(task.specs(), learner.slots(task.specs())).keyed()
    state = {key: np.zeros(spec.shape, spec.dtype) for key, spec in specs.items()}
    (tmp_path / "checkpoints").mkdir(parents=True, exist_ok=True)
    paths = [tmp_path / "checkpoints" / f"step_{step:08d}" for step in steps]
    for step, path in zip(steps, paths, strict=True):
        checkpoint_files.write(str(path), state, Description(step, MODEL, params=found.to_text()))
    return paths


def test_a_checkpoint_that_does_not_fit_the_changed_model_is_a_problem(tmp_path: Path) -> None:
    (path,) = save_fitting(tmp_path, tree(), 12)
    changed = tree(**{"task.model.stack.num_layers": 1})
    plan = planned(tmp_path, changed, logdir=str(tmp_path))
    (problem,) = plan.problems
    assert problem.startswith(f"{path} cannot be restored: the checkpoint does not fit the model")
    (line,) = plan.changes
    assert line.startswith("task.model.stack.num_layers : 2 -> 1")
    assert f"changed since then: {line}"[:40] in plan_text.text(plan)
    assert plan_text.record(plan)["changes"] == [line]
    # Training ends before it restores a checkpoint after its last step.
    changed.set({"run.steps": 11})
    assert planned(tmp_path, changed, logdir=str(tmp_path)).problems == []


def test_a_warm_start_that_does_not_fit_the_model_is_a_problem(tmp_path: Path) -> None:
    save_fitting(tmp_path, tree(), 12)
    same = tree(**{"run.warm_start": {"main": WarmStart.Params(checkpoint=str(tmp_path))}})
    assert planned(tmp_path, same).problems == []
    other = same.copy().set({"task.model.dim": 32, "task.model.stack.layer.input_dim": 32})
    (problem,) = planned(tmp_path, other).problems
    assert problem.startswith("the warm start does not fit the model:\n  ")
    assert not (tmp_path / "none").exists()


def test_a_damaged_checkpoint_is_skipped(tmp_path: Path) -> None:
    first, newest = save_fitting(tmp_path, tree(), 10, 12)
    (data,) = newest.glob("tensors.data*")
    os.truncate(data, 100)
    plan = planned(tmp_path, tree(**{"run.steps": 20}), logdir=str(tmp_path))
    assert (plan.resumes_from, plan.existing_checkpoints, plan.problems) == (10, 1, [])
    assert ": 10 steps are left\n" in plan_text.text(plan)
    (line,) = plan.warnings
    assert line.startswith(f"skipped the damaged checkpoint {newest}: tensors.data-00000-of-00001")
    assert "skipped the damaged checkpoint" in plan_text.text(plan)
    assert newest.exists()  # nothing is renamed
    (data,) = first.glob("tensors.data*")
    os.truncate(data, 100)
    plan = planned(tmp_path, logdir=str(tmp_path))
    assert plan.resumes_from is None and "are damaged" in plan.problems[0]
    shown = " ".join(plan_text.text(plan).split())
    assert "run none, because no checkpoint in " in shown and "new run" not in shown


@pytest.mark.parametrize(
    ("path", "value", "at_least"),
    [
        ("input.batch_size", 0, 1),
        ("eval_inputs.dev.max_batches", 0, 1),
        ("run.log_every_steps", 0, 1),
        ("run.steps", -1, 0),
    ],
)
def test_numbers_that_training_rejects_are_problems(
    path: str, value: int, at_least: int, tmp_path: Path
) -> None:
    plan = planned(tmp_path, tree(**{path: value}), searches=True)
    assert plan.problems == [f"{path} is {value}, but must be at least {at_least}"]
    assert plan.step is None and plan_text.record(plan)["ok"] is False
    assert f"problem: {plan.problems[0]}" in plan_text.text(plan)


@pytest.mark.parametrize(
    ("model", "path"),
    [
        ("multi.cldr_and_python.Shared", "input.inputs.lm.batch_size"),
        ("multi.cldr_and_python.Shared", "eval_inputs.lm_dev.input.batch_size"),
        ("lm.python_source.Tiny", "input.length"),
    ],
)
def test_numbers_of_all_inputs_are_checked(model: str, path: str) -> None:
    found = registry.get(model)().tree().set({path: 0})
    assert run_start.params_problems(found) == [f"{path} is 0, but must be at least 1"]
    found.set({path: 10**20})
    (problem,) = run_start.params_problems(found)
    assert problem == f"{path} is {10**20}, but must be at most 2,147,483,647"


def test_a_file_in_place_of_the_logdir_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    plan = planned(tmp_path, logdir=f"{tmp_path}/file")
    assert plan.problems == [f"{tmp_path}/file cannot be a logdir: it is a file"]


def test_towers_that_training_rejects_are_a_problem(tmp_path: Path) -> None:
    (problem,) = planned(tmp_path, tree(**{"execution.towers": -1})).problems
    assert problem.startswith("execution.towers is -1, which does not divide the 8 examples")
    assert planned(tmp_path, tree(**{"execution.towers": 2})).problems == []


def test_globs_that_match_no_file_are_problems(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    found = registry.get("lm.text_files.Bytes")().tree()
    found.set({"input.files": f"{tmp_path}/*.txt", "input.length": 16})
    assert run_start.missing_files(found) == []
    missing = f"{tmp_path}/nothing/*.txt"
    found.set({"input.files": missing})
    (problem,) = run_start.missing_files(found)
    assert problem.startswith(f"input.files: nothing matches '{missing}'")
    plan = planned(tmp_path, found)
    assert plan.problems == [problem] and plan.step is not None
    pairs = registry.get("mt.text_files.Base")().tree()
    pairs.set({"input.corpus.source_files": f"{tmp_path}/a.txt"})
    pairs.set({"input.corpus.target_files": missing, "input.corpus.test_source_files": missing})
    (problem,) = run_start.missing_files(pairs)  # there is no evaluation of the split test
    assert problem.startswith("input.corpus.target_files: nothing matches")


class Formatted(ExampleInput):
    """An input of the user whose `files` is no glob."""

    class Params(ExampleInput.Params):
        """Params of Formatted."""

        files: str = param("Formatted by the class.", default="numbers.{split}.tsv")


class OtherDefault(TextFiles):
    """An input of the user with another default of a field of Tekso."""

    class Params(TextFiles.Params):
        """Params of OtherDefault."""

        files: str = param("Globs.", default="nosuch/*.txt")


def test_files_of_the_class_of_a_user_are_no_globs() -> None:
    found = registry.get("lm.text_files.Bytes")().tree()
    corpus = found.input.corpus = OtherDefault.Params()
    (problem,) = run_start.missing_files(found)
    assert problem.startswith("input.corpus.files: nothing matches 'nosuch/")
    corpus.files = ""
    found.input = Formatted.Params()
    assert run_start.missing_files(found) == []


@pytest.mark.parametrize(
    ("key", "path"),
    [
        ("lm.text_files.Bytes", "input.corpus.files"),
        ("mt.text_files.Base", "input.corpus.source_files"),
    ],
)
def test_files_that_are_not_set_are_a_problem_as_in_training(
    tmp_path: Path, key: str, path: str
) -> None:
    found = registry.get(key)().tree()
    (problem,) = input_globs.unset(found)
    assert problem.startswith(f"{path} is empty: set the files ")
    assert planned(tmp_path, found).problems == [problem]
    with pytest.raises(InputError) as caught:
        found.input.instantiate(seed=0)
    assert str(caught.value) == problem
    name = "input.files" if "input.files" in found else path  # `files` replaces the corpus
    found.set({name: str(tmp_path / "a.txt")})
    assert not any(one.startswith(path) for one in input_globs.unset(found))


def test_settings_of_a_source_count_only_if_it_would_refuse_them() -> None:
    class Own(ImageArrays):
        def load(self, split: Any) -> Any:
            return {}

    assert Own.unset(Own.Params(), "train") == ""
    assert ImageArrays.unset(ImageArrays.Params(), "train").startswith(
        "file is empty: set the .npz"
    )
    assert ImageArrays.unset(ImageArrays.Params(dev_file="a.npz"), "dev") == ""
    assert "name the classes" in VocBoxes.unset(VocBoxes.Params(), "train")
    assert "test_files is empty" in VocBoxes.unset(VocBoxes.Params(classes=["a"]), "test")


def test_a_wrong_metric_of_the_best_checkpoint_is_a_problem(tmp_path: Path) -> None:
    plan = planned(tmp_path, tree(**{"run.keep_best.metric": "nope"}))
    (problem,) = plan.problems
    assert "run.keep_best.metric" in problem and "does not declare whether larger" in problem
    assert plan_text.record(plan)["problems"] == [problem]
    unused = {"run.keep_best.metric": "nope", "run.keep_best.goal": "max", "run.keep_best.count": 0}
    assert planned(tmp_path, tree(**unused)).problems == []
    (problem,) = planned(tmp_path, tree(**{"run.keep_best.eval_input": "nope"})).problems
    assert problem.startswith("run.keep_best.eval_input is 'nope', but the evaluation inputs are")


def test_too_little_memory_and_disk_are_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 10_000_000
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(total=1, free=free))
    plan = planned(tmp_path, tree(**{"input.batch_size": 8 * 1024}))
    memory, disk = plan.problems
    assert "of memory per device, but cpu has 4 GB" in memory
    assert "5 checkpoints need" in disk and "10 MB are free" in disk
    assert plan.free_bytes == free and plan.disk_bytes == 5 * plan.checkpoint_bytes
    # Checkpoints that are there already need no more space.
    save_fitting(tmp_path, tree(), *range(4))
    free = plan.checkpoint_bytes
    assert planned(tmp_path, logdir=str(tmp_path)).problems == []


def test_devices_that_share_a_memory_need_room_for_all_of_them(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    assert plan.step is not None
    shared = dataclasses.replace(plan.step, sharing_devices=2)
    for times, fits in ((2.0, True), (1.9, False)):
        device = dataclasses.replace(plan.device, memory_bytes=times * plan.step.total_bytes)
        found = dataclasses.replace(plan, step=shared, device=device)
        assert found.fits(shared) is fits and (found.problems == []) is fits


def test_an_unknown_device_type_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ExecutionError, match="'gpu'; name the model of the device; there"):
        planned(tmp_path, device="gpu")


def test_a_plan_says_that_other_programs_use_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = Condition(2.5, is_slow=True, measured_busy=True)
    monkeypatch.setattr(stored_speeds, "_read", {"machine": busy})
    plan = planned(tmp_path)
    assert plan.condition == Condition()  # the plan is for another device
    assert "2.5 times" not in plan_text.text(plan)
    plan = dataclasses.replace(plan, condition=busy)
    assert "machine     other programs used this machine when its" in plan_text.text(plan)
    assert "this machine is 2.5 times as slow now" in " ".join(plan_text.text(plan).split())
    assert plan_text.record(plan)["machine"] == {
        "slowdown": 2.5, "is_slow": True, "measured_busy": True,
    }  # fmt: skip


def test_a_loss_that_devices_compute_otherwise_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = divided_plan.DividedStep("another loss", ("not checked",))
    divisions = []
    monkeypatch.setattr(
        divided_plan, "find", lambda _, __, division, **___: divisions.append(division) or found
    )
    plan = planned(tmp_path, num_devices=2)
    assert divisions == [Division(2)]
    assert plan.problems == ["another loss"] and plan.warnings == ("not checked",)
