"""Runs that end for lack of memory lose no bit: they are repeated with more of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import processes
import pytest

sys.path.append(str(Path(__file__).parent))

import killer

from tekso.framework.exit_codes import ExitCode

LIMITED = Path(__file__).parents[1] / "address_space.py"
HUNGER = 10**9  # bytes that a step and decoding of the experiment need


def train(logdir: Path, limit: int) -> subprocess.CompletedProcess[str]:
    """Starts or resumes the run in an address space with a limit; 0: without."""
    flags = ["--model=small_runs.experiments.Hungry", "--import=small_runs", "--set=*.towers=1"]
    flags += ["--set=execution.xla=none", f"--logdir={logdir}"]
    here = Path(killer.__file__).parent
    done = processes.run([LIMITED, str(limit), *flags], cwd=here, op_by_op=True)
    assert "Traceback" not in done.stderr
    return done


@pytest.mark.slow
def test_a_run_that_ends_for_lack_of_memory_is_the_same_with_more_of_it(tmp_path: Path) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    done = train(whole, 0)
    assert done.returncode == 0, done.stderr
    needed = int(done.stdout.splitlines()[-1])  # twice HUNGER, besides TensorFlow

    done = train(run, needed - int(1.6 * HUNGER))  # TensorFlow's own allocator has none
    assert done.returncode == ExitCode.FAILED, done.stderr
    (line,) = (line for line in done.stderr.splitlines() if "out of memory" in line)
    assert "after step 8: OOM when allocating tensor with shape[250000000]" in line
    assert line.endswith("and repeat the command, which resumes from step 8")
    assert killer.newest(run) == 8

    done = train(run, needed - int(0.4 * HUNGER))  # NumPy has none
    assert done.returncode == ExitCode.FAILED, done.stderr
    (line,) = (line for line in done.stderr.splitlines() if "out of memory" in line)
    assert "after step 12 (decoding): Unable to allocate 954. MiB" in line
    assert killer.newest(run) == 12

    done = train(run, 0)
    assert done.returncode == 0, done.stderr
    assert not list(killer.compare(whole, run))
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").open()]
    assert len(steps) == 12 + 3  # and three evaluations
