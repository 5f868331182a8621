"""The memory that a corpus needs does not grow with the corpus."""

from __future__ import annotations

import json
import re
from pathlib import Path

import processes
import pytest

PROGRAM = Path(__file__).parents[2] / "corpus_memory.py"


@pytest.mark.parametrize(
    ("kind", "megabytes"),
    [
        ("stream", 24),
        pytest.param("packed", 24, marks=pytest.mark.slow),
        pytest.param("pairs", 12, marks=pytest.mark.slow),  # on each side
    ],
)
def test_a_large_corpus_takes_little_memory(tmp_path: Path, kind: str, megabytes: int) -> None:
    done = processes.run([PROGRAM, tmp_path, str(megabytes), kind, "words"], timeout=300)
    first, again = (json.loads(line) for line in done.stdout.splitlines())
    assert first["corpus_bytes"] >= 24e6
    most = first["corpus_bytes"]
    if kind == "packed":  # texts of 57 bytes; about 90 bytes of lengths and positions for each
        most = 110 * int(
            re.search(r"train: ([\d,]+) texts", first["description"])[1].replace(",", "")
        )
    assert max(first["peak_bytes"], again["peak_bytes"]) < most, done.stderr
    assert first["digest"] == again["digest"]
