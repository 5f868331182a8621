"""Trains an experiment: claims the logdir, restores, trains, and reports where everything is.

`checkpoint_modes.py` has the modes that only read a checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from tekso.framework import files, out_of_memory, task_results, watchdog
from tekso.framework.execution.update_gate import UpdateGate
from tekso.framework.run import (
    decoding_trial,
    initial_weights,
    input_checks,
    loss_retrace,
    rescue,
    restoring,
    run_messages,
    time_use,
)
from tekso.framework.run.assembly import Assembly, with_paths
from tekso.framework.run.checkpoints import Checkpoint, Checkpoints
from tekso.framework.run.early_stopping import early_stopping_of
from tekso.framework.run.example_index import naming_indices, with_indices
from tekso.framework.run.following import FollowingCheckpoints, FollowingReport
from tekso.framework.run.incidents import Incidents
from tekso.framework.run.job import Job
from tekso.framework.run.machine_load import MachineLoad
from tekso.framework.run.metric_choice import deciding_metrics, declared_metrics
from tekso.framework.run.process_group import ProcessGroup
from tekso.framework.run.report import summary
from tekso.framework.run.report.report import Report
from tekso.framework.run.skip_notices import SkipNotices
from tekso.framework.run.step_calls import AroundSteps
from tekso.framework.run.step_profile import StepProfile
from tekso.framework.run.stop_signals import exit_code
from tekso.framework.run.timetable import Timetable
from tekso.framework.run.training_loop import Outcome, TrainingLoop
from tekso.framework.run.weight_figures import WeightFigures
from tekso.framework.task import Task


def train(job: Job) -> int:
    """Trains, from the newest good checkpoint if there is one; returns the exit code."""
    try:
        with job.meet(job.resumption) as group:
            return _train(job, group)
    except BaseException:
        if job.is_first:
            job.logdir.remove_if_unused()
            job.logdir.release()
        raise


def _train(job: Job, group: ProcessGroup) -> int:
    report: Report = FollowingReport()  # nothing is reported until the run has its parts
    with out_of_memory.explaining(lambda: report.phase, job.resumption):
        early_stopping_of(job.tree)  # raises now, not after the data is read
        checkpoints, checkpoint = _claim(job, group)
        if checkpoint is not None and checkpoint.step > job.tree.run.steps:
            return _has_nothing_to_do(job, checkpoint, checkpoints)
        parts, notices = _assembled(job, group, checkpoint)
        if group.is_first:
            steps, use = parts.run.params.steps, time_use.TimeUse(job.begin)
            report = Report(
                job.logdir,
                job.console,
                title=job.model,
                steps=steps,
                time_use=use,
                load=MachineLoad() if _is_one_process(job, group) else None,
                deciding=deciding_metrics(job.tree),
                declared=declared_metrics(job.tree),
            )
        try:
            return _run(job, group, parts, notices, checkpoints, checkpoint, report)
        finally:
            report.close()
            checkpoints.close()
            job.logdir.release()


def _is_one_process(job: Job, group: ProcessGroup) -> bool:
    """Returns whether no other process computes for the run, on this machine or elsewhere."""
    workers: list[str] = []

    def add(path: str, value: Any, field: Any) -> None:
        del field
        if path.rpartition(".")[2] == "workers":
            workers.extend(value)

    job.tree.execution.visit(add)
    return group.size == 1 and not workers


def _assembled(
    job: Job, group: ProcessGroup, checkpoint: Checkpoint | None
) -> tuple[Assembly, SkipNotices]:
    """Introduces the run; returns its parts, and the notices of skipped records."""
    run_messages.introduce(job, checkpoint)
    warm_start = {} if checkpoint is not None else job.tree.run.warm_start
    warn = functools.partial(job.console.line, style="warning")
    if group.is_first:
        initial_weights.take_tokenizers(warm_start, assets=job.logdir.assets, warn=warn)
    if checkpoint is not None and job.tree.run.warm_start:
        job.console.line(
            f"run.warm_start is not used: the run resumes from its own step {checkpoint.step}"
        )
    parts = job.assemble(group, checks_metrics=True)
    notices = SkipNotices({"input": parts.input, **parts.eval_inputs}, warn)
    run_messages.introduce_parts(job, parts, notices)
    return parts, notices


def _run(
    job: Job,
    group: ProcessGroup,
    parts: Assembly,
    notices: SkipNotices,
    checkpoints: Checkpoints,
    checkpoint: Checkpoint | None,
    report: Report,
) -> int:
    """Trains, decodes and reports; returns the exit code."""
    run = parts.run.params
    with group.explaining(), naming_indices(with_paths(parts.input, parts.eval_inputs)):
        input_checks.check_lasts(parts.input, run.steps)
        profile = _profile(job)
        unchecked: list[str] = []
        around: list[AroundSteps] = [notices.around]
        around.append(functools.partial(_warning_after, job, unchecked))
        around += [profile.around] if profile is not None else []
        loop = _loop(job, parts, checkpoints, report, group, around)
        step = restoring.restore(job, group, parts, checkpoints, checkpoint, loop)
        if checkpoint is None and job.tree.run.warm_start:
            _warm_start(job, parts)
        tried = job.try_task(parts, is_new=checkpoint is None)
        unchecked += tried.unchecked
        if run.decode_at_end and step < run.steps:
            _try_decoding(job, parts)
        if group.is_first:  # only now it is certain that the experiment fits the logdir
            job.logdir.write_params(job.model, job.tree, job.registered)
            job.logdir.add_command(job.command)
        if profile is not None:
            profile.check_run(step, run.steps)
        with profile or contextlib.nullcontext(), loss_retrace.explaining(parts, step, unchecked):
            outcome = rescue.run(job, loop, report, step, tried.label_limits)
        notices.show()
        report.time_use.switch(time_use.OTHER)
        ends = group.is_first and outcome.stopped_by is None
        references = _references(parts) if ends else {}
        report.draw_curves(references=next(iter(references.values()), None))
        if outcome.stopped_by is not None:
            path = checkpoints.path(outcome.step)
            lines = summary.stopped(outcome.stopped_by.name, outcome.step, run.steps, path)
            report.finish(outcome.step)
            for line in lines + _spent(job, parts, checkpoints, report, outcome):
                job.console.line(line)
            return exit_code(outcome.stopped_by)
        report.progress(outcome.step, "decoding")
        decoded, failed = None, None
        with report.time_use.during(time_use.DECODING):
            try:
                if run.decode_at_end:
                    decoded = task_results.decode(parts.task, parts.program, parts.input)
            except Exception as error:
                if group.size > 1:
                    raise
                failed = error  # after the report: training is done
    if not group.is_first:
        return 0
    job.console.close()
    _show(job, decoded)
    report.finish(outcome.step)
    spent = _spent(job, parts, checkpoints, report, outcome)
    decodes = type(parts.task).decode is not Task.decode
    if run.decode_at_end:
        decodes = (
            decoded is not None
            or task_results.setting_to_try(parts.task, parts.eval_inputs) is not None
        )
    run_messages.conclude(job, parts, outcome, references, checkpoints.best_step(), spent, decodes)
    if failed is not None:
        raise failed
    return 0


def _claim(job: Job, group: ProcessGroup) -> tuple[Checkpoints, Checkpoint | None]:
    """Claims the logdir; returns the checkpoints of the run, and the one to resume from."""
    if group.is_first:
        warn = functools.partial(job.console.line, style="warning")
        job.logdir.claim(job.model, warn=warn)
        checkpoints = job.checkpoints_as(Checkpoints, group)
        checkpoints.prepare()
    else:
        checkpoints = job.checkpoints_as(FollowingCheckpoints, group)
    return checkpoints, checkpoints.resume()


def _has_nothing_to_do(job: Job, checkpoint: Checkpoint, checkpoints: Checkpoints) -> int:
    """Reports that a run has done more steps than it should; its files stay as they are."""
    job.console.line(
        f"nothing to do: {job.logdir.path} is already at step {checkpoint.step}, and run.steps is "
        f"{job.tree.run.steps}",
        "warning",
    )
    checkpoint.release()
    checkpoints.close()
    job.logdir.release()
    job.console.close()
    return 0


# --- the pieces of a run ---


def _warm_start(job: Job, parts: Assembly) -> None:
    """Gives a new run its initial weights from other runs, and shows which."""
    warn = functools.partial(job.console.line, style="warning")
    begun = initial_weights.plan(
        parts.task.specs(), job.tree.run.warm_start, assets=job.logdir.assets, warn=warn
    )
    begun.restore(parts.program)
    for line in begun.lines():
        job.console.line(line)


def _try_decoding(job: Job, parts: Assembly) -> None:
    """Tries decoding before the first step; prints warnings."""
    setting = job.tree.origin("run.decode_at_end")
    found = decoding_trial.check(parts.task, parts.program, parts.input, setting=setting)
    job.warn(found)


def _fits_buffer(parts: Assembly, checkpoints: Checkpoints) -> bool:
    """Returns whether no step waits for values of a checkpoint to be written."""
    state_bytes = sum(spec.size_bytes for spec in parts.program.specs().values())
    return state_bytes <= checkpoints.buffer_bytes


def _spent(
    job: Job, parts: Assembly, checkpoints: Checkpoints, report: Report, outcome: Outcome
) -> list[str]:
    """Returns lines about the time of the run."""
    return time_use.lines(
        report.time_use.seconds(),
        shapes=outcome.shapes,
        fits_buffer=_fits_buffer(parts, checkpoints),
        width=job.console.width,
    )


def _loop(
    job: Job,
    parts: Assembly,
    checkpoints: Checkpoints,
    report: Report,
    group: ProcessGroup,
    around: Sequence[AroundSteps],
) -> TrainingLoop:
    run = parts.run.params
    every, around = run.weight_figures_every_steps, list(around)
    if every:
        around.append(WeightFigures(parts.program, every, report.weights).around)
    fits = _fits_buffer(parts, checkpoints)
    held = fits or parts.program.hold_updates(checkpoints.gate)
    around.insert(0, functools.partial(_around_steps, checkpoints.gate, report, held))
    return TrainingLoop(
        program=parts.program,
        task=parts.task,
        learner=parts.learner,
        batches=parts.batches,
        eval_batches=parts.eval_batches(),
        timetable=Timetable(
            steps=run.steps,
            log_every=run.log_every_steps,
            eval_every=run.eval_every_steps,
            checkpoint_every=run.checkpoint_every_steps,
            steps_per_call=run.steps_per_call,
        ),
        early_stopping=early_stopping_of(job.tree),
        checkpoints=checkpoints,
        description=parts.description(job.model),
        report=report,
        group=group,
        incidents=_incidents(job, parts) if group.is_first else None,
        max_rollbacks=parts.learner.params.max_rollbacks,
        score=parts.score,
        show_step=functools.partial(run_messages.show_step, job, parts) if job.shows_step else None,
        around_steps=functools.partial(_all_of, around),
    )


@contextlib.contextmanager
def _around_steps(
    gate: UpdateGate, report: Report, held: bool, first: int, last: int
) -> Iterator[None]:
    """Lets a call of steps wait for values that it replaces to be written.

    Args:
      gate: of the checkpoints.
      report: attributes the time of the wait to the checkpoint.
      held: whether the steps themselves wait.
      first: number of the first step.
      last: number of the last step.
    """
    del first, last
    if not held:
        with report.time_use.during(time_use.CHECKPOINT):
            gate.wait()
    with watchdog.patient(1.0 if gate.is_open else watchdog.PREPARING):
        yield


@contextlib.contextmanager
def _warning_after(job: Job, lines: list[str], first: int, last: int) -> Iterator[None]:
    """Prints warnings, which it removes, after a call of steps that did not fail."""
    del first, last
    yield
    job.warn(lines)
    lines.clear()


@contextlib.contextmanager
def _all_of(contexts: Sequence[AroundSteps], first: int, last: int) -> Iterator[None]:
    """Enters the contexts of a call of steps."""
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context(first, last))
        yield


def _profile(job: Job) -> StepProfile | None:
    """Returns what records the profile of steps, in the first process."""
    if job.profile_steps is None or not job.is_first:
        return None
    folder = job.logdir.file("profile")
    return StepProfile(*job.profile_steps, folder=folder, log=job.console.line)


def _incidents(job: Job, parts: Assembly) -> Incidents:
    warn = functools.partial(job.console.line, style="warning")
    folder, batch_of = job.logdir.file("incidents"), parts.input.batch
    named = functools.partial(with_indices, inputs={"input": parts.input})
    return Incidents(folder, batch_of=batch_of, warn=warn, imports=job.imports, named=named)


def _references(parts: Assembly) -> dict[str, dict[str, float]]:
    """Returns bits per byte of other methods, {evaluation: {name: bits per byte}}."""
    return {name: input.reference_bits_per_byte() for name, input in parts.eval_inputs.items()}


def _show(job: Job, decoded: Any) -> None:
    if decoded is not None:
        job.logdir.check()
        files.write_atomically(job.logdir.samples, decoded.text + "\n")
        job.show_text(decoded.text)
