"""The modes of the trainer: train an experiment, evaluate a checkpoint, decode with one."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tekso.framework import files, task_results
from tekso.framework.input.input import Input
from tekso.framework.input.prefetch import Prefetch
from tekso.framework.params import Params
from tekso.framework.planning.measured_step import measured_step_of
from tekso.framework.run import initial_weights, input_checks
from tekso.framework.run.assembly import Assembly
from tekso.framework.run.checkpoints import Checkpoint, Checkpoints
from tekso.framework.run.evaluation import Stopped, evaluate_and_score
from tekso.framework.run.following import FollowingCheckpoints, FollowingReport
from tekso.framework.run.job import Job
from tekso.framework.run.metrics_log import SPLIT, STEP, MetricsLog
from tekso.framework.run.process_group import ProcessGroup
from tekso.framework.run.report import summary
from tekso.framework.run.report.lines import eval_line, size, wrapped
from tekso.framework.run.report.report import Report
from tekso.framework.run.stop_signals import exit_code
from tekso.framework.run.training_loop import Outcome, Timetable, TrainingLoop, restore
from tekso.framework.task import Scored, Task


def train(job: Job) -> int:
    """Trains, from the newest good checkpoint if there is one; returns the exit code."""
    with job.meet(job.goes_on) as group:
        return _train(job, group)


def _train(job: Job, group: ProcessGroup) -> int:
    begin = time.perf_counter()
    checkpoints, checkpoint = _claim(job, group)
    _introduce(job, checkpoint)
    warm_start = {} if checkpoint is not None else job.tree.run.warm_start
    warn = functools.partial(job.console.line, style="warning")
    if group.is_first:
        initial_weights.take_tokenizers(warm_start, assets=job.logdir.assets, warn=warn)
    if checkpoint is not None and job.tree.run.warm_start:
        job.console.line(
            f"run.warm_start is not used: the run resumes from its own step {checkpoint.step}"
        )
    parts = job.assemble(group)
    _introduce_parts(job, parts)
    run = parts.run.params
    report: Report = FollowingReport()
    if group.is_first:
        report = Report(job.logdir, job.console, title=job.model, steps=run.steps)
    try:
        with group.explaining():
            input_checks.check_lasts(parts.input, run.steps)
            loop = _loop(job, parts, checkpoints, report, group)
            step = loop.restore(checkpoint)
            if warm_start:
                _warm_start(job, parts, warn)
            _try_task(job, parts, is_new=checkpoint is None)
            if group.is_first:  # only now it is certain that the experiment fits the logdir
                job.logdir.write_params(job.model, job.tree, job.registered)
                job.logdir.add_command(job.command)
            outcome = loop.run(step)
            report.draw_curves()
            if outcome.stopped_by is not None:
                path = checkpoints.path(outcome.step)
                name = outcome.stopped_by.name
                for line in summary.stopped(name, outcome.step, run.steps, path):
                    job.console.line(line)
                return exit_code(outcome.stopped_by)
            report.progress(outcome.step, "decoding")
            decoded = (
                task_results.decode(parts.task, parts.program, parts.input)
                if run.decode_at_end
                else None
            )
        if not group.is_first:
            return 0
        references = _references(parts)
        report.draw_curves(references=next(iter(references.values()), None))
        job.console.close()
        _show(job, decoded)
        seconds = time.perf_counter() - begin
        decodes = type(parts.task).decode is not Task.decode
        if run.decode_at_end:
            decodes = (
                decoded is not None
                or task_results.setting_to_try(parts.task, parts.eval_inputs) is not None
            )
        _conclude(job, parts, outcome, references, checkpoints.best_step(), seconds, decodes)
    finally:
        report.close()
        checkpoints.close()
        job.logdir.release()
    return 0


def _claim(job: Job, group: ProcessGroup) -> tuple[Checkpoints, Checkpoint | None]:
    """Claims the logdir; returns the checkpoints of the run, and the one to resume from."""
    if group.is_first:
        job.logdir.claim(job.model)
        checkpoints = job.checkpoints()
        checkpoints.prepare()
        checkpoint = checkpoints.newest_good(set_aside=True)
        group.from_first(checkpoint.step if checkpoint else None)
        return checkpoints, checkpoint
    followed = job.checkpoints_as(FollowingCheckpoints)
    return followed, followed.follow(group.from_first(None))


def evaluate_checkpoint(job: Job, checkpoint: Checkpoint) -> dict[str, Any]:
    """Evaluates a checkpoint on all evaluation inputs; returns the figures.

    It also prints the figures, and appends them to evaluations.jsonl in the logdir.

    Raises:
      ValueError: there are no evaluation inputs.
    """
    if not job.tree.eval_inputs:
        raise ValueError(f"{job.model} has no eval_inputs: there is nothing to evaluate on")
    with job.meet(checkpoint=checkpoint.path) as group:
        return _evaluate(job, checkpoint, group)


def _evaluate(job: Job, checkpoint: Checkpoint, group: ProcessGroup) -> dict[str, Any]:
    parts = _restored(job, checkpoint, group, trains=False)
    _try_task(job, parts, is_new=False)
    log = MetricsLog(job.logdir.file("evaluations.jsonl"))
    found = {}
    for name, batches in _eval_batches(parts).items():
        begin = time.perf_counter()
        job.console.progress(0, 1, f"evaluating {name}")
        evaluation = evaluate_and_score(
            parts.program,
            parts.task,
            batches(0),
            functools.partial(_score, parts, name, True),
            name=name,
            before_score=functools.partial(job.console.progress, 0, 1, f"decoding {name}"),
        )
        values, scored = evaluation.figures, evaluation.scored
        seconds = time.perf_counter() - begin
        line = eval_line(name, checkpoint.step, values, seconds=seconds, width=job.console.width)
        job.console.line(line, "evaluation")
        record = {STEP: checkpoint.step, SPLIT: name, **values, "checkpoint": checkpoint.path}
        different = changes(checkpoint.description.params, job.tree)
        if different:
            record["changes"] = different
        if scored is not None:
            record["notes"] = list(scored.notes)
            if group.is_first:
                _show_text(job, scored.text)
        try:
            if group.is_first:
                log.append(record)
                if scored is not None:
                    job.logdir.write_decoded(
                        name, "eval", scored.text, scored.images, prefix="eval_"
                    )
        except OSError as error:  # for example, the run belongs to another user
            job.console.line(f"cannot write to {log.path}: {error.strerror}", "warning")
        found[name] = values
    log.close()
    job.console.close()
    return {"model": job.model, "checkpoint": checkpoint.path, STEP: checkpoint.step, **found}


def decode(job: Job, checkpoint: Checkpoint) -> Any:
    """Decodes with a checkpoint by the Params of the task; returns the `Decoded` of the task.

    Raises:
      ValueError: the task decodes nothing.
    """
    with job.meet(checkpoint=checkpoint.path) as group:
        reads_data = task_results.decodes_data(job.tree.task)
        parts = _restored(job, checkpoint, group, reads_data=reads_data)
        decoded = task_results.decode(parts.task, parts.program, parts.input)
    if decoded is None:
        name = type(parts.task).__name__
        why = f"{name}.decode() returned None"
        if type(parts.task).decode is Task.decode:
            why = f"{name} has no decode(): return Decoded(text, records) from it"
        raise ValueError(f"{job.model} has nothing to decode: {why}")
    return decoded


# --- the pieces of a run ---


def _warm_start(job: Job, parts: Assembly, warn: Callable[[str], None]) -> None:
    """Gives a new run its initial weights from other runs, and shows which."""
    begun = initial_weights.plan(
        parts.task.specs(), job.tree.run.warm_start, assets=job.logdir.assets, warn=warn
    )
    begun.restore(parts.program)
    for line in begun.lines():
        job.console.line(line)


def _loop(
    job: Job, parts: Assembly, checkpoints: Checkpoints, report: Report, group: ProcessGroup
) -> TrainingLoop:
    run = parts.run.params
    return TrainingLoop(
        program=parts.program,
        task=parts.task,
        learner=parts.learner,
        batches=functools.partial(_batches, parts, parts.input, stop=run.steps, even=True),
        eval_batches=_eval_batches(parts),
        timetable=Timetable(
            steps=run.steps,
            log_every=run.log_every_steps,
            eval_every=run.eval_every_steps,
            checkpoint_every=run.checkpoint_every_steps,
        ),
        checkpoints=checkpoints,
        description=parts.description(job.model),
        report=report,
        group=group,
        score=functools.partial(_score, parts),
        show_step=functools.partial(_show_step, job, parts) if job.shows_step else None,
    )


def _eval_batches(parts: Assembly) -> dict[str, Any]:
    return {
        name: functools.partial(_batches, parts, input, stop=input.num_batches)
        for name, input in parts.eval_inputs.items()
    }


def _score(parts: Assembly, name: str, is_last: bool, stopped: Stopped) -> Scored | None:
    input = parts.eval_inputs[name]
    return task_results.score(parts.task, parts.program, input, is_last=is_last, stopped=stopped)


def _batches(
    parts: Assembly, input: Input, start: int, *, stop: int | None, even: bool = False
) -> Iterator[Mapping[str, Any]]:
    """Yields this process's part of the batches from a step on."""
    part, count = parts.program.part
    fetch = functools.partial(input.part, part=part, parts=count, even=even)
    with Prefetch(fetch, start=start, stop=stop) as batches:
        yield from batches


def _restored(
    job: Job,
    checkpoint: Checkpoint,
    group: ProcessGroup,
    *,
    reads_data: bool = True,
    trains: bool = True,
) -> Assembly:
    parts = job.assemble(group, reads_data=reads_data, trains=trains)
    restore(parts.program, checkpoint)
    return parts


# --- the lines at the beginning and the end of a run ---


def _introduce(job: Job, checkpoint: Checkpoint | None) -> None:
    """Prints the first lines, before anything slow is built."""
    run = job.tree.run
    job.console.line(f"{job.model} in {job.logdir.path}: {run.steps} steps, seed {run.seed}")
    if checkpoint is not None:
        left = max(0, run.steps - checkpoint.step)
        job.console.line(f"resuming from {checkpoint.path}: {left} steps are left", "good")
        for line in changes(checkpoint.description.params, job.tree):
            job.console.line(f"  changed since then: {line}")


def _introduce_parts(job: Job, parts: Assembly) -> None:
    specs = parts.task.specs().values()
    weights = sum(spec.size for spec in specs)
    job.console.line(f"  model: {weights:,} weights, {size(sum(s.size_bytes for s in specs))}")
    for name, input in {"input": parts.input, **parts.eval_inputs}.items():
        for line in wrapped(f"  {name}: {input.describe()}", job.console.width):
            job.console.line(line)
        skipped = input.skipped()
        if skipped.count:
            job.console.line(f"{name}: {skipped}", "warning")
    for line in parts.warnings:
        job.console.line(line, "warning")


def changes(before: str, tree: Params) -> list[str]:
    """Returns the differences from the Params of a checkpoint, one line for each."""
    try:
        return Params.from_text(before).diff(tree).splitlines()
    except (ValueError, ImportError, AttributeError, TypeError) as error:
        return [f"the Params of the checkpoint can no longer be read: {error}"]


def _try_task(job: Job, parts: Assembly, *, is_new: bool) -> None:
    """Checks the task on a few examples, or only its handling of padding; prints warnings."""
    for line in parts.try_task(is_new=is_new):
        job.console.line(line, "warning")


def _references(parts: Assembly) -> dict[str, dict[str, float]]:
    """Returns bits per byte of other methods, {evaluation: {name: bits per byte}}."""
    return {name: input.reference_bits_per_byte() for name, input in parts.eval_inputs.items()}


def _show(job: Job, decoded: Any) -> None:
    if decoded is not None:
        files.write_atomically(job.logdir.samples, decoded.text + "\n")
        _show_text(job, decoded.text)


def _show_text(job: Job, text: str) -> None:
    for line in text.splitlines():
        job.console.line(line, "dim")


def _show_step(job: Job, parts: Assembly) -> None:
    """Prints the timeline of the devices in the last step, and draws it to the logdir."""
    trace = measured_step_of(parts.program)
    if trace is None or not job.is_first:
        return
    for line in trace.lines(job.console.width):
        job.console.line(line)
    path = job.logdir.file("pipeline.png")
    try:
        files.write_atomically(path, trace.png(job.model))
        job.console.line(f"as a picture: {path}")
    except OSError as error:  # a failed picture must not end a run
        job.console.line(f"cannot write {path}: {error.strerror}", "warning")


def _conclude(
    job: Job,
    parts: Assembly,
    outcome: Outcome,
    references: Mapping[str, Mapping[str, float]],
    best_step: int | None,
    seconds: float,
    decodes: bool,
) -> None:
    lines = summary.finished(
        steps=outcome.step,
        seconds=seconds,
        evaluations=outcome.evaluations,
        references=references,
    )
    width = job.console.width
    lines += summary.places(job.logdir, newest=outcome.step, best=best_step, width=width)
    lines += summary.next_commands(
        job.logdir,
        outcome.step,
        imports=job.imports,
        evaluates=bool(parts.eval_inputs),
        decodes=decodes,
        decoding=task_results.setting_to_try(parts.task, parts.eval_inputs),
    )
    for line in lines:
        job.console.line(line)
