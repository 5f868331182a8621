"""Draws curves.png, the curves of a run, from the records of its metrics."""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tekso.framework.run.metrics_log import SEEN, SPLIT, STEP, TRAIN

_QUALITY = ("loss", "bits_per_byte", "bleu")
_RATE = "learning_rate"
_MOST_PANELS = 4
_NO_METRICS = frozenset({STEP, SPLIT, "total_loss", "perplexity", "gradient_norm"})
_NO_METRIC_ENDS = ("seconds", "_per_second", SEEN)
_LABELS = {
    "loss": "loss",
    "bits_per_byte": "bits per byte",
    "bleu": "BLEU",
    "learning_rate": "learning rate per step",
}
_PANEL_INCHES, _LABEL_INCHES, _AXES_INCHES = 6.0, 0.9, 4.95  # widths; a label is to the left
_MAX_POINTS = 2000
_SMOOTHED_POINTS = 20
_HEADROOM = 0.05
_CUT_OFF = 0.05  # share of the training values that may be cut off, on the side of the first


def draw(
    records: Iterable[Mapping[str, Any]],
    *,
    title: str,
    references: Mapping[str, float] | None = None,
) -> bytes | None:
    """Returns a PNG of the curves, or None if there is nothing to draw.

    Args:
      records: the records of metrics.jsonl.
      title: title of the picture.
      references: bits per byte of other methods for comparison, {name: bits per byte}.
    """
    curves = _curves(records)
    panels = _panels(curves)
    if not panels:
        return None
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_PANEL_INCHES * len(panels), 4.2))
    FigureCanvasAgg(figure)
    # A layout that matplotlib computes would draw everything twice: half of a short run's report.
    figure.subplots_adjust(
        left=_LABEL_INCHES / figure.get_figwidth(),
        right=1 - (_PANEL_INCHES - _LABEL_INCHES - _AXES_INCHES) / figure.get_figwidth(),
        bottom=0.14,
        top=0.89,
        wspace=(_PANEL_INCHES - _AXES_INCHES) / _AXES_INCHES,
    )
    figure.suptitle(title)
    for index, panel in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), index + 1)
        axes.set_xlabel("step")
        is_nats = panel == "loss" and "perplexity" in curves
        axes.set_ylabel("loss (nats)" if is_nats else _LABELS.get(panel, panel))
        axes.grid(alpha=0.3)
        if panel == _RATE:
            axes.plot(*zip(*_thinned(curves[panel][TRAIN]), strict=True), color="tab:gray")
        else:
            _draw_quality(axes, curves[panel], references if panel == "bits_per_byte" else None)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=100)
    return file.getvalue()


Curve = list[tuple[int, float]]


def _curves(records: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Curve]]:
    """Returns all finite values but times and amounts as {metric: {split: [(step, value)]}}."""
    curves: dict[str, dict[str, Curve]] = {}
    for record in records:
        for name, value in record.items():
            is_number = isinstance(value, (int, float)) and math.isfinite(value)
            if is_number and not name.endswith(_NO_METRIC_ENDS):
                curve = curves.setdefault(name, {}).setdefault(str(record[SPLIT]), [])
                curve.append((record[STEP], value))
    return curves


def _panels(curves: Mapping[str, Mapping[str, Curve]]) -> list[str]:
    """Returns the figures to draw: quality, the first metrics of evaluations, the learning rate."""
    quality = [name for name in _QUALITY if name in curves]
    rate = [_RATE] if TRAIN in curves.get(_RATE, ()) else []
    metrics = [
        name
        for name, by_split in curves.items()
        if by_split.keys() != {TRAIN} and name not in {*quality, _RATE, *_NO_METRICS}
    ]
    return [*quality, *metrics[: _MOST_PANELS - len(quality) - len(rate)], *rate]


def _draw_quality(
    axes: Any, by_split: Mapping[str, Curve], references: Mapping[str, float] | None
) -> None:
    shown: list[float] = []
    for split, curve in by_split.items():
        steps, values = zip(*_thinned(curve), strict=True)
        if split != TRAIN:
            axes.plot(steps, values, marker="o", markersize=4, label=split)
            shown += values
            continue
        smooth = smoothed(values)
        if smooth == list(values):
            axes.plot(steps, values, color="tab:gray", label="train")
        else:
            axes.plot(steps, values, color="tab:gray", alpha=0.35, linewidth=0.8)
            axes.plot(steps, smooth, color="tab:gray", label="train, smoothed")
        shown += _range(values)
    for name, value in (references or {}).items():
        axes.axhline(value, linestyle="--", linewidth=1, color="tab:red")
        axes.annotate(
            name, (0.99, value), xycoords=("axes fraction", "data"), ha="right", va="bottom"
        )
        shown.append(value)
    low, high = min(shown), max(shown)
    if high > low:
        room = _HEADROOM * (high - low)
        axes.set_ylim(low - room, high + room)
    axes.legend()


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Returns the range to show: a loss begins far above its later values, an R² far below."""
    ranked, cut = sorted(values), int(_CUT_OFF * len(values))
    rises = values[0] < ranked[len(ranked) // 2]
    return (ranked[cut], ranked[-1]) if rises else (ranked[0], ranked[-1 - cut])


def smoothed(values: Sequence[float]) -> list[float]:
    """Returns the mean of each value and its neighbours; returns few values unchanged."""
    reach = min(len(values) // 40, _SMOOTHED_POINTS)
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    result = []
    for i in range(len(values)):
        near = min(reach, i, len(values) - 1 - i)
        result.append((sums[i + near + 1] - sums[i - near]) / (2 * near + 1) if near else values[i])
    return result


def _thinned(curve: Curve) -> Curve:
    stride = -(-len(curve) // _MAX_POINTS)
    return [*curve[:-1:stride], curve[-1]] if stride > 1 else curve
