"""The contrastive loss is over the global batch: on replicas and on a mesh as on one device."""

from __future__ import annotations

import json
from pathlib import Path

import processes
import pytest


@pytest.mark.slow
def test_losses_gradients_and_evaluations_are_those_of_one_device() -> None:
    program = Path(__file__).with_name("executions_program.py")
    done = processes.run([program], optimized=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    alone = found.pop("one device")
    assert set(found) == {"mesh", "replicas"}
    assert abs(alone[0] - alone[2]) > 1e-4
    for name, numbers in found.items():
        assert numbers == pytest.approx(alone, rel=2e-5), name
