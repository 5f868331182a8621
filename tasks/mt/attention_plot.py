"""Pictures of attention: which token of the source every token of a translation looks at."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

_INCHES_PER_TOKEN = 0.28
_MAX_TOKENS = 60
"""Of each side: what is longer is left out of the picture."""


def draw(
    attention_TS: np.ndarray, *, source: Sequence[str], target: Sequence[str], title: str
) -> bytes:
    """Returns a PNG of how much every target token looks at every source token.

    Args:
      attention_TS: shares, each row with a sum of 1.
      source: tokens of the source, S at least.
      target: tokens of the target, T at least.
      title: over the picture.
    """
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows, columns = (min(size, _MAX_TOKENS) for size in attention_TS.shape)
    size = (2.0 + _INCHES_PER_TOKEN * columns, 1.6 + _INCHES_PER_TOKEN * rows)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    plain: Any = {"parse_math": False}  # a text with two dollars is none
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
    """A token with its spaces visible."""
    return token.replace(" ", "␣").replace("\n", "⏎") or "∅"
