"""Commands as they are typed: by name, by path or as a module, whatever the shell finds."""

from __future__ import annotations

import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tekso.framework.commands import typed


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the programs of an environment, which is not on PATH."""
    folder = tmp_path / "a checkout" / ".venv" / "bin"
    folder.mkdir(parents=True)
    for name in ("python", "tekso-trainer"):
        program(folder / name)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(folder))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.chdir(tmp_path)
    return folder


def program(path: Path, text: str = "") -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)


def test_a_program_that_the_shell_finds_is_typed_by_its_name(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(programs))
    assert typed("tekso-trainer") == "tekso-trainer"


def test_a_program_below_the_working_directory_is_typed_by_its_relative_path(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(programs.parent.parent)
    assert typed("tekso-trainer") == ".venv/bin/tekso-trainer"
    assert typed("tekso-trainer", folder="/nowhere") == f"'{programs}/tekso-trainer'"
    monkeypatch.chdir(programs)
    assert typed("tekso-trainer") == "./tekso-trainer"


def test_a_program_elsewhere_is_typed_by_its_whole_path_and_quoted(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert shlex.split(typed("tekso-trainer")) == [str(programs / "tekso-trainer")]


def test_a_program_of_the_same_name_in_another_environment_is_not_meant(
    programs: Path, tmp_path: Path
) -> None:
    program(tmp_path / "bin" / "tekso-trainer")
    assert typed("tekso-trainer") == "'a checkout/.venv/bin/tekso-trainer'"


def test_a_program_that_is_not_installed_is_typed_as_a_module(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = "'a checkout/.venv/bin/python'"
    assert typed("tekso-new-task") == f"{python} -m tekso.tools.new_task"
    assert typed("tensorboard") == f"{python} -m tensorboard.main"
    monkeypatch.setenv("PATH", str(programs))
    assert typed("tekso-ckpt") == "python -m tekso.tools.ckpt"


def test_a_shell_runs_what_is_typed(programs: Path) -> None:
    program(programs / "tekso-ckpt", 'echo "given $*"')
    command = f"{typed('tekso-ckpt')} list"
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.stdout == "given list\n", done.stderr
