"""The execution of an experiment is built in one way."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_only_one_function_builds_the_execution_of_an_experiment() -> None:
    found = [
        path.relative_to(ROOT).as_posix()
        for folder in ("framework/run", "tools")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if re.search(r"\bexecution\.instantiate\(", path.read_text())
    ]
    assert found == ["framework/run/batch_kinds.py"]
