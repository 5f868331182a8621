"""Evaluates or decodes with one checkpoint, or evaluates those of a run as they appear."""

from __future__ import annotations

import collections
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tekso.framework import draws, files, task_results
from tekso.framework.run import comparable, training_data
from tekso.framework.run.assembly import Assembly
from tekso.framework.run.checkpoint_description import describe
from tekso.framework.run.checkpoints import Checkpoint, CheckpointError
from tekso.framework.run.early_stopping import early_stopping_of
from tekso.framework.run.evaluation import evaluate_and_score
from tekso.framework.run.example_index import naming_indices, with_indices
from tekso.framework.run.job import Job
from tekso.framework.run.label_limits import BatchCheck
from tekso.framework.run.metric_choice import declared_metrics
from tekso.framework.run.metrics_log import SPLIT, STEP, MetricsLog, history
from tekso.framework.run.process_group import ProcessGroup
from tekso.framework.run.report.lines import eval_line, wrapped
from tekso.framework.run.report.tensorboard import TensorBoardEvents
from tekso.framework.run.restore import restore
from tekso.framework.run.skip_notices import SkipNotices

_CHECKPOINT = "checkpoint"
_FOLLOWED = "followed"


def evaluate(job: Job, checkpoint: Checkpoint) -> dict[str, Any]:
    """Evaluates a checkpoint on all evaluation inputs; returns the figures.

    It also prints the figures, and appends them to evaluations.jsonl in the logdir.

    Raises:
      ValueError: there are no evaluation inputs.
    """
    _check_eval_inputs(job)
    with job.meet(checkpoint=checkpoint.path) as group:
        parts = job.assemble(group, trains=False)
        _restore(job, parts, checkpoint)
        job.warn_of_data(parts, checkpoint.description, trains=False)
        tried = job.try_task(parts, is_new=False, trains=False)
        check = BatchCheck(parts.task, tried.label_limits)
        log = MetricsLog(job.logdir.file("evaluations.jsonl"))
        found = _evaluate(job, parts, checkpoint, _Records(job, log), group, check)
        job.warn(tried.unchecked)
        _skip_notices(job, parts).show()
        log.close()
    job.console.close()
    return {"model": job.model, _CHECKPOINT: checkpoint.path, STEP: checkpoint.step, **found}


def decode(job: Job, checkpoint: Checkpoint) -> Any:
    """Decodes with a checkpoint by the Params of the task; returns the `Decoded` of the task.

    Raises:
      ValueError: the task decodes nothing.
    """
    with job.meet(checkpoint=checkpoint.path) as group:
        reads_data = task_results.decodes_data(job.tree.task)
        parts = job.assemble(group, reads_data=reads_data)
        _restore(job, parts, checkpoint)
        if reads_data:
            job.warn_of_data(parts, checkpoint.description, trains=False)
        warn = functools.partial(job.console.line, style="warning")
        with draws.warning_of_repeats("in decode", warn):
            decoded = task_results.decode(parts.task, parts.program, parts.input)
    if decoded is None:
        raise ValueError(f"{job.model} has nothing to decode: {parts.task.why_nothing_decoded()}")
    return decoded


def _sleep() -> None:
    time.sleep(5.0)


def follow(job: Job, *, wait: Callable[[], None] = _sleep) -> None:
    """Evaluates every checkpoint of a run, in the order of steps, until the run is finished.

    Training may continue in another process at the same time. A run is finished when its last step,
    or the step at which early stopping ended it, is saved. Checkpoints that an earlier call
    evaluated are not evaluated again. A checkpoint that training deletes before it is read is left
    out, with a line that says so.

    Figures are printed, appended to evaluations.jsonl, and written to events_followed/ for
    TensorBoard; decoded outputs to decoded/NAME/followed_step_….txt.

    Args:
      job: the run; its checkpoints are the ones to evaluate.
      wait: waits before the next look for checkpoints.

    Raises:
      ValueError: there are no evaluation inputs.
    """
    _check_eval_inputs(job)
    log = MetricsLog(job.logdir.file("evaluations.jsonl"))
    events = TensorBoardEvents(job.logdir.file("events_followed"))
    checkpoints = job.checkpoints()
    try:
        with job.meet() as group:
            parts: Assembly | None = None
            notices: SkipNotices | None = None
            check: BatchCheck | None = None
            done = _followed_before(log, set(job.tree.eval_inputs))
            while True:
                left = [step for step in checkpoints.steps() if step not in done]
                if not left:
                    if _is_finished(job, checkpoints.steps()):
                        break
                    job.console.progress(0, 1, "waiting for the next checkpoint (Ctrl-C ends)")
                    wait()
                    continue
                done.add(left[0])
                checkpoint = _opened(job, checkpoints.open, left[0])
                if checkpoint is None:
                    continue
                if parts is None:
                    parts = job.assemble(group, trains=False)
                    notices = _skip_notices(job, parts)
                is_restored = _restored(job, parts, checkpoint)
                checkpoint.release()  # so that training may delete it, also while this waits
                if not is_restored:
                    continue
                unchecked: list[str] = []
                if check is None:
                    tried = job.try_task(parts, is_new=False, trains=False)
                    unchecked = tried.unchecked
                    check = BatchCheck(parts.task, tried.label_limits)
                _evaluate(job, parts, checkpoint, _Records(job, log, events), group, check)
                job.warn(unchecked)
                if notices is not None:
                    notices.show()
    finally:
        log.close()
        events.close()
        checkpoints.close()
        job.console.close()


def _check_eval_inputs(job: Job) -> None:
    if not job.tree.eval_inputs:
        raise ValueError(f"{job.model} has no eval_inputs: there is nothing to evaluate on")


# --- evaluation ---


@dataclasses.dataclass(frozen=True)
class _Records:
    """Where the figures of an evaluation are written.

    Attributes:
      job: the run.
      log: evaluations.jsonl.
      events: for TensorBoard, if a run is followed.
    """

    job: Job
    log: MetricsLog
    events: TensorBoardEvents | None = None

    def write(self, name: str, record: dict[str, Any], values: dict[str, float]) -> None:
        """Writes the figures; a file that cannot be written is a warning."""
        if self.events is not None:
            record[_FOLLOWED] = True
        try:
            self.log.append(record)
            if self.events is not None:
                self.events.append(record[STEP], name, values)
        except OSError as error:  # for example, the run belongs to another user
            text = f"cannot write to {self.log.path}: {error.strerror}"
            self.job.console.line(text, "warning")

    def write_decoded(self, name: str, step: int, text: str, images: Any) -> None:
        """Writes decoded outputs; a file that cannot be written is a warning."""
        kind = "eval" if self.events is None else _FOLLOWED
        title = kind if self.events is None else f"{kind}_step_{step:09d}"
        try:
            self.job.logdir.write_decoded(name, title, text, images, prefix=f"{kind}_")
        except OSError as error:
            folder = self.job.logdir.decoded(name)
            self.job.console.line(f"cannot write {folder}: {error.strerror}", "warning")


def _evaluate(
    job: Job,
    parts: Assembly,
    checkpoint: Checkpoint,
    records: _Records,
    group: ProcessGroup,
    check: BatchCheck,
) -> dict[str, dict[str, float]]:
    """Evaluates restored weights on all evaluation inputs; returns {evaluation: figures}."""
    found = {}
    different = job.changes_since(checkpoint)
    inputs = {f"eval_inputs.{name}": input for name, input in parts.eval_inputs.items()}
    for name, batches in parts.eval_batches().items():
        begin = time.perf_counter()
        job.console.progress(0, 1, f"evaluating {name}")
        with naming_indices(inputs):
            evaluation = evaluate_and_score(
                parts.program,
                parts.task,
                batches(0),
                functools.partial(parts.score, name, True),
                name=name,
                check=check,
                warn=lambda text: job.console.line(with_indices(text, inputs), "warning"),
                before_score=functools.partial(job.console.progress, 0, 1, f"decoding {name}"),
            )
        values, scored = evaluation.figures, evaluation.scored
        seconds = time.perf_counter() - begin
        whole = eval_line(
            name,
            checkpoint.step,
            values,
            seconds=seconds,
            declared=declared_metrics(job.tree),
            width=None,
        )
        for line in wrapped(whole, job.console.width):
            job.console.line(line, "evaluation")
        record = {STEP: checkpoint.step, SPLIT: name, **values, _CHECKPOINT: checkpoint.path}
        if different:
            record["changes"] = different
        if scored is not None:
            record["notes"] = list(scored.notes)
        if group.is_first:
            records.write(name, record, values)
            if scored is not None:
                job.show_text(scored.text)
                records.write_decoded(name, checkpoint.step, scored.text, scored.images)
        found[name] = values
    return found


def _skip_notices(job: Job, parts: Assembly) -> SkipNotices:
    return SkipNotices(parts.eval_inputs, functools.partial(job.console.line, style="warning"))


# --- following a run ---


def _followed_before(log: MetricsLog, names: set[str]) -> set[int]:
    """Returns the steps that an earlier process evaluated on all evaluation inputs."""
    done: dict[int, set[str]] = collections.defaultdict(set)
    for record in log.read():
        if record.get(_FOLLOWED):
            done[record[STEP]].add(record[SPLIT])
    return {step for step, found in done.items() if names <= found}


def _opened(job: Job, open_: Callable[[str], Checkpoint], step: int) -> Checkpoint | None:
    """Opens a checkpoint; None, with a line, if training deleted it or it is damaged."""
    try:
        return open_(str(step))
    except (CheckpointError, OSError) as error:
        if not _explain_if_deleted(job, step):
            job.console.line(f"step {step} is skipped: {error}", "warning")
        return None


def _restore(job: Job, parts: Assembly, checkpoint: Checkpoint) -> None:
    with training_data.explaining(checkpoint.description, job.tree, parts.task):
        restore(parts.program, checkpoint)


def _restored(job: Job, parts: Assembly, checkpoint: Checkpoint) -> bool:
    """Restores a checkpoint; False, with a line, if training deleted it meanwhile."""
    try:
        _restore(job, parts, checkpoint)
    except (CheckpointError, OSError, tf.errors.OpError):
        if _explain_if_deleted(job, checkpoint.step):
            return False
        raise
    return True


def _explain_if_deleted(job: Job, step: int) -> bool:
    if files.exists(job.checkpoints().path(step)):
        return False
    job.console.line(
        f"step {step} is skipped: training deleted the checkpoint before it was read "
        "(run.keep_last_checkpoints)",
        "warning",
    )
    return True


def _is_finished(job: Job, steps: list[int]) -> bool:
    """Whether the newest checkpoint is the last one of the run, by its current params.txt."""
    _, tree = job.logdir.experiment()
    if steps and steps[-1] >= tree.run.steps:
        return True
    rule = early_stopping_of(tree)
    if rule is None:
        return False
    since = _comparable_since(job, steps)
    evaluations = history(MetricsLog(job.logdir.metrics).read(), rule.metric, since=since)
    return bool(rule.reason(evaluations)) and steps[-1:] == [evaluations[-1][0]]


def _comparable_since(job: Job, steps: list[int]) -> int:
    """Returns the step after which evaluations are comparable, by the newest checkpoint."""
    try:
        description = describe(job.checkpoints().path(steps[-1])) if steps else None
    except CheckpointError:  # reported when it is opened
        description = None
    return comparable.comparable_since(description.input if description else {})
