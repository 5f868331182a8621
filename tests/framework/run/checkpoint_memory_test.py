"""The memory that a save and a restore need beyond the model, in processes that measure it."""

from __future__ import annotations

import json
from pathlib import Path

import processes
import pytest

PROGRAM = Path(__file__).with_name("checkpoint_memory_program.py")
TENSOR = 64 << 20
ELSE = 8 << 20  # of the process: threads, files, and what the allocator keeps


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
    for attempt in range(3):  # other memory of the process only adds, so the least counts
        more = measured(tmp_path / str(attempt), execution)
        if max(more.values()) < 2 * shard + ELSE:
            return
    pytest.fail(f"needs {more} bytes, more than {2 * shard + ELSE}")


def measured(folder: Path, execution: str) -> dict[str, int]:
    """Returns the bytes that a save and a restore need beyond the state."""
    more = {}
    for phase in ("save", "restore"):
        done = processes.run(
            [str(PROGRAM), str(folder), phase, execution, "2", str(TENSOR)], timeout=300
        )
        assert done.returncode == 0, done.stderr[-3000:]
        record = json.loads(done.stdout.strip().splitlines()[-1])
        assert record["state"] > 4 * TENSOR and record.get("equal", True)
        more[phase] = record["more"]
    return more
