"""A test session that needs more CPU time than its budget says so and passes."""

from __future__ import annotations

from pathlib import Path

import processes

TEST = "tests/make_test.py::test_make_alone_says_what_there_is"


def test_a_budget_that_is_exceeded_is_reported_and_decides_nothing() -> None:
    result = processes.run(
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--cpu-minutes=0", TEST],
        cwd=Path(__file__).parents[1],
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "minutes of CPU time in total\nThat is above 0 minutes." in result.stdout
