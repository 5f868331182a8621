"""How figures read on a terminal: one line a logged step or evaluation, never wider than asked.

    step 1200/2000  loss 1.4567  2.102 bits/byte  grad 0.53  lr 0.003  13.1k tok/s  1m45s left

Functions of numbers only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

WIDTH = 100  # columns, where the output is no terminal

_SHORT_UNITS = {"tokens": "tok", "examples": "ex"}


def train_line(
    step: int,
    steps: int,
    values: Mapping[str, float],
    *,
    speed: float | None,
    unit: str,
    wait_share: float | None,
    seconds_left: float | None,
    width: int = WIDTH,
) -> str:
    """Returns the line of a training step.

    Args:
      step: steps done.
      steps: of the whole run.
      values: "loss" and what else the step reports.
      speed: units a second; None if unknown.
      unit: what is counted: "tokens", "examples".
      wait_share: share of the time in which the step waited for input; None if unknown.
      seconds_left: to the end of training; None if unknown.
      width: columns; what matters least is left out until the line fits.
    """
    quality = quality_of(values)
    # (importance, text): the least important go first where there is no room.
    parts = [
        (9, f"step {step:>{len(str(steps))}}/{steps}"),
        (9, f"loss {number(values['loss'])}"),
        (8, quality),
        (4, f"grad {number(values['gradient_norm'], 2)}" if "gradient_norm" in values else ""),
        (3, f"lr {values['learning_rate']:.2g}" if "learning_rate" in values else ""),
        (7, f"{magnitude(speed)} {_SHORT_UNITS.get(unit, unit)}/s" if speed is not None else ""),
        (2, f"wait {100 * wait_share:.0f}%" if wait_share is not None else ""),
        (5, f"{duration(seconds_left)} left" if seconds_left is not None else ""),
    ]
    if values.get("nonfinite_total"):
        parts.insert(3, (6, f"skipped {values['nonfinite_total']:.0f}"))
    return fit(parts, width)


def eval_line(
    name: str,
    step: int,
    values: Mapping[str, float],
    *,
    seconds: float,
    is_best: bool = False,
    width: int = WIDTH,
) -> str:
    """Returns the line of an evaluation."""
    shown = ("loss", "bits_per_byte", "perplexity")
    others = [f"{key} {number(value)}" for key, value in values.items() if key not in shown]
    parts = [
        (9, f"{name} at step {step}"),
        (9, f"loss {number(values['loss'])}" if "loss" in values else ""),
        (8, quality_of(values)),
        *((3 - 0.01 * i, text) for i, text in enumerate(others)),
        (2, f"in {duration(seconds)}"),
        (7, "best so far" if is_best else ""),
    ]
    return fit(parts, width)


def quality_of(values: Mapping[str, float]) -> str:
    """Returns bits per byte, or else the perplexity, or else nothing."""
    if "bits_per_byte" in values:
        return f"{number(values['bits_per_byte'], 3)} bits/byte"
    if "perplexity" in values:
        return f"perplexity {number(values['perplexity'])}"
    return ""


def fit(parts: Sequence[tuple[float, str]], width: int) -> str:
    """Joins texts by two spaces, or one, without the least important ones that do not fit."""
    parts = [part for part in parts if part[1]]
    while True:
        texts = [text for _, text in parts]
        for separator in ("  ", " "):
            line = separator.join(texts)
            if len(line) <= width or len(parts) == 1:
                return line
        parts.remove(min(parts, key=lambda part: part[0]))


def number(value: float, digits: int = 4) -> str:
    """Returns a number with about `digits` digits that count: 12.35, 0.1235, 1.2e+08."""
    if not math.isfinite(value):
        return str(value)
    if value == 0 or 1e-3 <= abs(value) < 10 ** (digits + 1):
        whole = len(str(int(abs(value))))
        return f"{value:.{max(0, digits + 1 - whole if whole > 1 else digits)}f}"
    return f"{value:.{digits - 2}e}"


def magnitude(value: float) -> str:
    """Returns a count with three digits and a letter: 950, 13.1k, 2.05M."""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{letter}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """Returns a time with its two largest units: 0.4s, 12s, 1m45s, 3h05m, 2d04h."""
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    if seconds < 86400:
        return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
    return f"{seconds // 86400}d{seconds % 86400 // 3600:02d}h"


def size(num_bytes: float) -> str:
    """Returns a size with its unit: 512 B, 3.4 MB."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= limit:
            return f"{num_bytes / limit:.1f} {unit}"
    return f"{num_bytes:.0f} B"
