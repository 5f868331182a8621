"""The memory that a corpus needs does not grow with the corpus."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import processes
import pytest

PROGRAM = Path(__file__).parents[2] / "corpus_memory.py"
LIMITED = PROGRAM.with_name("address_space.py")
HEADROOM = 48 << 20


@pytest.mark.parametrize(
    ("kind", "megabytes"),
    [
        ("stream", 24),
        pytest.param("packed", 24, marks=pytest.mark.slow),
        pytest.param("pairs", 12, marks=pytest.mark.slow),  # on each side
        pytest.param("packed_pairs", 12, marks=pytest.mark.slow),
    ],
)
def test_a_large_corpus_takes_little_memory(tmp_path: Path, kind: str, megabytes: int) -> None:
    done = processes.run([PROGRAM, tmp_path, str(megabytes), kind, "words"], timeout=300)
    first, again = (json.loads(line) for line in done.stdout.splitlines())
    assert first["corpus_bytes"] >= 24e6
    most = first["corpus_bytes"]
    if kind == "packed":  # 20 bytes for each of 387,000 texts; the rest is blocks of one size
        most = 85 * int(
            re.search(r"train: ([\d,]+) texts", first["description"])[1].replace(",", "")
        )
    assert max(first["peak_bytes"], again["peak_bytes"]) < most, done.stderr
    assert first["digest"] == again["digest"]


def train(folder: Path, limit: int, megabytes: int) -> Any:
    """Trains on a corpus in the folder, in an address space with a limit."""
    (folder / "text").mkdir(parents=True)
    block = "".join(f"line {i} of a text that is as long as others\n" for i in range(25_000))
    with open(folder / "text" / "a.txt", "w") as file:
        for _ in range(megabytes * 1_000_000 // len(block) + 1):
            file.write(block)
    flags = [
        *("--model=lm.text_files.Bytes", f"--logdir={folder}/run", "--steps=2", "--log_every=1"),
        f"--set=input.files={folder}/text/*.txt",
        *("--set=input.batch_size=2", "--set=*.num_layers=1", "--set=execution.towers=1"),
        *("--set=eval_inputs.dev.max_batches=1", "--set=run.decode_at_end=false"),
        "--set=execution.xla=none",
    ]
    return processes.run([LIMITED, str(limit), *flags], op_by_op=True, timeout=300)


@pytest.mark.slow
def test_a_run_over_a_corpus_larger_than_the_memory_it_is_given(tmp_path: Path) -> None:
    alone = train(tmp_path / "small", 0, 1)
    assert alone.returncode == 0, alone.stderr
    limit = int(alone.stdout.splitlines()[-1]) + HEADROOM
    done = train(tmp_path / "large", limit, 250)
    assert done.returncode == 0, done.stdout + done.stderr
    cached = (tmp_path / "large" / "run" / "assets" / "tokens").rglob("*")
    assert sum(path.stat().st_size for path in cached if path.is_file()) > 4 * HEADROOM
    losses = (tmp_path / "large" / "run" / "metrics.jsonl").read_text().count('"train"')
    assert losses == 2
