"""The contracts carry a mesh and a pipeline: layers run there unchanged, with the same numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("contracts_program.py")


@pytest.mark.parametrize(
    ("how", "argument"),
    [
        ("mesh", {"batch": "data", "embed": "model"}),
        ("mesh", {"batch": "data", "heads": "model"}),
        ("mesh", {"embed": "model"}),
        ("stages", 1),
        ("stages", 4),
    ],
    ids=str,
)
def test_layers_run_unchanged(how: str, argument: object) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), how, json.dumps(argument)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    differences = json.loads(done.stdout.splitlines()[-1])
    # Sums in another order: float32 rounding of numbers around 1.
    assert differences["loss"] < 2e-6
    assert differences["gradients"] < 2e-6
