"""An update does not hold all weights and slots twice, and nothing else is held between steps."""

from __future__ import annotations

import json
import os
from pathlib import Path

import processes
import pytest

PROGRAM = Path(__file__).with_name("memory_program.py")


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="no peak to set back")
def test_step_takes_the_memory_of_gradients_and_not_that_of_a_second_state() -> None:
    done = processes.run([str(PROGRAM)], timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    # The sums of the gradients take 1.0, graphs and threads about 0.5; a second state would be 3
    # more, of weights and both slots of Adam.
    assert found["more"] < 3.2 * found["weights"]
    # Weights, both slots and the sums; not the zeros with which the sums begin.
    assert found["held"] in (None, 4 * found["weights"])
