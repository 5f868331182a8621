"""Leaves in a folder what runs of the training loop leave that are killed at many moments.

The argument is the folder.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from loop_runs import FakeProgram, Run

from tekso.framework import files
from tekso.framework.run import tensor_files
from tekso.framework.run.checkpoints import Checkpoints
from tekso.framework.run.report import curves

WRITING = {"tensors": 4, "description": 4, "name": 4, "surplus": 8}
"""What the checkpoint of step 8 is about to get when a run is killed: newest complete one."""
KILLED = {**{str(step): step // 4 * 4 for step in range(20)}, **WRITING}
"""When a run was killed: the steps of its newest complete checkpoint; 0 if it has none."""


def kill_this_process() -> None:
    """Nothing is done after it: no `finally`, no `except`, nothing at exit."""
    os.kill(os.getpid(), signal.SIGKILL)


def train_and_be_killed(run: Run, moment: str) -> None:
    """Trains until a step begins or, if `moment` is one of WRITING, to that point of a write."""
    if moment in WRITING:
        places = {
            "tensors": (tensor_files, "write"),
            "description": (files, "write_atomically"),
            "name": (files, "rename"),
            "surplus": (Checkpoints, "_remove_surplus"),
        }
        owner, name = places[moment]
        act, calls = getattr(owner, name), iter(range(3))

        def kill_at_second_call(*args: Any, **options: Any) -> Any:
            if next(calls) == 1:  # of the second checkpoint; there is one call for each
                kill_this_process()
            return act(*args, **options)

        setattr(owner, name, kill_at_second_call)
        run.train()

    def at_step(now: int) -> None:
        if now == int(moment):
            run.checkpoints.wait()  # so that it is known which is the newest complete one
            kill_this_process()

    run.train(program=FakeProgram(at_step=at_step))


def leave_killed_runs(folder: Path) -> None:
    """Forks before TensorFlow's runtime has started: no thread is lost in the child."""
    for moment in KILLED:
        child = os.fork()
        if not child:
            try:
                train_and_be_killed(Run(folder / moment), moment)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        if not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
            sys.exit(f"the run to be killed at {moment} ended by itself")


if __name__ == "__main__":
    curves.draw = lambda *args, **options: None
    leave_killed_runs(Path(sys.argv[1]))
