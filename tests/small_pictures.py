"""Small sets of pictures for tests."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tekso.framework.params import param
from tekso.tasks.image.sources import ImageArrays


class Blobs(ImageArrays):
    """Noise with a bright quarter; which quarter is the class."""

    class Params(ImageArrays.Params):
        """Params of Blobs."""

        count: int = param("Images for training; a third of it for dev.", default=12)
        side: int = param("Height and width.", default=8)
        colours: int = param("Channels.", default=3)

    class_names = ("top left", "top right", "bottom left", "bottom right")

    def load(self, split: str) -> Mapping[str, Any]:
        """Returns them."""
        p = self.params
        count = p.count if split == "train" else p.count // 3
        rng = np.random.default_rng(len(split))
        images = rng.integers(100, size=(count, p.side, p.side, p.colours), dtype=np.uint8)
        labels, half = np.arange(count) % 4, p.side // 2
        for image, label in zip(images, labels, strict=True):
            top, left = label // 2 * half, label % 2 * half
            image[top : top + half, left : left + half] += 150
        return {"images": images, "labels": labels}


def png(pixels: np.ndarray) -> bytes:
    """Returns pixels [height, width, 3] as a PNG file."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def write_folders(root: Path, classes: Mapping[str, int], *, size: int = 6) -> None:
    """Writes NAME/0.png, … for each class; the first byte of a picture is its number."""
    rng = np.random.default_rng(0)
    for name, count in classes.items():
        (root / name).mkdir(parents=True)
        for number in range(count):
            pixels = rng.integers(256, size=(size, size + 2, 3), dtype=np.uint8)
            pixels[0, 0] = number
            (root / name / f"{number}.png").write_bytes(png(pixels))
