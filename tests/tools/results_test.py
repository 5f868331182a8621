"""Tests of tekso-results, and of what --list shows of it, on logdirs of a few lines."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tekso.framework import registry
from tekso.framework.exit_codes import ExitCode
from tekso.framework.params import Params, param
from tekso.framework.run import inspection, quiet_tensorflow
from tekso.framework.run import results as stored
from tekso.framework.run.checkpoint_description import Description
from tekso.framework.run.logdir import Logdir
from tekso.tools import results

MODEL = "lm.python_source.Tiny"
METRICS = {"dev/loss": 1.2345678, "dev/bits_per_byte": 1.75}


def write(folder: Path, *, step: int, metrics: dict[str, float], settings: Any = ()) -> Logdir:
    tree = registry.get(MODEL)().tree()
    tree.set({"run.steps": 4, "run.log_every_steps": 2, **dict(settings)})
    logdir = Logdir(str(folder))
    logdir.write_params(MODEL, tree, registry.get(MODEL)().tree())
    description = Description(
        step, MODEL, tree.to_text(), metrics=metrics, created="2026-01-02T03:04:05Z",
        versions={"tensorflow": "2.21.0"}, conditions={"devices": "1 CPU", "processor": "Fast"},
    )  # fmt: skip
    checkpoint = folder / "checkpoints" / f"step_{step:08d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "checkpoint.json").write_text(description.to_json())
    (folder / "checkpoints" / "step_99999999").mkdir()  # without a description: interrupted
    spent = {"start": 1.0, "step": 3.0, "input": 1.0, "evaluation": 2.0}
    older = checkpoint.with_name("step_00000001")
    older.mkdir()
    (older / "checkpoint.json").write_text(
        dataclasses.replace(description, step=1, metrics={"dev/loss": 9.0}).to_json()
    )
    rows = [
        {"step": 1, "split": "train", "tokens_seen": 200.0, "seconds": {"start": 1.0}},
        {"step": 2, "split": "train", "loss": 3.0, "tokens_seen": 400.0, "seconds": spent},
        {"step": 4, "split": "dev", "loss": 1.2, "tokens_seen": 50.0, "seconds": spent},
        {"step": 6, "split": "train", "tokens_seen": 999.0, "seconds": {"start": 99.0}},
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return logdir


def test_a_result_has_what_the_trainer_wrote(tmp_path: Path) -> None:
    logdir = write(tmp_path / "run", step=4, metrics=METRICS)
    output = tmp_path / "results"
    assert results.main(["tekso-results", logdir.path, f"--output={output}"]) == ExitCode.OK
    found = json.loads((output / f"{MODEL}.json").read_text())
    assert found["metrics"] == {"dev/loss": 1.23457, "dev/bits_per_byte": 1.75}
    assert (found["step"], found["date"]) == (4, "2026-01-02")
    assert (found["seen"], found["seen_per_second"]) == (400.0, 100.0)  # up to step 4
    assert found["changes"] == ["run.steps : 1500 -> 4"]  # and not run.log_every_steps
    assert stored.figures(found) == "dev: loss 1.235, bits_per_byte 1.75"
    assert stored.cost(found) == (
        "4 steps, 7.0s, 100 tokens/s, Fast, 1 CPU, TensorFlow 2.21.0, 2026-01-02"
    )


@pytest.mark.parametrize(
    ("others", "beside"),
    [(6.3, "1 CPU, beside other programs (0.9 of 2 cores), T"), (1.3, "1 CPU, T")],
)
def test_a_result_says_whether_other_programs_used_the_machine(
    others: float, beside: str, tmp_path: Path
) -> None:
    logdir = write(tmp_path / "run", step=4, metrics=METRICS)
    path = Path(logdir.metrics)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row, share in zip(rows, (0.1, 0.5, 1.0, 9.0), strict=True):  # the last is of a later step
        row["machine"] = {"cores": 2, "seconds": 7.0 * share, "others_cpu_seconds": others * share}
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    result = stored.result_of(logdir, registry.get(MODEL)().tree())
    assert result["machine"] == {"cores": 2, "seconds": 7.0, "others_cpu_seconds": others}
    assert f", {beside}" in stored.cost(result)


def test_paths_of_a_machine_are_stored_as_names(tmp_path: Path) -> None:
    settings = {"input.cache_dir": str(tmp_path / "runs" / "first")}
    logdir = write(tmp_path / "run", step=4, metrics=METRICS, settings=settings)
    registered = registry.get(MODEL)().tree()
    result = stored.result_of(logdir, registered)
    assert str(tmp_path) not in json.dumps(result)
    assert any(line.endswith('"first"') for line in result["params"])
    assert any("first" in line for line in result["changes"])
    assert stored.is_current(result, registered)
    fixed = {"input.cache_dir": "/registered/folder"}
    logdir = write(tmp_path / "other", step=4, metrics=METRICS, settings=fixed)
    same = registry.get(MODEL)().tree().set(fixed)
    assert any("/registered/folder" in line for line in stored.result_of(logdir, same)["params"])


class Places(Params):
    """Paths of files."""

    path: str = param("A path.", default="")
    paths: list[str] = param("Several.", default=[])
    by_name: dict[str, str] = param("Paths by name.", default={})


@pytest.mark.parametrize(
    ("given", "stored_as"),
    [
        ("/a/b/c.txt", "c.txt"),
        ("/a/b/", "b"),
        ("~/b.txt", "b.txt"),
        ("../b.txt", "b.txt"),
        ("b/c.txt", "b/c.txt"),
        ("/", "/"),
    ],
)
def test_files_outside_of_the_folder_are_stored_by_their_names(given: str, stored_as: str) -> None:
    tree = Places(path=given, paths=["x/y", given], by_name={"one": given})
    found = stored._portable(Places(), tree)
    assert (found.path, found.paths) == (stored_as, ["x/y", stored_as])
    assert found.by_name == {"one": stored_as}
    assert tree.path == given  # the tree itself stays


def test_runs_without_a_final_evaluation_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = write(tmp_path / "good", step=4, metrics=METRICS)
    for name, step, metrics, why in (
        ("short", 3, METRICS, "is not finished: its last checkpoint is of step 3 of 4"),
        ("silent", 4, {}, "has no evaluation at its last step 4"),
    ):
        bad = write(tmp_path / name, step=step, metrics=metrics)
        arguments = [good.path, bad.path, f"--output={tmp_path / 'results'}"]
        assert results.main(["tekso-results", *arguments]) == ExitCode.FAILED
        assert why in capsys.readouterr().err
    assert results.main(["tekso-results", str(tmp_path)]) == ExitCode.WRONG_USAGE
    assert not (tmp_path / "results").exists()


def test_two_runs_of_an_experiment_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [write(tmp_path / name, step=4, metrics=METRICS).path for name in ("a", "b")]
    arguments = [*paths, f"--output={tmp_path / 'results'}"]
    assert results.main(["tekso-results", *arguments]) == ExitCode.WRONG_USAGE
    error = capsys.readouterr().err
    assert f"{paths[1]} is a second run of {MODEL}: an experiment has one result" in error
    assert not (tmp_path / "results").exists()


def test_tensorflow_is_imported_quietly_before_a_missing_run_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported: list[str] = []
    monkeypatch.setattr(quiet_tensorflow, "import_tensorflow", lambda: imported.append("quietly"))
    assert results.main(["tekso-results", str(tmp_path / "none")]) == ExitCode.WRONG_USAGE
    assert imported == ["quietly"]


def test_a_run_that_ended_early_is_finished(tmp_path: Path) -> None:
    early = {"run.early_stopping.patience": 1}
    logdir = write(tmp_path / "run", step=3, metrics=METRICS, settings=early)
    registered = registry.get(MODEL)().tree()
    with pytest.raises(stored.NoResultError, match="is not finished"):
        stored.result_of(logdir, registered)
    with (tmp_path / "run" / "metrics.jsonl").open("w") as file:
        for step, loss in ((1, 1.0), (3, 2.0)):
            file.write(json.dumps({"step": step, "split": "dev", "loss": loss}) + "\n")
            seen = {"step": 1, "split": "train", "tokens_seen": 200.0}
            file.write(json.dumps(seen) + "\n")
    with (tmp_path / "run" / "progress.jsonl").open("w") as file:
        for step in (2, 3, 4):  # the last one is of steps that were lost
            seen = {"step": step, "split": "train", "tokens_seen": 200.0 * step}
            file.write(json.dumps(seen) + "\n")
    result = stored.result_of(logdir, registered)
    assert (result["step"], result["seen"]) == (3, 600.0)  # which no logged step has


def test_the_list_shows_it_and_says_when_params_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "my_results"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "own.py").write_text(
        "from tekso.framework.registry import register\n"
        "from tekso.params.lm.python_source import Tiny\n\n\n"
        "@register\nclass Mine(Tiny):\n    '''Mine.'''\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        registry.import_package("my_results")
        (entry,) = registry.list_experiments("my_results.own.Mine")
        assert inspection.list_record(entry)["result"] is None
        logdir = write(tmp_path / "run", step=4, metrics=METRICS)
        result = {**stored.result_of(logdir, entry.cls().tree()), "model": entry.key}
        stored.write(result, str(package / "results"))
        shown = " ".join(inspection.list_text([inspection.list_record(entry)]).split())
        assert "measured: dev: loss 1.235, bits_per_byte 1.75; 4 steps, 7.0s" in shown
        changed = entry.cls().tree().set({"input.batch_size": 3})
        monkeypatch.setattr(entry.cls, "tree", lambda self: changed)
        shown = " ".join(inspection.list_text([inspection.list_record(entry)]).split())
        assert "measured (before its Params changed): dev" in shown
        stored.write({**result, "changes": ["run.steps : 4 -> 8"]}, str(package / "results"))
        shown = " ".join(inspection.list_text([inspection.list_record(entry)]).split())
        assert shown.endswith("(run.steps : 4 -> 8)")
        for text in ('{"model": ', "[]", '{"metrics": {}}'):
            (package / "results" / "my_results.own.Mine.json").write_text(text)
            record = inspection.list_record(entry)
            assert record["total_weights"] > 0
            assert "Mine.json is damaged: write it again" in inspection.list_text([record])
    finally:
        registry._ENTRIES.pop("my_results.own.Mine", None)
        sys.modules.pop("my_results.own", None)


def test_the_list_shows_figures_that_are_not_finite() -> None:
    assert stored.figures({"metrics": {"dev/loss": None, "dev/accuracy": 0.5}}) == (
        "dev: loss nan, accuracy 0.5"
    )
