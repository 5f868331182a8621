"""Synthetic volumes of balls, boxes and rods in noise, with the class of every voxel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tekso.framework.input.splits import Split
from tekso.framework.params import param
from tekso.tasks.segmentation.volume_sources import LABELS, VOLUMES, VolumeArrays

_NOISE = 0.35  # standard deviation; shapes are brighter than the background by 1


class ShapeVolumes(VolumeArrays):
    """Bright balls, boxes and rods at random places in Gaussian noise; 4 classes.

    A ball has a radius of 2 to 4 voxels, a box sides of 4 to 7. A rod is 3 × 3 voxels thick and
    goes through the whole volume, along any of the three dims. All are equally bright, so that a
    voxel does not show its class, nor does a single section. Later shapes cover earlier ones.
    """

    class Params(VolumeArrays.Params):
        """Params of ShapeVolumes."""

        volume_shape: tuple[int, int, int] = param(
            "Depth, height and width of a volume.", default=(16, 24, 24)
        )
        num_shapes: int = param("Shapes of each kind in a volume.", default=2)
        num_train: int = param("Volumes for training.", default=400)
        num_held_out: int = param("Volumes for dev.", default=60)

    class_names = ("background", "ball", "box", "rod")

    def load(self, split: Split) -> Mapping[str, Any]:
        """See `VolumeArrays`."""
        p = self.params
        if min(*p.volume_shape) < 10 or min(p.num_shapes, p.num_train, p.num_held_out) < 1:
            raise ValueError(
                f"{p.path_of('volume_shape')} is {p.volume_shape}, but must be at least 10; "
                f"num_shapes {p.num_shapes}, num_train {p.num_train} and num_held_out "
                f"{p.num_held_out} must be at least 1"
            )
        count = p.num_train if split == "train" else p.num_held_out
        random = np.random.default_rng(["train", "dev", "test"].index(split))
        labels = np.zeros((count, *p.volume_shape), np.uint8)
        for one in labels:
            for _ in range(p.num_shapes):
                for c, inside in enumerate((_ball, _box, _rod), start=1):
                    one[inside(p.volume_shape, random)] = c
        noise = np.asarray(random.normal(scale=_NOISE, size=labels.shape), np.float32)
        return {VOLUMES: noise + (labels > 0), LABELS: labels}

    def describe(self) -> str:
        """Returns a short description of the collection."""
        return "synthetic balls, boxes and rods"


def _ball(sizes: tuple[int, ...], random: np.random.Generator) -> Any:
    radius = random.uniform(2.0, 4.0)
    centre = [random.uniform(radius, size - 1 - radius) for size in sizes]
    grid = np.ogrid[tuple(slice(size) for size in sizes)]
    return sum((x - c) ** 2 for x, c in zip(grid, centre, strict=True)) <= radius**2


def _box(sizes: tuple[int, ...], random: np.random.Generator) -> Any:
    sides = random.integers(4, 8, size=3)
    starts = [random.integers(size - side + 1) for size, side in zip(sizes, sides, strict=True)]
    return tuple(slice(a, a + side) for a, side in zip(starts, sides, strict=True))


def _rod(sizes: tuple[int, ...], random: np.random.Generator) -> Any:
    along = random.integers(3)
    starts = [random.integers(size - 2) for size in sizes]
    return tuple(slice(None) if d == along else slice(a, a + 3) for d, a in enumerate(starts))
