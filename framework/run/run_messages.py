"""The lines that training prints before its first step and after its last one."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from tekso.framework import execution, files, out_of_memory, task_results
from tekso.framework.counting import counted
from tekso.framework.planning.measured_step import measured_step_of
from tekso.framework.run.assembly import Assembly
from tekso.framework.run.checkpoints import Checkpoint
from tekso.framework.run.job import Job
from tekso.framework.run.metric_choice import deciding_metrics, declared_metrics
from tekso.framework.run.report import summary
from tekso.framework.run.report.lines import wrapped
from tekso.framework.run.skip_notices import SkipNotices
from tekso.framework.run.training_loop import Outcome
from tekso.framework.units import bytes_text


def introduce(job: Job, checkpoint: Checkpoint | None) -> None:
    """Prints the first lines, before anything slow is built."""
    run = job.tree.run
    steps = counted(run.steps, "step", grouping="")
    job.console.line(f"{job.model} in {job.logdir.path}: {steps}, seed {run.seed}")
    if checkpoint is not None:
        left = max(0, run.steps - checkpoint.step)
        todo = "1 step is left" if left == 1 else f"{left} steps are left"
        job.console.line(f"resuming from {checkpoint.path}: {todo}", "good")
        for line in job.changes_since(checkpoint):
            job.console.line(f"  changed since then: {line}")
        if lost := job.settings_not_repeated(checkpoint):
            some = ", ".join(lost[:3]) + (", …" if len(lost) > 3 else "")
            job.console.line(
                f"this command does not repeat {counted(len(lost), 'setting')} of the run "
                f"({some}): to keep all settings of a run, leave out --model",
                "warning",
            )


def introduce_parts(job: Job, parts: Assembly, notices: SkipNotices) -> None:
    """Prints the sizes of the model, the inputs, the execution and its devices, and warnings."""
    specs = parts.task.specs()
    weights = sum(spec.size for spec in specs.values())
    size_bytes = sum(spec.size_bytes for spec in specs.values())
    frozen = sum(spec.size for path, spec in specs.items() if parts.learner.is_frozen(path))
    of_them = f"; {frozen:,} of them are frozen" if frozen else ""
    job.console.line(f"  model: {weights:,} weights, {bytes_text(size_bytes)}{of_them}")
    for name, input in {"input": parts.input, **parts.eval_inputs}.items():
        for line in wrapped(f"  {name}: {input.describe()}", job.console.width):
            job.console.line(line)
    notices.show()
    job.console.line(f"  execution: {_placed(parts)}")
    for line in parts.warnings:
        job.console.line(line, "warning")
    if (limit := out_of_memory.limit_bytes()) is not None:
        job.console.line(f"  {out_of_memory.limit_text(limit)}")


def _placed(parts: Assembly) -> str:
    """Returns the execution, its mesh or stages, and the devices."""
    params: Any = parts.tree.execution
    kind = type(params).owner.__name__
    names = {owner: name for name, owner in execution.EXECUTIONS.items()}
    found = [names.get(kind, kind)]
    if "mesh" in params and params.mesh:
        found.append(f"mesh {params.mesh}")
    if "num_stages" in params:
        found.append(counted(params.num_stages, "stage"))
    return f"{', '.join(found)}; devices: {parts.conditions['devices']}"


def show_step(job: Job, parts: Assembly) -> None:
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


def conclude(
    job: Job,
    parts: Assembly,
    outcome: Outcome,
    references: Mapping[str, Mapping[str, float]],
    best_step: int | None,
    spent: Sequence[str],
    decodes: bool,
) -> None:
    """Prints the results of a finished run, where its files are, and which commands to try next.

    Args:
      job: the job.
      parts: parts of the run.
      outcome: result of the training loop.
      references: bits per byte of other methods, {evaluation: {name: bits per byte}}.
      best_step: step of the best checkpoint, if there is one.
      spent: lines about the use of time.
      decodes: whether the task can decode.
    """
    lines = summary.finished(
        steps=outcome.step,
        seconds=time.perf_counter() - job.begin,
        evaluations=outcome.evaluations,
        references=references,
        ended_early=outcome.ended_early,
        deciding=deciding_metrics(job.tree),
        declared=declared_metrics(job.tree),
        skipped=skipped_steps(outcome, job.logdir.file("incidents")),
    )
    lines += [*(f"  {line}" for line in parts.program.summary()), *spent]
    width = job.console.width
    lines += summary.places(job.logdir, newest=outcome.step, best=best_step, width=width)
    lines += summary.next_commands(
        job.logdir,
        outcome.step,
        imports=job.imports,
        evaluates=bool(parts.eval_inputs),
        decodes=decodes,
        decoding=task_results.setting_to_try(parts.task, parts.eval_inputs),
        ended_early=bool(outcome.ended_early),
        best=best_step,
        cpu_devices=job.cpu_devices,
    )
    for line in lines:
        job.console.line(line)


def skipped_steps(outcome: Outcome, folder: str) -> str:
    """Returns how many steps of the run were not finite, or ""."""
    if not outcome.num_not_finite:
        return ""
    return (
        f"steps that were not finite and changed no weight: {outcome.num_not_finite}; see {folder}"
    )
