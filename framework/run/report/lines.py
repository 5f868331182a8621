"""Formats figures for a terminal: one line per logged step or evaluation, of limited width.

    step 1200/2000  loss 1.4567  2.102 bits/byte  grad 0.53  lr 3.0e-3  13.1k tok/s  1m45s left

and with a smaller width

    step 1200/2000 loss 1.4567 2.102 bpb grad 0.53 lr 3.0e-3 13.1k/s wait  0%  1m45s

The figures of all steps are aligned in columns. The functions depend only on their arguments.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Collection, Mapping, Sequence

WIDTH = 80  # columns, if the output is not a terminal

_SCORES = {"bleu": "BLEU", "chrf": "chrF"}
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
      steps: number of steps of the whole run.
      values: "loss" and the other figures of the step.
      speed: units per second; None if unknown.
      unit: the unit that is counted: "tokens", "examples".
      wait_share: share of the time in which the step waited for input; None if unknown.
      seconds_left: seconds to the end of training; None if unknown.
      width: maximum number of columns; words are shortened, and the least important figures are
        omitted, until the line fits.
    """
    # (importance, text, short text): the least important parts are omitted first.
    parts = [
        _part(9, f"step {step:>{len(str(steps))}}/{steps}"),
        _part(9, f"loss {number(values['loss']):>6}"),
    ]
    if "bits_per_byte" in values:
        bits = f"{number(values['bits_per_byte'], 3):>5}"
        parts.append(_part(8, f"{bits} bits/byte", f"{bits} bpb"))
    elif "perplexity" in values:
        perplexity = f"{number(values['perplexity']):>6}"
        parts.append(_part(8, f"perplexity {perplexity}", f"ppl {perplexity}"))
    if values.get("nonfinite_total"):
        parts.append(_part(6, f"skipped {values['nonfinite_total']:.0f}"))
    if "gradient_norm" in values:
        parts.append(_part(4, f"grad {number(values['gradient_norm'], 2):>4}"))
    if "learning_rate" in values:
        parts.append(_part(3, f"lr {scientific(values['learning_rate']):>6}"))
    # Unknown figures are replaced by spaces, so that the first and last lines align with the rest.
    units = f"{magnitude(speed or 0.0):>5}"
    left = f"{duration(seconds_left or 0.0):>6}"
    parts += [
        _known(speed, _part(7, f"{units} {_SHORT_UNITS.get(unit, unit)}/s", f"{units}/s")),
        _known(wait_share, _part(2, f"wait {100 * (wait_share or 0.0):2.0f}%")),
        _known(seconds_left, _part(5, f"{left} left", left)),
    ]
    return fit(parts, width).rstrip()


def eval_line(
    name: str,
    step: int,
    values: Mapping[str, float],
    *,
    seconds: float,
    is_best: bool = False,
    deciding: Collection[str] = (),
    declared: Collection[str] = (),
    width: int | None = WIDTH,
) -> str:
    """Returns the line of an evaluation.

    Args:
      name: name of the evaluation input.
      step: steps done.
      values: the figures.
      seconds: time of the evaluation.
      is_best: whether it is the best of the run so far.
      deciding: figures that the line has at any width.
      declared: figures that come before all others, as far as the width allows.
      width: maximum number of columns, as in `train_line`; None: any.
    """

    def figure(importance: float, key: str, text: str) -> Part:
        return _part(10 if key in deciding else importance, text)

    others = others_of(values, deciding, declared)
    quality = "bits_per_byte" if "bits_per_byte" in values else "perplexity"
    scores = zip((key for key in _SCORES if key in values), scores_of(values), strict=True)
    parts = [
        _part(9, f"{name} at step {step}"),
        figure(9, "loss", f"loss {number(values['loss'])}" if "loss" in values else ""),
        figure(8, quality, quality_of(values)),
        *(figure(8, key, text) for key, text in scores),
        *(_part(10, text) for text in deciding_of(values, deciding)),
        *(_part(3 - 0.01 * i, text) for i, text in enumerate(others)),
        _part(2, f"in {duration(seconds)}"),
        _part(7, "best so far" if is_best else ""),
    ]
    return fit(parts, width)


def quality_of(values: Mapping[str, float]) -> str:
    """Returns bits per byte as text; otherwise the perplexity; otherwise ""."""
    if "bits_per_byte" in values:
        return f"{number(values['bits_per_byte'], 3)} bits/byte"
    if "perplexity" in values:
        return f"perplexity {number(values['perplexity'])}"
    return ""


def scores_of(values: Mapping[str, float]) -> list[str]:
    """Returns the scores of decoded text: BLEU and chrF, from 0 to 100."""
    return [f"{name} {values[key]:.2f}" for key, name in _SCORES.items() if key in values]


def deciding_of(values: Mapping[str, float], names: Collection[str]) -> list[str]:
    """Returns the figures with these names that no other function of this file shows."""
    shown = {"loss", "bits_per_byte", *_SCORES}
    if "bits_per_byte" not in values:
        shown.add("perplexity")  # see `quality_of`
    return [f"{name} {number(values[name])}" for name in values if name in {*names} - shown]


def names_of(evaluation: str, metrics: Collection[str]) -> set[str]:
    """Returns the names of those of the metrics, "evaluation/metric", that are of an evaluation."""
    head = f"{evaluation}/"
    return {metric.removeprefix(head) for metric in metrics if metric.startswith(head)}


def others_of(
    values: Mapping[str, float], deciding: Collection[str] = (), declared: Collection[str] = ()
) -> list[str]:
    """Returns figures other than loss, bits per byte, perplexity and scores: "accuracy 0.92".

    Args:
      values: all figures.
      deciding: names of figures to omit, which `deciding_of` returns.
      declared: names of figures to return first.
    """
    shown = {"loss", "bits_per_byte", "perplexity", *_SCORES, *deciding}
    keys = sorted((key for key in values if key not in shown), key=lambda key: key not in declared)
    return [f"{key} {number(values[key])}" for key in keys]


Part = tuple[float, str, str]
"""Importance, text, and a short text for small widths."""


def _part(importance: float, text: str, short: str | None = None) -> Part:
    return importance, text, text if short is None else short


def _known(value: float | None, part: Part) -> Part:
    importance, text, short = part
    return part if value is not None else (importance, " " * len(text), " " * len(short))


def fit(parts: Sequence[Part], width: int | None) -> str:
    """Joins texts by two spaces; to fit `width`, by one, with short texts, or omitting some."""
    parts = [part for part in parts if part[1]]
    short = [(importance, text, text) for importance, _, text in parts]
    while True:
        for shown in (parts, short):
            for separator in ("  ", " "):
                line = separator.join(text for _, text, _ in shown)
                if width is None or len(line) <= width or len(short) == 1:
                    return line
        parts = short
        short.remove(min(short, key=lambda part: part[0]))


def wrapped(text: str, width: int = WIDTH) -> list[str]:
    """Returns a text wrapped at `width`; continuation lines are indented, words are not broken.

    A figure and its share, "1.1s (10%)", stay in one line.
    """
    indent = " " * (len(text) - len(text.lstrip()))
    lines = textwrap.wrap(
        re.sub(r" (?=\(\d+%\))", "\u00a0", text.lstrip()),
        width,
        initial_indent=indent,
        subsequent_indent=f"{indent}    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\u00a0", " ") for line in lines]


def packed(parts: Sequence[str], *, indent: str, width: int = WIDTH) -> list[str]:
    """Returns lines of texts, two spaces apart; no text is divided, further lines are indented."""
    lines = [indent + parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + 2 + len(part) <= width:
            lines[-1] += f"  {part}"
        else:
            lines.append(f"{indent}    {part}")
    return lines


def number(value: float, digits: int = 4) -> str:
    """Returns a number with about `digits` significant digits: 12.35, 0.1235, 1.2e+08."""
    if not math.isfinite(value):
        return str(value)
    if value == 0 or 1e-3 <= abs(value) < 10 ** (digits + 1):
        whole = len(str(int(abs(value))))
        return f"{value:.{max(0, digits + 1 - whole if whole > 1 else digits)}f}"
    return f"{value:.{digits - 2}e}"


def scientific(value: float) -> str:
    """Returns a number as 3.0e-3, with the same width for all exponents of one digit; 0 as "0"."""
    if value == 0:
        return "0"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


def magnitude(value: float) -> str:
    """Returns a count with three significant digits and a letter: 950, 13.1k, 2.05M."""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{letter}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """Returns a time with its two largest units: 40ms, 0.4s, 12s, 1m45s, 3h05m, 2d04h."""
    if 0 < seconds < 0.05:
        return f"{max(1, round(1000 * seconds))}ms"
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
