"""Default boxes of SSD: boxes of fixed places and shapes, to which a detector's outputs refer.

All boxes are [y_min, x_min, y_max, x_max] in shares of the image, from 0 to 1.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np


@dataclasses.dataclass(frozen=True)
class BoxLevels:
    """The maps of features that have default boxes, from the largest to the smallest.

    Attributes:
      image_size: height and width of the image, in pixels.
      map_sizes: height and width of every map.
      steps: distance of the centres on every map, in pixels.
      scales: side of the square box of every map in pixels, and one more.
      aspect_ratios: of every map; each has a wide and a high box.
    """

    image_size: int
    map_sizes: tuple[int, ...]
    steps: tuple[int, ...]
    scales: tuple[float, ...]
    aspect_ratios: tuple[tuple[int, ...], ...]

    def boxes_per_place(self) -> tuple[int, ...]:
        """Returns the number of default boxes of every place, for every map."""
        return tuple(2 + 2 * len(ratios) for ratios in self.aspect_ratios)


SSD300 = BoxLevels(
    image_size=300,
    map_sizes=(38, 19, 10, 5, 3, 1),
    steps=(8, 16, 32, 64, 100, 300),
    scales=(21, 45, 99, 153, 207, 261, 315),
    aspect_ratios=((2,), (2, 3), (2, 3), (2, 3), (2,), (2,)),
)
"""The 8,732 boxes of SSD300 for COCO. Source: Liu et al. 2016; MLPerf 0.6."""


def default_boxes(levels: BoxLevels) -> np.ndarray:
    """Returns all default boxes, by map, then shape, row and column; parts outside are cut off.

    The shapes of a map: a square of its scale; a square of the geometric mean with the next scale;
    for every aspect ratio a box of the area of the first, wide and then high.

    Shapes:
      returns: [boxes, 4] float32
    """
    found = []
    for k, size in enumerate(levels.map_sizes):
        scale, following = (s / levels.image_size for s in levels.scales[k : k + 2])
        shapes = [(scale, scale), (math.sqrt(scale * following),) * 2]
        for ratio in levels.aspect_ratios[k]:
            root = math.sqrt(ratio)
            shapes += [(scale / root, scale * root), (scale * root, scale / root)]
        centres = (np.arange(size) + 0.5) * levels.steps[k] / levels.image_size
        y, x = np.meshgrid(centres, centres, indexing="ij")
        for height, width in shapes:
            sides = [y - height / 2, x - width / 2, y + height / 2, x + width / 2]
            found.append(np.stack(sides, -1).reshape(-1, 4))
    return np.clip(np.concatenate(found), 0, 1).astype(np.float32)
