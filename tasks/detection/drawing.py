"""Draws boxes with the names of their classes on images."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tekso.tasks.image.steps import Image

_LEAST_SIDE = 200  # of a drawn image: smaller ones are enlarged
LABEL_COLOUR, FOUND_COLOUR = (0, 200, 0), (255, 40, 40)


def with_boxes(
    image: Image,
    boxes: np.ndarray,
    names: Sequence[str],
    *,
    colour: tuple[int, int, int] = FOUND_COLOUR,
) -> Image:
    """Returns an image with frames around boxes and the names above them, in colour.

    Shapes:
      image: [height, width, 1 or 3] uint8
      boxes: [n, 4], [y_min, x_min, y_max, x_max] in shares of the image; names: n
      returns: [any height, any width, 3] uint8; small images are enlarged
    """
    from PIL import Image as Pillow
    from PIL import ImageDraw

    pixels = np.repeat(image, 3, axis=2) if image.shape[2] == 1 else image
    drawn = Pillow.fromarray(np.ascontiguousarray(pixels))
    factor = -(-_LEAST_SIDE // min(image.shape[:2]))
    drawn = drawn.resize((drawn.width * factor, drawn.height * factor), Pillow.Resampling.NEAREST)
    draw, scale = ImageDraw.Draw(drawn), np.array([drawn.height, drawn.width] * 2)
    for box, name in zip(boxes, names, strict=True):
        top, left, bottom, right = (box * scale).round().tolist()
        draw.rectangle((left - 1, top - 1, max(left, right), max(top, bottom)), outline=colour)
        draw.text((left, max(0.0, top - 12)), name, fill=colour)
    return np.asarray(drawn)
