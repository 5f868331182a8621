"""Style, types, size of files and direction of imports hold in the whole checkout."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("framework", "models", "tasks", "params", "tools")
SOURCES = [
    ROOT / "conftest.py",
    ROOT / "setup.py",
    *(path for top in (*ROOMS, "tests") for path in sorted((ROOT / top).rglob("*.py"))),
]

MAX_LINES = 500
LONGER_FILES: set[str] = set()  # none; a file in it needs its reason beside its name


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def tool(name: str) -> str:
    return str(Path(sysconfig.get_path("scripts")) / name)


def test_style() -> None:
    result = run(tool("ruff"), "check", "--no-cache", "--output-format=concise", ".")
    assert result.returncode == 0, f"\n{result.stdout}{result.stderr}"


def test_types() -> None:
    result = run(tool("mypy"))
    assert result.returncode == 0, f"\n{result.stdout}{result.stderr}"


def test_direction_of_imports() -> None:
    result = run(tool("lint-imports"), "--no-cache")
    assert result.returncode == 0, f"\n{result.stdout}{result.stderr}"


@pytest.mark.parametrize("name", ["experiment", "files", "params", "registry"])
def test_module_does_not_load_tensorflow(name: str) -> None:
    code = f"import sys, tekso.framework.{name}; sys.exit('tensorflow' in sys.modules)"
    assert run(sys.executable, "-c", code).returncode == 0


def test_no_file_is_too_long() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in SOURCES
        if "tests" not in path.parts and (lines := path.read_text().count("\n")) > MAX_LINES
    }
    unexpected = {name: lines for name, lines in long.items() if name not in LONGER_FILES}
    assert not unexpected, f"longer than {MAX_LINES} lines: {unexpected}"
    assert not LONGER_FILES - set(long), "a name in LONGER_FILES is no longer needed"


def test_no_module_is_named_after_nothing() -> None:
    names = {"utils", "util", "helpers", "common", "misc"}
    found = [str(path.relative_to(ROOT)) for path in SOURCES if path.stem in names]
    assert not found, f"name the idea that the module holds: {found}"


def test_nothing_is_asserted_outside_tests() -> None:
    # `python -O` removes an assert, and its message tells a user nothing: raise instead.
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in SOURCES
        if path.relative_to(ROOT).parts[0] in ROOMS
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if line.lstrip().startswith(("assert ", "assert("))
    ]
    assert not found, found
