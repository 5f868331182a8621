"""The memory that a save and a restore need beyond the model, in processes that measure it."""

from __future__ import annotations

import json
from pathlib import Path

import processes
import pytest

PROGRAM = Path(__file__).with_name("checkpoint_memory_program.py")
TENSOR = 64 << 20


@pytest.mark.parametrize(
    ("execution", "shard"),
    [
        ("data_parallel", TENSOR),
        ("mesh_sharded", TENSOR // 2),
        pytest.param("pipelined", TENSOR, marks=pytest.mark.slow),
    ],
)
def test_save_and_restore_need_two_shards_beyond_the_state(
    tmp_path: Path, execution: str, shard: int
) -> None:
    for phase in ("save", "restore"):
        arguments = [str(tmp_path), phase, execution, "2", str(TENSOR)]
        done = processes.run([str(PROGRAM), *arguments], timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        record = json.loads(done.stdout.strip().splitlines()[-1])
        assert record["state"] > 4 * TENSOR and record.get("equal", True)
        assert record["more"] < 2 * shard, record
