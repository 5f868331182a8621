"""Every command in README.md and docs/ works.

The commands of a document are run one after the other in an empty folder, as a reader would, after
its Python blocks that begin with `# path/to/file.py` were written there. `HOW` says for each kind
of command how it is run or which test runs it. A command that no line of `HOW` knows fails.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import processes
import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TIMEOUT_S = 300


@dataclass(frozen=True)
class Run:
    """The command is run as it stands, with more arguments that make it short."""

    arguments: str = ""


@dataclass(frozen=True)
class TestedBy:
    """The command cannot run here (it needs a network, …); a test does what it does."""

    __test__ = False

    test: str  # file::function


SHORT = "--steps=2"

# Whole commands, as regular expressions; the first that matches counts.
HOW: list[tuple[str, Run | TestedBy]] = [
    (r"make train", Run(f"ARGS={SHORT}")),
    (r"make( test| install)?", Run()),
    (r"python3.11 -m venv \.venv", TestedBy("tests/make_test.py::test_install_makes_a_venv")),
    (r"\. \.venv/bin/activate", TestedBy("tests/make_test.py::test_install_makes_a_venv")),
    (
        r"pip install tensorflow-cpu",
        TestedBy("tests/packaging_test.py::test_required_is_the_tensorflow_that_is_installed"),
    ),
    (
        r"pip install -e '\.\[test\]'",
        TestedBy("tests/packaging_test.py::test_editable_installation_imports_the_source"),
    ),
    (
        r"tekso-trainer .*--process=.*",
        TestedBy(
            "tests/framework/execution/mesh/processes_test.py"
            "::test_lost_process_is_named_and_the_same_command_goes_on"
        ),
    ),
    (
        r"tekso-(worker --address|trainer .*execution\.workers)=.*",
        TestedBy(
            "tests/framework/execution/pipeline/remote_test.py"
            "::test_two_workers_train_as_one_process_and_a_lost_one_is_named"
        ),
    ),
    (
        r"tekso-trainer --model=lm\.python_source\.TinyMeshPipeline .*",
        TestedBy(
            "tests/framework/execution/pipeline/mesh_stages_test.py"
            "::test_the_experiment_trains_as_it_is_typed"
        ),
    ),
    (
        r"tekso-trainer --model=lm\.python_source\.TinySpmdPipeline .*",
        TestedBy(
            "tests/framework/execution/pipeline/spmd_test.py"
            "::test_the_experiment_trains_as_it_is_typed"
        ),
    ),
    (
        r"srun .*tekso-trainer .*",
        TestedBy(
            "tests/framework/execution/mesh/cluster_test.py"
            "::test_slurm_gives_processes_of_a_node_successive_ports"
        ),
    ),
    (
        r"tekso-(ckpt average|trainer --mode=eval) .*averaged",
        TestedBy("tests/tools/ckpt_test.py::test_an_average_is_evaluated_decoded_and_trained_on"),
    ),
    (
        r"tekso-(decode .*--language|trainer .*--mode=decode .*task\.decode_language)=.*",
        TestedBy("tests/tools/decode_test.py::test_a_model_of_several_languages_is_told_which"),
    ),
    (
        r"tekso-decode .*",
        TestedBy(
            "tests/tools/decode_test.py::test_every_line_has_its_translation_and_empty_lines_stay"
        ),
    ),
    (r"tekso-(ckpt|new-task) .*", Run()),
    (
        r"tekso-trainer .*--model=mt\.cldr\.\w+ --logdir=.*",
        Run(f"{SHORT} --set input.corpus.num_pairs=2000"),
    ),
    (r"tekso-trainer .*--(list|mode)=.*", Run()),
    (r"tekso-trainer .*--logdir=.*", Run(SHORT)),
    (r"tekso-vocab .*--input=.*", Run()),
    (r"tekso-benchmark .*--model=.*", Run(f"{SHORT} --warmup=1")),
    (r"tensorboard --logdir=\S+", Run("--inspect")),
    (r"python \w+\.py", Run()),
    (r"(\.venv/bin/)?pytest( -n 2)?( -m \"not slow\"| -k \w+)?", Run()),
    (r"\.venv/bin/ruff check .*", TestedBy("tests/lint_test.py::test_style")),
    (r"\.venv/bin/mypy", TestedBy("tests/lint_test.py::test_types")),
    (r"\.venv/bin/lint-imports", TestedBy("tests/lint_test.py::test_direction_of_imports")),
]


@dataclass(frozen=True)
class Command:
    text: str
    place: str  # file:line

    def how(self) -> Run | TestedBy | None:
        return next((how for kind, how in HOW if re.fullmatch(kind, self.text)), None)


def blocks(document: Path, language: str) -> Iterator[tuple[int, list[str]]]:
    """Yields the fenced blocks of a language, each with the number of its first line."""
    start, lines = 0, []
    for number, line in enumerate(document.read_text().splitlines(), start=1):
        if start and line.strip() == "```":
            yield start, lines
            start, lines = 0, []
        elif start:
            lines.append(line)
        elif re.fullmatch(rf"\s*```{language}\b.*", line):
            start = number + 1


def commands(document: Path) -> Iterator[Command]:
    """Yields the commands of a document; a line that ends in a backslash goes on in the next."""
    for first, lines in blocks(document, "(bash|sh|shell|console)"):
        text = ""
        for number, line in enumerate(lines, start=first):
            text += line.strip().removeprefix("$ ")
            if text.endswith("\\"):
                text = text.removesuffix("\\")
                continue
            text = re.sub(r"\s+#.*$", "", re.sub(r"\s+", " ", text)).strip()
            if text and not text.startswith("#"):
                yield Command(text, f"{document.relative_to(ROOT)}:{number}")
            text = ""


ALL = [command for document in DOCUMENTS for command in commands(document)]


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as after `make install`, whose commands are those of this checkout."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("setup.py", "pyproject.toml"):
        (tmp_path / name).touch()
    programs = tmp_path / ".venv" / "bin"
    for name in ("trainer", "vocab", "benchmark", "ckpt", "new-task"):
        module = name.replace("-", "_")
        text = f'exec {processes.forwarding("-m", f"tekso.tools.{module}")} "$@"\n'
        executable(programs / f"tekso-{name}", text)
    # The tests are collected, with the arguments that are given, and not run again.
    collect = "-m pytest --collect-only -q -p no:cacheprovider"
    executable(programs / "pytest", f'cd "{ROOT}" && exec "{sys.executable}" {collect} "$@"\n')
    (tmp_path / ".venv" / ".installed").touch()
    (tmp_path / "my_text").mkdir()
    for number, document in enumerate(DOCUMENTS):
        (tmp_path / "my_text" / f"{number}.txt").write_text(document.read_text() * 4)
    return tmp_path


@pytest.mark.parametrize("command", ALL, ids=lambda command: command.place)
def test_command_has_a_test(command: Command) -> None:
    how = command.how()
    assert how is not None, (
        f"{command.place}: no test runs this command:\n  {command.text}\n"
        "say in HOW of tests/docs_test.py how to run it, or which test does"
    )
    if isinstance(how, TestedBy):
        file, _, function = how.test.partition("::")
        names = {
            node.name
            for node in ast.walk(ast.parse((ROOT / file).read_text()))
            if isinstance(node, ast.FunctionDef)
        }
        assert function in names, f"{how.test} does not exist"


def test_every_line_of_how_is_needed() -> None:
    for kind, _ in HOW:
        assert any(re.fullmatch(kind, command.text) for command in ALL), f"no command is {kind}"


def test_links_between_documents_lead_somewhere() -> None:
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document}: {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_a_document_names_exist(document: Path) -> None:
    rooms = "framework|models|tasks|params|tools|tests|docs"
    for name in re.findall(rf"`((?:{rooms})/[\w./]*)`", document.read_text()):
        assert (ROOT / name).exists(), f"{document}: there is no {name}"


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a document has up to 20 commands
@pytest.mark.parametrize(
    "document",
    [path for path in DOCUMENTS if any(commands(path))],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_commands_of_a_document_work(document: Path, folder: Path) -> None:
    for _, lines in blocks(document, "python"):
        if lines and (name := re.fullmatch(r"# ([\w./-]+\.py)", lines[0])):
            file = folder / name[1]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("\n".join(lines) + "\n")

    # Without what an outer `make` hands down; `tekso-trainer` and `pytest` are those of .venv.
    environment = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    path = [str(folder / ".venv" / "bin"), sysconfig.get_path("scripts"), os.environ["PATH"]]
    environment["PATH"] = os.pathsep.join(path)
    for command in commands(document):
        how = command.how()
        if not isinstance(how, Run):
            continue
        result = subprocess.run(
            ["bash", "-c", f"{command.text} {how.arguments}"],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert result.returncode == 0, f"{command.place}: {command.text}\n{result.stdout}"
