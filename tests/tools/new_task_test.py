"""tekso-new-task: the package that it writes trains and passes its tests; names are checked."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sysconfig
from pathlib import Path

import processes
import pytest

from tekso.tools import new_task

ROOT = Path(__file__).resolve().parents[2]


def run(*words: str) -> int:
    return new_task.main(["tekso-new-task", *words])


def python(*words: str, cwd: Path, stdin: str = "") -> str:
    done = processes.run(words, cwd=cwd, input=stdin)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that was just made, in a folder that is the working directory."""
    monkeypatch.chdir(tmp_path)
    assert run("numerals") == 0
    return tmp_path / "numerals"


def test_the_package_is_written_whole_and_in_its_name(made: Path) -> None:
    names = {path.name for path in made.iterdir()}
    assert names == {
        "README.md", "__init__.py", "data.py", "data_test.py", "experiments.py",
        "experiments_test.py", "layers.py", "layers_test.py",
    }  # fmt: skip
    assert [path.name for path in made.parent.iterdir()] == ["numerals"]
    for path in made.iterdir():
        assert "PACKAGE" not in path.read_text(), path


def test_a_folder_elsewhere_is_named_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("far/away/numerals") == 0
    assert (tmp_path / "far" / "away" / "numerals" / "data.py").exists()
    printed = capsys.readouterr().out
    assert f"cd {tmp_path}/far/away" in printed
    assert "--import=numerals --model=numerals.experiments.Tiny" in printed


def test_it_keeps_the_style_of_the_project(made: Path) -> None:
    ruff = str(Path(sysconfig.get_path("scripts")) / "ruff")
    config = f"--config={ROOT / 'pyproject.toml'}"
    # In a project of its own, its tests have docstrings or not, and its imports are sorted alike.
    words = ["--no-cache", config, "--extend-ignore=D103,I001", str(made)]
    for command in (["check", *words], ["format", "--check", "--no-cache", config, str(made)]):
        done = subprocess.run([ruff, *command], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_its_own_tests_pass(made: Path) -> None:
    printed = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "numerals", cwd=made.parent)
    assert re.search(r"\b9 passed", printed), printed


@pytest.mark.slow
def test_the_commands_of_its_readme_work_and_it_learns_what_it_is_for(made: Path) -> None:
    short = ["--steps=2", "--set=task.scoring=None", "--set=execution.xla=none"]
    commands = re.findall(r"^tekso-trainer .*$", (made / "README.md").read_text(), re.MULTILINE)
    assert len(commands) == 7
    for command in commands:
        words = ["-m", "tekso.tools.trainer", *shlex.split(command)[1:]]
        is_variant = "--logdir=runs/wide" in words or "--logdir=runs/two" in words
        python(*words, *(short if is_variant else []), cwd=made.parent)
    (decode,) = re.findall(r"tekso-decode (.*)$", (made / "README.md").read_text(), re.MULTILINE)
    printed = python(
        "-m", "tekso.tools.decode", *shlex.split(decode), cwd=made.parent, stdin="365\n"
    )
    assert printed.count("0 ||| ") == 2
    rows = [json.loads(line) for line in (made.parent / "runs/tiny/metrics.jsonl").open()]
    (first, last) = [row for row in rows if row["split"] == "dev"]
    assert last["loss"] < first["loss"] < 1.0
    assert last["loss"] < 0.1 and last["bleu"] > 80


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the name of the package is missing: want one, as in"),
        (["a", "b"], "'a b' are several"),
        (["my-task"], "'my-task' is no name that Python can import; did you mean my_task?"),
        (["2nd"], "did you mean _2nd?"),
        (["größe"], "no name that Python can import"),
        (["lambda"], "'lambda' is a word of Python"),
        (["there"], "there exists: give another name"),
        (["json"], "json is a module of Python itself"),
        (["numpy"], "numpy is a module of the installed numpy"),
        (["deep/tekso"], "tekso is the name of Tekso"),
        (["beside"], "beside is the module"),
        (["--name=x"], "there is no flag --name"),
    ],
)
def test_a_name_that_cannot_be_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "beside.py").touch()
    assert run(*words) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"there", "beside.py"}


def test_an_error_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert run("file/numerals") == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
