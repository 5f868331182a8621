"""The update runs on a device mesh as it is: the same numbers, and nothing changes its layout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("learner_mesh_program.py")
OPTIMIZERS = ["Nesterov", "RMSProp", "Adagrad", "AdamW", "Adafactor", "LAMB", "LARS"]


def test_update_on_a_mesh_equals_the_plain_one_and_keeps_layouts() -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *OPTIMIZERS],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert list(report) == OPTIMIZERS
    for name, result in report.items():
        # Partial sums of the norms are added in another order.
        assert result["difference"] < 2e-6, name
        assert result["moved"] == [], name
