"""Summarizes a finished run: its figures, where its files are, and which commands to try next."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence

from tekso.framework import files
from tekso.framework.commands import typed
from tekso.framework.counting import counted
from tekso.framework.run.logdir import Logdir
from tekso.framework.run.report.lines import (
    WIDTH,
    deciding_of,
    duration,
    names_of,
    number,
    others_of,
    packed,
    quality_of,
    scores_of,
)

_TRAINER = "tekso-trainer"

_MOST_OTHERS = 12
"""Figures of an evaluation that are listed at the end, besides the loss, quality and scores."""


def finished(
    *,
    steps: int,
    seconds: float,
    evaluations: Mapping[str, Mapping[str, float]],
    references: Mapping[str, Mapping[str, float]],
    ended_early: str = "",
    deciding: Collection[str] = (),
    declared: Collection[str] = (),
    skipped: str = "",
) -> list[str]:
    """Returns lines with the final figures of a run.

    Args:
      steps: total number of steps done.
      seconds: duration of this process.
      evaluations: final figures, {evaluation: figures}.
      references: bits per byte of other methods, {evaluation: {name: bits per byte}}.
      ended_early: why early stopping ended the run, or "".
      deciding: "evaluation/metric" of the figures that decide: they are always listed.
      declared: metrics that are listed before others.
      skipped: which steps changed nothing, or "".
    """
    lines = [
        "",
        f"done: {counted(steps, 'step', grouping='')}, {duration(seconds)} in this process",
    ]
    if ended_early:
        lines.append(f"  ended early (run.early_stopping): {ended_early}")
    if skipped:
        lines.append(f"  {skipped}")
    width = max(map(len, evaluations), default=0)
    for name, values in evaluations.items():
        quality = quality_of(values)
        loss = f"loss {number(values['loss'])}"
        own = names_of(name, deciding)
        others = [*deciding_of(values, own), *others_of(values, own, declared)]
        parts = [f"{name:<{width}}", loss, quality, *scores_of(values), *others[:_MOST_OTHERS]]
        if (more := len(others) - _MOST_OTHERS) > 0:
            parts.append(f"and {more} more, which --mode=eval prints")
        lines += packed([part for part in parts if part], indent="  ")
        compared = references.get(name, {})
        if compared and "bits_per_byte" in values:
            listed = ", ".join(f"{other} {value:.4f}" for other, value in compared.items())
            lines.append(f"  {'':<{width}}  bits/byte of other methods on the same text: {listed}")
    return lines


def places(logdir: Logdir, *, newest: int, best: int | None, width: int = WIDTH) -> list[str]:
    """Returns lines that list the files of a run."""
    best_text = f", the best at step {best}" if best is not None and best != newest else ""
    rows = [
        ("checkpoints", f"{logdir.checkpoints}/", f"(the newest at step {newest}{best_text})"),
        ("figures", logdir.metrics, ""),
        ("curves", logdir.curves, ""),
        *([("samples", logdir.samples, "")] if files.exists(logdir.samples) else []),
        ("parameters", logdir.file("params.txt"), "(changes in params.diff.txt)"),
    ]
    lines = ["files of this run:"]
    for name, path, remark in rows:
        line = f"  {name:<12} {path}"
        whole = f"{line}  {remark}".rstrip()
        lines += [whole] if len(whole) <= width else [line, f"  {'':<12} {remark}"]
    return lines


def next_commands(
    logdir: Logdir,
    steps: int,
    *,
    imports: Sequence[str] = (),
    evaluates: bool = True,
    decodes: bool = True,
    decoding: str | None = None,
    ended_early: bool = False,
    best: int | None = None,
    cpu_devices: int | None = None,
) -> list[str]:
    """Returns lines with commands to try next; each command reads its Params from the logdir.

    Args:
      logdir: logdir of the run.
      steps: steps done.
      imports: packages of the user that must be imported.
      evaluates: whether there are evaluation inputs.
      decodes: whether the task decodes.
      decoding: a setting to try in decoding, "path=value".
      ended_early: whether early stopping ended the run; more steps alone would not continue it.
      best: step of the best checkpoint, if there is one; decoding and evaluation use it.
      cpu_devices: number of logical CPU devices, if the command of the run set it.
    """
    place = shlex.join([f"--logdir={logdir.path}"])
    flags = shlex.join([*(f"--import={name}" for name in imports), f"--logdir={logdir.path}"])
    devices = "" if cpu_devices is None else f" --cpu_devices={cpu_devices}"
    base = f"{typed(_TRAINER)} {flags}{devices}"
    more = "--set run.early_stopping.patience=0" if ended_early else f"--steps={2 * max(steps, 50)}"
    of_best = "" if best in (None, steps) else " --checkpoint=best"
    setting = f" --set {shlex.quote(decoding)}" if decoding else ""
    return [
        "next commands:",
        *([f"  {base} --mode=decode{of_best}{setting}"] if decodes else []),
        *([f"  {base} --mode=eval{of_best}"] if evaluates else []),
        f"  {base} {more}",
        f"  {typed('tensorboard')} {place}",
    ]


def stopped(signal_name: str, step: int, steps: int, checkpoint: str) -> list[str]:
    """Returns lines for a run that a signal stopped early."""
    return [
        f"stopped by {signal_name} after step {step} of {steps}; saved in {checkpoint}",
        "to resume from there, repeat the command",
    ]
