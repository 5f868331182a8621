"""Damaged texts and files are read, or are an error that says where the damage is."""

from __future__ import annotations

from pathlib import Path

import fuzz_texts
import processes
import pytest

PROGRAM = Path(__file__).with_name("fuzz_texts.py")


@pytest.mark.parametrize(
    "cases", [pytest.param(200, id="few"), pytest.param(2_000, id="many", marks=pytest.mark.slow)]
)
def test_damaged_texts_are_read_or_named(cases: int) -> None:
    done = processes.run([PROGRAM, f"--cases={cases}", f"--seed={cases}"], timeout=600)
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout.splitlines()[-1] == f"{cases} cases, 0 problems"


def test_an_error_that_is_not_declared_or_names_no_place_is_a_problem(tmp_path: Path) -> None:
    def read(data: bytes, folder: Path) -> None:
        if data:
            raise ValueError(data.decode())
        raise KeyError("a name")

    kind = fuzz_texts.Kind([], read, (ValueError,), r"line \d+")
    assert not fuzz_texts.problem(kind, b"line 3 is wrong", tmp_path)
    assert "does not say where" in fuzz_texts.problem(kind, b"something is wrong", tmp_path)
    assert "KeyError" in fuzz_texts.problem(kind, b"", tmp_path)
