"""TensorFlow's wait for other processes blocks all threads, and not with the workaround."""

from __future__ import annotations

import subprocess
from pathlib import Path

import processes
import pytest
import tensorflow as tf

PROGRAM = Path(__file__).with_name("unlocked_start_program.py")
THREADS_RUN = 7  # exit code of the program


@pytest.mark.slow
def test_threads_run_while_the_process_waits_for_others() -> None:
    assert processes.run([PROGRAM, "avoided"], timeout=120).returncode == THREADS_RUN


@pytest.mark.slow
def test_the_workaround_is_still_needed() -> None:
    with pytest.raises(subprocess.TimeoutExpired):  # no thread runs, so nothing ends the process
        processes.run([PROGRAM], timeout=10)
        pytest.fail(f"workaround without_lock is no longer needed by TensorFlow {tf.__version__}")
