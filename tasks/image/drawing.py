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
_LINE, _HEADING = 0.12, 0.4  # heights of a line of a title and of the title of all, in inches


def matrix(counts: np.ndarray, names: Sequence[str]) -> bytes:
    """Returns a PNG of a confusion matrix; the colour is the share of the row, the label.

    Shapes:
      counts: [classes, classes]
    """
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    side = 2.0 + 0.32 * len(names)
    figure = _figure(side + 0.6, side, layout="constrained")
    axes = figure.add_subplot()
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
    width, height = (1.4, 1.6) if lines == 1 else (2.2, 1.8 + 0.12 * lines)  # of a cell, in inches
    room = 0.05 + _LINE * lines  # for the title of a cell
    top = height * rows + _HEADING
    figure = _figure(width * columns, top)
    figure.suptitle(title)
    # One pair of axes for all: a pair for each image takes six times as long.
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width * columns), ylim=(0, top))
    axes.set_axis_off()
    for place, (pixels, text) in enumerate(zip(images, titles, strict=True)):
        row, column = divmod(place, columns)
        scale = min((width - 0.1) / pixels.shape[1], (height - room - 0.05) / pixels.shape[0])
        middle, upper = (column + 0.5) * width, top - _HEADING - row * height - room
        left, lower = middle - scale * pixels.shape[1] / 2, upper - scale * pixels.shape[0]
        grey = pixels.shape[2] == 1
        kind: Any = {"cmap": "gray", "vmin": 0, "vmax": 255} if grey else {}
        extent = (left, 2 * middle - left, lower, upper)
        axes.imshow(pixels[:, :, 0] if grey else pixels, extent=extent, aspect="auto", **kind)
        shown = text[: 2 * _LONGEST] if lines == 1 else _wrapped(text, lines)
        plain: Any = {"fontsize": 7, "parse_math": False}
        axes.text(middle, upper + 0.03, shown, ha="center", va="bottom", **plain)
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


def _figure(width: float, height: float, **given: Any) -> Any:
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), **given)
    FigureCanvasAgg(figure)
    return figure


def _png(figure: Any) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings():  # fonts have not the characters of every class and caption
        warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)
        figure.savefig(file, format="png", dpi=100)
    return file.getvalue()
