"""Searches over a mesh of devices find what they find on one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("mesh_program.py")
LAYOUTS = ["data:2 batch:data", "data:2;model:2 batch:data;vocab:model"]


def test_searches_on_a_mesh_equal_those_on_one_device() -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *LAYOUTS],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert len(report) == len(LAYOUTS) * (6 + 5)
    for name, difference in report.items():
        # float32 sums in another order; of tokens and lengths, a difference is at least 1.
        assert difference < 2e-6, (name, difference)
