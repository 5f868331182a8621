"""The update runs on a device mesh as it is: the same numbers, and nothing changes its layout."""

from __future__ import annotations

import json
from pathlib import Path

import processes
import pytest

PROGRAM = Path(__file__).with_name("learner_mesh_program.py")
OPTIMIZERS = ["Nesterov", "RMSProp", "Adagrad", "AdamW", "Adafactor", "LAMB", "LARS"]


@pytest.mark.slow
def test_update_on_a_mesh_equals_the_plain_one_and_keeps_layouts() -> None:
    done = processes.run([str(PROGRAM), *OPTIMIZERS], optimized=False)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert list(report) == OPTIMIZERS
    for name, result in report.items():
        # Partial sums of the norms are added in another order.
        assert result["difference"] < 2e-6, name
        assert result["moved"] == [], name
