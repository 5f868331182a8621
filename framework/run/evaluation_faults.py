"""Saves the state of a run before an error of an evaluation ends it.

    step 300 ─► evaluation ─► error ─► save step 300 ─► the error, with a note

The state is that of a checkpoint that was due: an evaluation changes no weight. Nothing is saved if
the error means that the state cannot be written or read, such as a full disk or a lost process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from tekso.framework import graph_errors, out_of_memory, out_of_space
from tekso.framework.exit_codes import ExitCode, exit_code_of
from tekso.framework.run.checkpoint_errors import first_line
from tekso.framework.run.checkpoints import Checkpoints
from tekso.framework.run.evaluation import StoppedError


@contextlib.contextmanager
def saving(
    save: Callable[[], None] | None, checkpoints: Checkpoints, *, name: str
) -> Iterator[None]:
    """Saves the state before an error in the block; a note says from which step a run resumes.

    Args:
      save: saves the state, and waits until it is written; None: it is saved, or cannot be.
      checkpoints: of the run.
      name: of the state, for the note: "step 3".
    """
    try:
        yield
    except StoppedError:
        raise
    except Exception as error:
        failed = ""
        if save is not None and _allows_saving(error):
            try:
                save()
            except Exception as other:  # the error of the evaluation is the cause
                failed = f"; {name} is not saved: {first_line(other)}"
        with contextlib.suppress(Exception):  # of the write of an earlier step
            checkpoints.wait()
        error.add_note(f"{graph_errors.RESUMES}{_newest(checkpoints)}{failed}")
        raise


def _allows_saving(error: Exception) -> bool:
    """Whether an error leaves a state that can be written."""
    if out_of_memory.shortage_of(error) is not None:  # a limit of the address space remains
        return out_of_memory.limit_bytes() is None
    return exit_code_of(error) == ExitCode.FAILED and out_of_space.code_of(error) is None


def _newest(checkpoints: Checkpoints) -> str:
    """Returns the step of the newest checkpoint, or that there is none."""
    steps: list[int] = []
    with contextlib.suppress(OSError):  # the logdir may be lost
        steps = checkpoints.steps()
    return f"step {steps[-1]}" if steps else "the beginning, since nothing was saved yet"
