"""Plots of attention weights between the tokens of a translation and of its source."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

_INCHES_PER_TOKEN = 0.28
_MAX_TOKENS = 60
"""Most tokens of each side in a picture; further tokens are left out."""


def draw(
    attention_TS: np.ndarray, *, source: Sequence[str], target: Sequence[str], title: str
) -> bytes:
    """Returns a PNG of the attention weights of every target token over the source tokens.

    Args:
      attention_TS: attention weights; each row sums to 1.
      source: at least S tokens of the source.
      target: at least T tokens of the target.
      title: title of the picture.
    """
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows, columns = (min(size, _MAX_TOKENS) for size in attention_TS.shape)
    size = (2.0 + _INCHES_PER_TOKEN * columns, 1.6 + _INCHES_PER_TOKEN * rows)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    plain: Any = {"parse_math": False}  # two dollar signs are not a formula
    axes.set_title(title, fontsize=9, **plain)
    axes.imshow(attention_TS[:rows, :columns], vmin=0.0, vmax=1.0, cmap="Greys", aspect="auto")
    sides = [_shown(t) for t in source[:columns]], [_shown(t) for t in target[:rows]]
    axes.set_xticks(range(columns), sides[0], rotation=90, fontsize=8, **plain)
    axes.set_yticks(range(rows), sides[1], fontsize=8, **plain)
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)
        figure.savefig(file, format="png", dpi=80)
    return file.getvalue()


def _shown(token: str) -> str:
    """Returns a token with visible spaces and line ends."""
    return token.replace(" ", "␣").replace("\n", "⏎") or "∅"
