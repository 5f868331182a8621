"""The logdir: one experiment, one process at a time, and what was run."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import processes
import pytest

from tekso.framework.exit_codes import ExitCode, exit_code_of
from tekso.framework.experiment import Run, Tree
from tekso.framework.run.logdir import Logdir, LogdirError, LogdirLostError


def tree(**changes: object) -> Tree.Params:
    parts = {name: Run.Params() for name in ("task", "input", "learner", "execution")}
    return Tree.Params(**parts).set(dict(changes))


def test_params_and_their_changes_are_written_and_read_back(tmp_path: Path) -> None:
    logdir = Logdir(str(tmp_path / "run"))
    logdir.claim("lm.some.Model")
    changed = tree(**{"run.steps": 7})
    logdir.write_params("lm.some.Model", changed, tree())
    assert logdir.model() == "lm.some.Model"
    assert logdir.experiment() == ("lm.some.Model", changed)
    assert "run.steps : 1000 -> 7" in (tmp_path / "run" / "params.diff.txt").read_text()
    logdir.write_params("lm.some.Model", tree(), tree())
    assert (tmp_path / "run" / "params.diff.txt").read_text() == "as registered\n"


def test_every_command_is_kept(tmp_path: Path) -> None:
    logdir = Logdir(str(tmp_path))
    logdir.add_command(["tekso-trainer", "--set", "a=b c"])
    logdir.add_command(["tekso-trainer", "--steps=5"])
    lines = (tmp_path / "command.txt").read_text().splitlines()
    assert lines[1] == "tekso-trainer --set 'a=b c'" and lines[3] == "tekso-trainer --steps=5"
    assert lines[0].startswith("# ") and lines[0].endswith(os.getcwd())


def test_a_logdir_of_another_experiment_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    Logdir(str(tmp_path)).write_params("lm.some.Model", tree(), tree())
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(LogdirError, match=r"logdir of lm.some.Model, but the model is lm.other.M"):
        Logdir(str(tmp_path)).claim("lm.other.Model")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_start_that_failed_before_its_first_step_leaves_the_logdir_to_anybody(
    tmp_path: Path,
) -> None:
    Logdir(str(tmp_path)).write_params("h1.Houses", tree(), tree())
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "checkpoints" / "step_00000000").mkdir(parents=True)
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "arrays_train_00000000.json").write_text("{}")
    with pytest.raises(LogdirError, match=r"logdir of h1.Houses, but the model is h2.Houses"):
        Logdir(str(tmp_path)).claim("h2.Houses")  # it has a checkpoint
    (tmp_path / "checkpoints" / "step_00000000").rmdir()
    warnings: list[str] = []
    logdir = Logdir(str(tmp_path))
    logdir.claim("h2.Houses", warn=warnings.append)
    said = "is of h1.Houses, which ended before its first step: h2.Houses takes it"
    assert warnings == [f"{tmp_path} {said}"] and not (tmp_path / "assets").exists()
    logdir.write_params("h2.Houses", tree(), tree())
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    logdir.release()
    with pytest.raises(LogdirError, match=r"logdir of h2.Houses, but the model is h1.Houses"):
        Logdir(str(tmp_path)).claim("h1.Houses")


@pytest.mark.parametrize("content", [b"", b"\0" * 300, b"\xff\xfe# model: a", b"run.steps: 5\n"])
def test_damaged_params_are_named_and_written_again_by_training(
    tmp_path: Path, content: bytes
) -> None:
    logdir, warnings = Logdir(str(tmp_path)), list[str]()
    (tmp_path / "params.txt").write_bytes(content)
    for read in (logdir.model, logdir.experiment):
        with pytest.raises(LogdirError, match=r"params.txt is damaged.*Training with --model") as e:
            read()
        assert exit_code_of(e.value) == ExitCode.DAMAGED
    logdir.claim("m.M", warn=warnings.append)
    assert warnings == [f"{tmp_path}/params.txt is damaged, and is written again"]
    (tmp_path / "params.txt").write_bytes(b"# model: m.M\n\0" + content)
    with pytest.raises(LogdirError, match=r"params.txt cannot be read: .*Training with --model"):
        logdir.experiment()


def test_a_file_in_place_of_the_logdir_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    with pytest.raises(LogdirError, match=r"file cannot be a logdir: it is a file$"):
        Logdir(str(tmp_path / "file")).claim("lm.some.Model")
    message = rf"file/run cannot be a logdir: {tmp_path}/file is a file$"
    with pytest.raises(LogdirError, match=message):
        Logdir(str(tmp_path / "file" / "run")).claim("lm.some.Model")
    assert Logdir(str(tmp_path / "new" / "run")).problem() == Logdir(str(tmp_path)).problem() == ""


def test_a_file_system_without_a_disk_has_no_logdir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=0, free=0))  # /proc
    why = f"{tmp_path} is a file system without a disk"
    assert Logdir(f"{tmp_path}/new").problem() == f"{tmp_path}/new cannot be created: {why}"


CLAIM = """
import sys
from tekso.framework.run.logdir import Logdir
Logdir(sys.argv[1]).claim("m.M")
"""


def test_one_process_at_a_time_trains_in_a_logdir(tmp_path: Path) -> None:
    logdir = Logdir(str(tmp_path))
    logdir.claim("m.M")
    command = ["-c", CLAIM, tmp_path]
    refused = processes.run(command)
    with pytest.raises(LogdirError) as caught:
        Logdir(str(tmp_path)).claim("m.M")
    assert exit_code_of(caught.value) == ExitCode.LOGDIR_IN_USE
    assert f"another process (id {os.getpid()}) is training in {tmp_path}" in refused.stderr
    logdir.release()
    assert processes.run(command).returncode == 0
    Logdir(str(tmp_path)).claim("m.M")  # the lock went with that process


def test_a_file_system_without_locks_is_reported_and_the_newest_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    warnings: list[str] = []
    first, second = Logdir(str(tmp_path)), Logdir(str(tmp_path))
    first.claim("m.M", warn=warnings.append)
    first.check()
    assert f"the file system of {tmp_path} has no locks (No locks available)" in warnings[0]
    second.claim("m.M", warn=warnings.append)
    second.check()
    with pytest.raises(LogdirLostError, match="was replaced during the run"):
        first.check()
    assert sorted(os.listdir(tmp_path)) == [".lock"]


def test_a_new_logdir_of_a_run_that_failed_early_is_removed(tmp_path: Path) -> None:
    new = Logdir(str(tmp_path / "runs" / "new"))
    new.claim("a.B")
    (tmp_path / "runs" / "new" / "checkpoints").mkdir()
    new.remove_if_unused()
    assert not (tmp_path / "runs" / "new").exists()
    for name in ("params.txt", "checkpoints/step_00000001"):  # something is in it
        used = Logdir(str(tmp_path / name.replace("/", "_")))
        used.claim("a.B")
        (Path(used.path) / name).parent.mkdir(exist_ok=True)
        (Path(used.path) / name).touch()
        used.remove_if_unused()
        assert (Path(used.path) / name).exists()
    (tmp_path / "old").mkdir()  # it was there before
    old = Logdir(str(tmp_path / "old"))
    old.claim("a.B")
    old.remove_if_unused()
    assert (tmp_path / "old").exists()


def test_the_settings_of_a_run_are_those_that_flags_gave(tmp_path: Path) -> None:
    logdir = Logdir(str(tmp_path))
    assert logdir.settings() == set()
    changed = tree(**{"run.keep_last_checkpoints": 5})
    changed.set_text("run.early_stopping.patience", "2").set_text(
        "run.steps", "7", origin="--steps"
    )
    logdir.write_params("lm.some.Model", changed, tree())
    assert logdir.settings() == {"run.early_stopping.patience", "run.steps"}
    logdir.write_params("lm.some.Model", logdir.experiment()[1], tree())
    assert logdir.settings() == {"run.early_stopping.patience", "run.steps"}


def test_a_resumed_run_keeps_the_origins_of_its_params(tmp_path: Path) -> None:
    logdir, path = Logdir(str(tmp_path)), tmp_path / "params.txt"
    changed = tree(**{"run.keep_last_checkpoints": 5, "run.seed": 3})
    logdir.write_params("lm.some.Model", changed.set_text("run.steps", "7"), tree())
    first = path.read_text()
    assert "run.seed : 3  # " in first and "logdir_test.py:" in first
    logdir.write_params("lm.some.Model", logdir.experiment()[1], tree())
    assert path.read_text() == first
    resumed = logdir.experiment()[1].set_text("run.steps", "9", origin="--steps")
    path.write_text(first.replace("run.seed : 3", "run.seed : 4"))  # an origin of another value
    logdir.write_params("lm.some.Model", resumed, tree())
    expected = first.replace("run.steps : 7  # --set", "run.steps : 9  # --steps").splitlines()
    found = path.read_text().splitlines()
    assert [line for line in found if line not in expected] == ["run.seed : 3  # params.txt"]
