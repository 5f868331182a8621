"""Tests of `make` and `.ci/`: they create a missing environment, and explain failures."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that `make` needs, in a folder with a space in its name."""
    folder = tmp_path / "a checkout"
    folder.mkdir()
    for name in ("Makefile", "setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / ".ci", folder / ".ci")
    return folder


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return path


def run(folder: Path, *command: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    if path is not None:
        environment["PATH"] = f"{path}{os.pathsep}{environment['PATH']}"
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )


def installed(checkout: Path) -> Path:
    """Pretends that `make install` was run; returns the folder of its programs."""
    programs = checkout / ".venv" / "bin"
    for name in ("tekso-trainer", "pytest"):
        executable(programs / name, f'echo "{name} $*"\n')
    (checkout / ".venv" / ".installed").touch()
    return programs


def fake_python(path: Path, checkout: Path) -> Path:
    """A Python whose environments are empty, with a pip that only writes down its arguments.

    Of what pip installs there is only a `tekso-trainer`, which writes down its arguments, too. The
    pip fails if the file `no_<last argument>` exists; `tekso-trainer`, if `no_start` does.
    """
    log = checkout / "pip.log"
    return executable(
        path,
        f"""
if [ "$1 $2" = "-m venv" ]; then
    "{sys.executable}" -m venv --without-pip "$3" || exit 1
    [ -e "$3/bin/real" ] || mv "$3/bin/python" "$3/bin/real"
    rm -f "$3/bin/python"  # else a link, and written to what it points to
    cat > "$3/bin/python" <<'END'
#!/bin/sh
if [ "$1 $2" = "-m pip" ]; then
    shift 2; echo "$*" >> "{log}"
    if [ "$1" = check ]; then cat "{checkout}/problems" 2>/dev/null && exit 1; fi
    for last in "$@"; do :; done
    if [ -e "{checkout}/no_$last" ]; then echo "no $last"; exit 1; fi
    exit 0
fi
exec "$(dirname "$0")/real" "$@"
END
    cat > "$3/bin/tekso-trainer" <<'END'
#!/bin/sh
echo "tekso-trainer $*" >> "{log}"
if [ -e "{checkout}/no_start" ]; then echo "no start" >&2; exit 1; fi
END
    chmod +x "$3/bin/python" "$3/bin/tekso-trainer"
else
    exec "{sys.executable}" "$@"
fi
""",
    )


def test_make_alone_says_what_there_is(checkout: Path) -> None:
    result = run(checkout, "make")
    assert result.returncode == 0
    assert "make train MODEL=lm.python_source.Small" in result.stdout


def test_train_runs_the_default_experiment_in_a_folder_of_its_own(checkout: Path) -> None:
    installed(checkout)
    result = run(checkout, "make", "train")
    assert result.returncode == 0, result.stdout
    last = result.stdout.splitlines()[-1]
    assert last.startswith(
        "tekso-trainer --model=lm.python_source.Tiny --logdir=runs/lm.python_source.Tiny/20"
    )


def test_train_takes_model_logdir_and_arguments(checkout: Path) -> None:
    installed(checkout)
    result = run(checkout, "make", "train", "MODEL=a.B", "LOGDIR=runs/c", "ARGS=--steps=3")
    last = result.stdout.splitlines()[-1]
    assert last == "tekso-trainer --model=a.B --logdir=runs/c --steps=3"


def test_what_train_says_to_type_next_works_as_it_stands(checkout: Path) -> None:
    programs = installed(checkout)
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", checkout / ".venv"], check=True, timeout=120
    )
    says = (
        "import sys; from tekso.framework.run.logdir import Logdir; "
        "from tekso.framework.run.report import summary; "
        "print(*summary.next_commands(Logdir(sys.argv[1]), 7, imports=['mine']), sep='\\n')"
    )
    executable(
        programs / "tekso-trainer",
        'case "$*" in *--mode=*) echo "asked for $*"; exit;; esac\n'
        f'exec .venv/bin/python -c "{says}" "${{2#--logdir=}}"\n',
    )
    packages = os.pathsep.join([str(ROOT / ".typing"), sysconfig.get_path("purelib")])
    train = run(checkout, "env", f"PYTHONPATH={packages}", "make", "train", "LOGDIR=runs/one")
    lines = train.stdout.splitlines()
    (evaluate,) = [line for line in lines if "--mode=eval" in line]
    assert evaluate == "  .venv/bin/tekso-trainer --import=mine --logdir=runs/one --mode=eval"
    assert lines[-1].split()[-2:] == ["tensorboard.main", "--logdir=runs/one"], train.stdout
    pasted = run(checkout, "/bin/sh", "-c", evaluate)
    assert pasted.stdout == "asked for --import=mine --logdir=runs/one --mode=eval\n"


def programs_that_print(checkout: Path, *names: str) -> Path:
    """Pretends that everything is installed; each program prints its command."""
    programs = installed(checkout)
    for name in names:
        executable(programs / name, f'echo "{name} $*"\n')
    return programs


PARALLEL = "--numprocesses=2 --dist=loadfile --no-loadscope-reorder"


def test_test_runs_the_quick_tests_within_their_budget(checkout: Path) -> None:
    installed(checkout)
    result = run(checkout, "make", "test")
    assert result.stdout.splitlines()[-1] == f"pytest {PARALLEL} -m not slow --cpu-minutes=12"


def test_benchmarks_passes_its_arguments_on(checkout: Path) -> None:
    executable(installed(checkout) / "python", 'echo "python $*"\n')
    result = run(checkout, "make", "benchmarks", "ARGS=--only=transformer_small,pytorch --turns=5")
    wanted = "python -m benchmarks.run --only=transformer_small,pytorch --turns=5"
    assert result.stdout.splitlines()[-1] == wanted


def test_test_all_runs_the_quick_tests_then_lint_then_the_slow_tests(checkout: Path) -> None:
    programs_that_print(checkout, "ruff", "mypy", "lint-imports")
    result = run(checkout, "make", "test-all", "SOURCES=models tests", "PROCESSES=3")
    assert result.returncode == 0, result.stdout
    parallel = PARALLEL.replace("=2", "=3")
    printed = [line.strip() for line in result.stdout.splitlines() if ".venv" not in line]
    assert [line for line in printed if not line.startswith("make")] == [
        f"pytest {parallel} -m not slow --cpu-minutes=12",
        "ruff check models tests",
        "ruff format --check models tests",
        "mypy",
        "lint-imports",
        f"pytest {parallel} -m slow --cpu-minutes=28",
    ]


@pytest.mark.parametrize("broken", ["pytest", "ruff", "mypy", "lint-imports"])
def test_test_all_fails_with_any_of_its_parts(checkout: Path, broken: str) -> None:
    programs = programs_that_print(checkout, "ruff", "mypy", "lint-imports")
    executable(programs / broken, "exit 1\n")
    assert run(checkout, "make", "test-all").returncode != 0


def test_ci_run_ends_with_the_summaries(checkout: Path) -> None:
    programs = programs_that_print(checkout, "ruff", "mypy", "lint-imports")
    summaries = [f"===== {n} passed in 1.20s =====" for n in (3, 5)]
    choose = f'case "$*" in *"not slow"*) echo "{summaries[0]}";; *) echo "{summaries[1]}";; esac\n'
    executable(programs / "pytest", f'{choose}echo "a late note"\n')
    executable(programs / "pip", 'echo "pip $*"\n')
    result = run(checkout, ".ci/run")
    assert result.returncode == 0
    assert "pip install -q --no-deps tensorflow-text" in result.stdout
    assert result.stdout.splitlines()[-2:] == summaries


def test_ci_run_fails_with_the_tests(checkout: Path) -> None:
    summary = "===== 1 failed, 3 passed in 61.20s (0:01:01) ====="
    executable(installed(checkout) / "pytest", f'echo "{summary}"\nexit 1\n')
    result = run(checkout, ".ci/run")
    assert result.returncode != 0
    assert "tensorflow-text could not be installed" in result.stdout
    failed, last = result.stdout.splitlines()[-2:]
    assert failed.startswith("make test-all failed")
    assert last == summary


def test_ci_run_says_so_when_the_tests_break_off(checkout: Path) -> None:
    executable(installed(checkout) / "pytest", "kill -9 $$\n")
    result = run(checkout, ".ci/run")
    assert result.returncode != 0
    assert "did not run to their end" in result.stdout.splitlines()[-1]


def test_install_makes_a_venv(checkout: Path, tmp_path: Path) -> None:
    fake_python(tmp_path / "bin" / "python3.11", checkout)
    executable(tmp_path / "bin" / "nvidia-smi", "exit 9\n")
    result = run(checkout, "make", "install", path=tmp_path / "bin")
    assert result.returncode == 0, result.stdout
    pip, tensorflow, tekso, check, start = (checkout / "pip.log").read_text().splitlines()
    assert pip.endswith("--upgrade pip")
    assert "tensorflow" in tensorflow.split()[-1]
    assert tekso.endswith("--editable .[test]")
    assert check == "check"
    assert start.startswith("tekso-trainer --list")
    again = run(checkout, "make", "install", path=tmp_path / "bin")
    assert again.returncode == 0
    assert len((checkout / "pip.log").read_text().splitlines()) == 5  # nothing is installed again


def test_install_goes_on_with_the_pip_that_there_is(checkout: Path, tmp_path: Path) -> None:
    fake_python(tmp_path / "bin" / "python3.11", checkout)
    (checkout / "no_pip").touch()
    result = run(checkout, "make", "install", path=tmp_path / "bin")
    assert result.returncode == 0, result.stdout
    assert "pip could not be upgraded" in result.stdout
    assert "--editable .[test]" in (checkout / "pip.log").read_text()


@pytest.mark.parametrize(("missing", "message"), [(".[test]", "no .[test]"), ("start", "no start")])
def test_install_that_fails_is_repeated(
    checkout: Path, tmp_path: Path, missing: str, message: str
) -> None:
    fake_python(tmp_path / "bin" / "python3.11", checkout)
    (checkout / f"no_{missing}").touch()
    result = run(checkout, "make", "install", path=tmp_path / "bin")
    assert result.returncode != 0
    assert message in result.stdout
    assert not (checkout / ".venv" / ".installed").exists()
    (checkout / f"no_{missing}").unlink()
    assert run(checkout, "make", "install", path=tmp_path / "bin").returncode == 0
    assert (checkout / ".venv" / ".installed").exists()


def test_install_that_was_interrupted_starts_from_the_beginning(
    checkout: Path, tmp_path: Path
) -> None:
    fake_python(tmp_path / "bin" / "python3.11", checkout)
    (checkout / "no_.[test]").touch()
    assert run(checkout, "make", "install", path=tmp_path / "bin").returncode != 0
    package = checkout / ".venv" / "lib" / "python3.11" / "site-packages" / "tensorflow"
    package.mkdir()
    (package / "__init__.py").touch()  # without the rest of TensorFlow
    (checkout / "no_.[test]").unlink()
    result = run(checkout, "make", "install", path=tmp_path / "bin")
    assert result.returncode == 0, result.stdout
    assert "Installing tensorflow" in result.stdout
    assert not package.exists()


def test_install_again_keeps_what_is_installed(checkout: Path, tmp_path: Path) -> None:
    fake_python(tmp_path / "bin" / "python3.11", checkout)
    assert run(checkout, "make", "install", path=tmp_path / "bin").returncode == 0
    package = checkout / ".venv" / "lib" / "python3.11" / "site-packages" / "tensorflow"
    package.mkdir()
    (package / "__init__.py").touch()
    result = run(checkout, "make", "--always-make", "install", path=tmp_path / "bin")
    assert result.returncode == 0, result.stdout
    assert "Installing Tekso" in result.stdout
    assert "Installing tensorflow" not in result.stdout
    assert package.exists()


@pytest.mark.skipif(
    sysconfig.get_platform() != "linux-x86_64",
    reason="tensorflow-cpu is chosen on Linux x86_64; elsewhere tensorflow is the CPU build",
)
@pytest.mark.parametrize(
    ("nvidia_smi", "requirement"),
    [
        ("exit 9", "tensorflow-cpu==2.21.*"),
        ('echo "GPU 0: some name"', "tensorflow[and-cuda]==2.21.*"),
    ],
)
def test_install_takes_the_tensorflow_for_the_machine(
    checkout: Path, tmp_path: Path, nvidia_smi: str, requirement: str
) -> None:
    fake_python(tmp_path / "bin" / "python3.11", checkout)
    executable(tmp_path / "bin" / "nvidia-smi", nvidia_smi + "\n")
    result = run(checkout, "make", "install", path=tmp_path / "bin")
    assert f"Installing {requirement} in .venv: " in result.stdout
    assert (checkout / "pip.log").read_text().splitlines()[1].split()[-1] == requirement


def test_install_falls_back_to_python3(checkout: Path, tmp_path: Path) -> None:
    executable(tmp_path / "bin" / "python3.11", "exit 127\n")  # like a shim without its Python
    fake_python(tmp_path / "bin" / "python3", checkout)
    result = run(checkout, "make", "install", path=tmp_path / "bin")
    assert result.returncode == 0, result.stdout
    assert (checkout / ".venv" / "bin" / "real").exists()


def test_install_without_python_311_says_what_to_do(checkout: Path, tmp_path: Path) -> None:
    for name in ("python3.11", "python3", "python"):
        executable(tmp_path / "bin" / name, "exit 1\n")
    result = run(checkout, "make", "test", path=tmp_path / "bin")
    assert result.returncode != 0
    assert "Tekso needs Python 3.11 with its module venv" in result.stdout
    assert "make PYTHON=/path/to/python3.11" in result.stdout
    assert not (checkout / ".venv" / ".installed").exists()


def test_install_refuses_the_python_that_was_named(checkout: Path) -> None:
    result = run(checkout, "make", "test", "PYTHON=/nowhere/python3.11")
    assert result.returncode != 0
    assert "Tried: /nowhere/python3.11." in result.stdout


@pytest.mark.parametrize(
    ("problems", "code"),
    [
        ("tensorflow-text 2.21.1 requires tensorflow, which is not installed.\n", 0),
        ("rich 1.0 requires pygments, which is not installed.\n", 1),
        (
            "tensorflow-text 2.21.1 requires tensorflow, which is not installed.\n"
            "rich 1.0 requires pygments, which is not installed.\n",
            1,
        ),
    ],
)
def test_what_does_not_fit_together_stops_an_installation(
    checkout: Path, tmp_path: Path, problems: str, code: int
) -> None:
    fake_python(tmp_path / "bin" / "python3.11", checkout)
    (checkout / "problems").write_text(problems)
    result = run(checkout, ".ci/install", ".venv", "", "", path=tmp_path / "bin")
    assert result.returncode == code, result.stdout
    lines = [line for line in result.stdout.splitlines() if "requires" in line]
    assert lines == [line for line in problems.splitlines() if line.startswith("rich")]


def test_a_catalogue_that_fails_leaves_the_page_as_it_was(checkout: Path) -> None:
    executable(installed(checkout) / "python", "echo half a page\nexit 1\n")
    page = checkout / "docs" / "catalogue.md"
    page.parent.mkdir()
    page.write_text("before\n")
    assert run(checkout, "make", "catalogue").returncode != 0
    assert page.read_text() == "before\n"
    executable(checkout / ".venv" / "bin" / "python", "echo a page; echo\n")
    assert run(checkout, "make", "catalogue").returncode == 0
    assert page.read_text() == "a page\n"
