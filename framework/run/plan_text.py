"""Shows the plan of a run as text and as JSON data."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Sequence
from typing import Any

from tekso.framework.run.report.lines import WIDTH, duration
from tekso.framework.run.run_plan import RunPlan
from tekso.framework.run.step_parts import StepPlan
from tekso.framework.tables import table
from tekso.framework.units import bytes_text, flops_text, seconds_text

_PIPELINES = (
    "The memory of pipelines is without temporary memory of their updates, that of other "
    "executions with it."
)
_EXPLAINED = 3  # of the ranked executions
_NAMES = {"used_weights": "copies of weights"}


def record(plan: RunPlan) -> dict[str, Any]:
    """Returns the plan as JSON data."""
    return {
        "model": plan.model,
        "device": plan.device.name,
        "memory_limit_bytes": int(plan.device.memory_bytes),
        "weights": plan.weights,
        "ok": not plan.problems,
        "problems": plan.problems,
        "step": None if plan.step is None else _step_record(plan, plan.step),
        "forward_flops": dict(plan.forward_flops),
        "others": [_step_record(plan, step) for step in plan.others],
        "rejected": dict(plan.rejected),
        "machine": dataclasses.asdict(plan.condition),
        "checkpoint_bytes": plan.checkpoint_bytes,
        "checkpoints": plan.checkpoints,
        "existing_checkpoints": plan.existing_checkpoints,
        "disk_bytes": plan.disk_bytes,
        "free_bytes": plan.free_bytes,
        "logdir": plan.logdir,
        "resumes_from": plan.resumes_from,
        "warnings": list(plan.warnings),
        "changes": list(plan.changes),
        "steps": plan.steps,
    }


def record_of_problems(model: str, problems: Sequence[str]) -> dict[str, Any]:
    """Returns as JSON data why a run of an experiment would fail that cannot be planned.

    Args:
      model: key of the experiment.
      problems: the reasons.
    """
    return {"model": model, "ok": False, "problems": list(dict.fromkeys(problems)), "step": None}


def _step_record(plan: RunPlan, step: StepPlan) -> dict[str, Any]:
    return {
        "execution": step.name,
        "devices": step.devices,
        "fits": plan.fits(step),
        "bytes_per_device": int(step.total_bytes),
        "bytes_of_all_devices": int(step.bytes_of_all_devices),
        "sharing_devices": step.sharing_devices,
        "memory": {name: int(value) for name, value in step.memory.items()},
        "flops_per_device": step.flops,
        "seconds": step.seconds,
        "core_seconds": step.core_seconds,
        "counted_bytes": step.counted_bytes,
        "idle_share": step.idle_share,
        "collectives": [dataclasses.asdict(one) for one in step.collectives],
        "sent_bytes": int(step.sent_bytes),
        "tried": step.tried,
        "notes": list(step.notes),
    }


def text(plan: RunPlan, *, width: int | None = None) -> str:
    """Returns the plan as text, for a terminal of `width` columns if given."""
    prose = width or WIDTH
    lines = [plan.model, ""]
    if plan.step is not None:
        lines += [*_step(plan, plan.step, prose), ""]
    lines += [*_forward(plan), *_run(plan, prose)]
    if plan.others:
        rows = [
            (
                seconds_text(step.seconds),
                bytes_text(step.total_bytes),
                step.name + _unfit(plan, step),
            )
            for step in plan.others
        ]
        lines += ["", *table(("step", "memory", "execution"), rows, right=(0, 1), width=width)]
        if any("pipelined" in step.name for step in plan.others):
            lines += textwrap.wrap(_PIPELINES, prose)
        for step in plan.others[:_EXPLAINED]:
            lines += ["", *textwrap.wrap(step.name, prose), *_bullets(step, prose)]
        if plan.rejected:
            lines.append("")
    for name, why in plan.rejected.items():
        lines += _wrapped(f"{name}: {why}", prose)
    if condition := plan.condition.text():
        lines += ["", *textwrap.wrap(f"machine     {condition}", prose, subsequent_indent=" " * 12)]
    lines.append("")
    lines += problem_lines(plan.problems, prose) or ["no problems were found"]
    return "\n".join(lines)


def problem_lines(problems: Sequence[str], width: int) -> list[str]:
    """Returns the lines of problems; a table in a problem keeps its lines."""
    return [line for text in problems for line in _wrapped(f"problem: {text}", width)]


def _wrapped(text: str, width: int) -> list[str]:
    """Returns a text in lines of a width; all but the first are indented."""
    first, *others = text.split("\n")
    found = textwrap.wrap(first, width, subsequent_indent="    ")
    for line in others:
        found += textwrap.wrap(line, width, initial_indent="    ", subsequent_indent="    ")
    return found


def _unfit(plan: RunPlan, step: StepPlan) -> str:
    """Returns that a ranked step does not fit, and what was tried; "" if it fits."""
    tried = f"; {step.tried}" if step.tried else ""
    return "" if plan.fits(step) else f"  (does not fit{tried})"


def _step(plan: RunPlan, step: StepPlan, width: int) -> list[str]:
    whole = plan.device.memory_bytes
    lines = [
        f"execution   {step.name}",
        f"devices     {step.devices} × {plan.device.name}",
        f"weights     {plan.weights:,}",
        f"memory      {bytes_text(step.total_bytes)} of {bytes_text(whole)} per device:",
    ]
    for name, value in step.memory.items():
        if value:
            lines.append(f"              {_NAMES.get(name, name):<20} {bytes_text(value):>8}")
    lines += [
        f"step        {flops_text(step.flops)} per device, about {seconds_text(step.seconds)}",
    ]
    for note in step.notes:
        lines += textwrap.wrap(
            note, width, initial_indent="              ", subsequent_indent=" " * 16
        )
    return lines


def _bullets(step: StepPlan, width: int) -> list[str]:
    """Returns the notes of a ranked execution."""
    return [
        line
        for note in step.notes
        for line in textwrap.wrap(note, width, initial_indent="  - ", subsequent_indent="    ")
    ]


def _forward(plan: RunPlan) -> list[str]:
    """Returns the operations of the forward pass by part of the model."""
    parts = plan.forward_flops
    total = math.fsum(parts.values())
    if not total:
        return []
    wide = max(map(len, parts))
    return [
        f"forward     {flops_text(total)} for the whole batch:",
        *(
            f"              {name:<{wide}}  {flops_text(flops):>10}  {flops / total:4.0%}"
            for name, flops in parts.items()
        ),
        "",
    ]


def _run(plan: RunPlan, width: int) -> list[str]:
    done = plan.resumes_from or 0
    left = max(0, plan.steps - done)
    count = plan.existing_checkpoints
    if plan.resumes_from is not None:
        how = f"resumes from step {done} in {plan.logdir}: {left} steps are left"
    elif count:
        how = f"none, because no checkpoint in {plan.logdir} can be read"
    else:
        how = f"a new run in {plan.logdir}: {left} steps are left"
    time = []
    if plan.step is not None and (plan.resumes_from is not None or not count):
        about = duration(left * plan.step.seconds)
        time.append(f"              about {about}, without start, compilation and evaluations")
    existing = f", {count} {'exists' if count == 1 else 'exist'}" if count else ""
    free = "" if plan.free_bytes is None else f"; {bytes_text(plan.free_bytes)} are free"
    said = [*plan.warnings, *(f"changed since then: {line}" for line in plan.changes)]
    return [
        f"run         {how}",
        *time,
        *(
            line
            for one in said
            for line in textwrap.wrap(
                one, width, initial_indent=" " * 14, subsequent_indent=" " * 16
            )
        ),
        f"disk        checkpoints of {bytes_text(plan.checkpoint_bytes)}, at most "
        f"{plan.checkpoints} of them: {bytes_text(plan.disk_bytes)}{existing}{free}",
    ]
