"""Restores the state of a run, and says how it differs from the run that it continues."""

from __future__ import annotations

from tekso.framework.run import loss_check, metric_changes, reproducibility, training_data
from tekso.framework.run.assembly import Assembly
from tekso.framework.run.checkpoint_description import Description
from tekso.framework.run.checkpoints import Checkpoint, Checkpoints
from tekso.framework.run.job import Job
from tekso.framework.run.metric_choice import deciding_metrics
from tekso.framework.run.process_group import ProcessGroup
from tekso.framework.run.training_loop import TrainingLoop


def restore(
    job: Job,
    group: ProcessGroup,
    parts: Assembly,
    checkpoints: Checkpoints,
    checkpoint: Checkpoint | None,
    loop: TrainingLoop,
) -> int:
    """Restores the state, and prints how it differs from that of the run; returns the step."""
    if checkpoint is None:
        return loop.restore(None)
    with training_data.explaining(checkpoint.description, job.tree, parts.task):
        step = loop.restore(checkpoint)
    if step != checkpoint.step:
        job.console.line(f"resuming from {checkpoints.path(step)} instead", "good")
    restored = checkpoints.open(checkpoints.path(step), unread=True)
    description = restored.description
    restored.release()
    _show_bits(job, parts, description)
    job.warn_of_data(parts, description)
    _compare_metrics(job, group, parts, description, loop)
    return step


def _show_bits(job: Job, parts: Assembly, restored: Description) -> None:
    """Prints whether the run continues to the last bit."""
    text = reproducibility.line(restored, parts.description(job.model), job.tree)
    if text:
        job.console.line(f"  {text}")


def _compare_metrics(
    job: Job, group: ProcessGroup, parts: Assembly, restored: Description, loop: TrainingLoop
) -> None:
    """Warns if metrics that decide are not those of the checkpoint; compares only later ones."""
    metrics = deciding_metrics(job.tree)
    if not metrics or restored.task == parts.task.params.to_text():
        return
    weights = loss_check.trial_weights(parts.task, parts.program)
    found = metric_changes.find(restored.task, parts.task, weights, parts.eval_inputs, metrics)
    changed, unknown = group.from_first([list(found.changed), list(found.unknown)])
    found = metric_changes.MetricChanges(tuple(changed), tuple(unknown))
    if found.changed:
        loop.compare_after(restored.step)
    if text := found.text(restored.step):
        job.console.line(text, "warning")
