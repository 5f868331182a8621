"""Rolls a run back to a checkpoint before a series of non-finite steps, and skips their batches.

    steps 100        110 … 119     A series of 10 steps that are not finite, 110 to 119 from 0.
           ▲ saved    ✗  …  ✗
          100 … 109  110 …         The run is rolled back to step 100. Steps 100 to 109 train
                      └ batch 120  on the same batches as before, step 110 on batch 120.

If step 110 is not finite on the new batches either, the weights are the cause. Then the run is
rolled back to an earlier checkpoint, and all batches since then are skipped.

Everything follows from the checkpoints. A process that is killed before the rollback is recorded
repeats the series and the rollback. It is recorded by replacing one file, the description of the
checkpoint. Checkpoints of later steps are renamed before, the newest first.

Source: Chowdhery et al. 2022, "PaLM" (arXiv 2204.02311), section 5.1: restarting before a spike of
the loss and skipping the batches of the spike.
"""

from __future__ import annotations

import dataclasses

from tekso.framework import files
from tekso.framework.learning_step import NonFiniteStepsError
from tekso.framework.run import checkpoint_files
from tekso.framework.run.checkpoints import Checkpoint, Checkpoints, DamagedCheckpointError
from tekso.framework.run.process_group import ProcessGroup
from tekso.framework.run.skipped_batches import SkippedBatches

_ASIDE = "rolled_back_"


def roll_back(
    checkpoints: Checkpoints,
    skipped: SkippedBatches,
    group: ProcessGroup,
    *,
    first: int,
    end: int,
) -> Checkpoint | None:
    """Returns the checkpoint to restore, which describes the batches to skip; None if none fits.

    All processes of the run must call it. Checkpoints of later steps are renamed to
    "rolled_back_step_…".

    Args:
      checkpoints: the checkpoints of the run.
      skipped: the batches that the run has skipped so far.
      group: the processes of the run.
      first: the first step of the series that was not finite; steps count from 0.
      end: the step after the series.

    Raises:
      CheckpointError: an earlier save failed, or the checkpoint cannot be read.
    """
    checkpoints.wait()
    chosen = _chosen(checkpoints, skipped, first) if group.is_first else None
    if group.from_first(chosen) is None:
        return None
    if chosen is not None:
        # If no step was finite since the last rollback, the batches before it are skipped too.
        begin = chosen if skipped.begins_at(first) else first
        for step in reversed(checkpoints.steps()):
            if step > chosen:
                _set_aside(checkpoints, step)
        _record(checkpoints.path(chosen), skipped.rolled_back(begin, end))
    checkpoints.prepare()  # reads again which checkpoints are the best
    return checkpoints.resume()


def text(skipped: SkippedBatches, first: int, step: int) -> str:
    """Returns the line that reports a rollback.

    Args:
      skipped: the batches that are skipped since the rollback.
      first: the first step of the series that was not finite.
      step: the step to which the run was rolled back.
    """
    begin, first_batch, end = skipped.ranges[-1]
    return (
        f"the loss or the gradients were not finite from step {first + 1} on: rolled back to step "
        f"{step} (rollback {skipped.rollbacks}); from step {begin + 1} on, batches {first_batch} "
        f"to {end - 1} are skipped"
    )


def explain(error: NonFiniteStepsError, skipped: SkippedBatches, limit: int, cause: str) -> None:
    """Adds to an error why the run is not rolled back, and what was not finite first.

    Args:
      error: the error that ends the run.
      skipped: the batches that the run has skipped.
      limit: the maximum number of rollbacks.
      cause: sentences about what was not finite; "": unknown.
    """
    reason = (
        f"The run was rolled back {skipped.rollbacks} times, the limit is learner.max_rollbacks"
        if skipped.rollbacks >= limit
        else "No checkpoint was saved before these steps, so the run cannot be rolled back: see "
        "run.checkpoint_every_steps"
    )
    error.args = (f"{error.args[0]} {reason}. {cause}".rstrip(), *error.args[1:])


def _chosen(checkpoints: Checkpoints, skipped: SkippedBatches, first: int) -> int | None:
    """Returns the step of the newest good checkpoint before the series."""
    good = [step for step in checkpoints.steps() if step <= first and _is_good(checkpoints, step)]
    earlier = [step for step in good if step < first]
    return max(earlier if skipped.begins_at(first) and earlier else good, default=None)


def _is_good(checkpoints: Checkpoints, step: int) -> bool:
    try:
        checkpoint_files.open_unread(checkpoints.path(step))
    except DamagedCheckpointError:
        return False
    return True


def _set_aside(checkpoints: Checkpoints, step: int) -> None:
    path = checkpoints.path(step)
    number, aside = 1, f"{_ASIDE}{files.base_name(path)}"
    while files.exists(place := files.join(checkpoints.directory, f"{aside}.{number}")):
        number += 1
    files.rename(path, place)


def _record(path: str, skipped: SkippedBatches) -> None:
    """Writes the batches to skip to the description of a checkpoint, atomically."""
    description = checkpoint_files.describe(path)
    description = dataclasses.replace(description, input=skipped.described(description.input))
    description = description.at(description.step, description.metrics)
    name = files.join(path, checkpoint_files.DESCRIPTION)
    files.write_atomically(name, description.to_json())
