"""The namespace: rooms are imported as `tekso.<room>`, in this process and in those it starts."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("framework", "models", "tasks", "params", "tools")


@pytest.mark.parametrize("room", ROOMS)
def test_room_is_imported_by_its_tekso_name(room: str) -> None:
    module = importlib.import_module(f"tekso.{room}")
    assert module.__file__ is not None
    assert Path(module.__file__) == ROOT / room / "__init__.py"


@pytest.mark.parametrize("room", ROOMS)
def test_room_refuses_its_folder_name(room: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", f"import {room}"], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode != 0
    assert f"'tekso.{room}'" in result.stderr


def test_a_process_that_a_test_starts_imports_the_checkout(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", "import tekso.framework as room; print(room.__file__)"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(result.stdout.strip()).resolve() == ROOT / "framework" / "__init__.py"
