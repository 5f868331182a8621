"""Draws confusion matrices and images with titles as PNG files."""

from __future__ import annotations

import io
import logging
import math
import textwrap
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

_LONGEST = 18  # characters of a name


def matrix(counts: np.ndarray, names: Sequence[str]) -> bytes:
    """Returns a PNG of a confusion matrix; the colour is the share of the row, the label.

    Shapes:
      counts: [classes, classes]
    """
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    side = 2.0 + 0.32 * len(names)
    figure, axes = _figure(side + 0.6, side)
    axes.imshow(shares, vmin=0.0, vmax=1.0, cmap="Blues")
    plain: Any = {"parse_math": False, "fontsize": 7}  # two dollar signs are not a formula
    shown = [name[:_LONGEST] for name in names]
    axes.set_xticks(range(len(names)), shown, rotation=90, **plain)
    axes.set_yticks(range(len(names)), shown, **plain)
    axes.set_xlabel("guess")
    axes.set_ylabel("label")
    if len(names) <= 20:
        for row, column in np.argwhere(counts > 0).tolist():
            colour = "white" if shares[row, column] > 0.5 else "black"
            text = str(counts[row, column])
            axes.text(column, row, text, ha="center", va="center", fontsize=6, color=colour)
    return _png(figure)


def gallery(
    images: Sequence[np.ndarray], titles: Sequence[str], *, title: str, lines: int = 1
) -> bytes:
    """Returns a PNG of images with titles, in rows.

    Args:
      images: the images.
      titles: a title for each; longer than `lines` lines, it is cut.
      title: of all images.
      lines: lines of a title; with several, images are wider and titles are wrapped.

    Shapes:
      images: each [height, width, 1 or 3] uint8
    """
    columns = math.ceil(math.sqrt(len(images)))
    rows = math.ceil(len(images) / columns)
    width, height = (1.4, 1.6) if lines == 1 else (2.2, 1.8 + 0.12 * lines)
    figure, axes = _figure(width * columns, height * rows + 0.4, rows=rows, columns=columns)
    figure.suptitle(title)
    for place in range(rows * columns):
        one = axes[divmod(place, columns)]
        one.set_axis_off()
        if place < len(images):
            pixels = images[place]
            grey = pixels.shape[2] == 1
            kind: Any = {"cmap": "gray", "vmin": 0, "vmax": 255} if grey else {}
            one.imshow(pixels[:, :, 0] if grey else pixels, **kind)
            text = titles[place][: 2 * _LONGEST] if lines == 1 else _wrapped(titles[place], lines)
            one.set_title(text, fontsize=7, parse_math=False)
    return _png(figure)


def _wrapped(text: str, lines: int) -> str:
    found = [part for line in text.split("\n") for part in textwrap.wrap(line, 2 * _LONGEST)]
    return "\n".join(found[:lines])


def as_png(image: np.ndarray) -> bytes:
    """Returns the PNG file of an image.

    Shapes:
      image: [height, width, 1 or 3] uint8
    """
    from PIL import Image as Pillow

    file = io.BytesIO()
    pixels = image[:, :, 0] if image.shape[2] == 1 else image
    Pillow.fromarray(np.ascontiguousarray(pixels)).save(file, format="PNG")
    return file.getvalue()


def _figure(width: float, height: float, *, rows: int = 0, columns: int = 0) -> tuple[Any, Any]:
    """Returns a figure with one pair of axes, or with an array of them."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    if not rows:
        return figure, figure.add_subplot()
    return figure, figure.subplots(rows, columns, squeeze=False)


def _png(figure: Any) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings():  # fonts have not the characters of every class and caption
        warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)
        figure.savefig(file, format="png", dpi=100)
    return file.getvalue()
