"""Small sets of pictures with masks for tests."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from small_pictures import png

from tekso.framework.params import param
from tekso.tasks.segmentation.sources import IGNORED, MaskArrays


class Squares(MaskArrays):
    """Noise with a bright and a dark square; a row of every mask does not count."""

    class Params(MaskArrays.Params):
        """Params of Squares."""

        count: int = param("Images for training; a third of it for dev.", default=12)
        side: int = param("Height and width.", default=16)
        colours: int = param("Channels.", default=3)

    class_names = ("background", "bright", "dark")

    def load(self, split: str) -> Mapping[str, Any]:
        p = self.params
        count = p.count if split == "train" else p.count // 3
        rng = np.random.default_rng(len(split))
        images = rng.integers(100, 120, size=(count, p.side, p.side, p.colours), dtype=np.uint8)
        masks = np.zeros((count, p.side, p.side), np.uint8)
        for image, mask in zip(images, masks, strict=True):
            for label, value in ((1, 240), (2, 10)):
                top, left = rng.integers(p.side - 4, size=2)
                image[top : top + 4, left : left + 4] = value
                mask[top : top + 4, left : left + 4] = label
            mask[rng.integers(p.side)] = IGNORED
        return {"images": images, "masks": masks}


def write_masks(folder: Path, source: MaskArrays, *, mode: str = "L") -> None:
    """Writes images/0.png, … and masks/0.png, … as grey or palette images."""
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True)
    for i in range(len(source)):
        (folder / "images" / f"{i}.png").write_bytes(png(source.images[i]))
        file, mask = io.BytesIO(), Image.fromarray(source.masks[i])
        if mode == "P":
            mask.putpalette(list(range(255, -1, -1)) * 3)
        mask.save(file, "PNG")
        (folder / "masks" / f"{i}.png").write_bytes(file.getvalue())
