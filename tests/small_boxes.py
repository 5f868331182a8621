"""Small sets of pictures with boxes for tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from small_pictures import png

from tekso.framework.input.skips import Origin
from tekso.framework.params import param
from tekso.tasks.detection.sources import BoxSource, Objects


class Rectangles(BoxSource):
    """Dark pictures, each with a bright rectangle: upright (class 1) or flat (class 2)."""

    class Params(BoxSource.Params):
        """Params of Rectangles."""

        count: int = param("Images for training; a third of it for dev.", default=12)
        height: int = param("Height.", default=32)
        width: int = param("Width.", default=40)
        colours: int = param("Channels.", default=3)

    class_names = ("upright", "flat")
    has_files = False

    def __init__(self, params: Any, *, split: Any = "train") -> None:
        super().__init__(params, split=split)
        p = self.params
        rng = np.random.default_rng(len(split))
        count = p.count if split == "train" else p.count // 3
        self._images = np.full((count, p.height, p.width, p.colours), 10, np.uint8)
        self._objects = []
        for i, image in enumerate(self._images):
            h, w = (p.height // 2, p.width // 5) if i % 2 == 0 else (p.height // 5, p.width // 2)
            top, left = int(rng.integers(p.height - h)), int(rng.integers(p.width - w))
            image[top : top + h, left : left + w] = 240
            box = (top, left, top + h, left + w)
            self._objects.append(Objects.of([box], [1 + i % 2], (p.height, p.width)))

    def __len__(self) -> int:
        return len(self._images)

    def origin(self, index: int) -> Origin:
        return Origin("rectangles", index, "record")

    def describe(self) -> str:
        return "rectangles"

    def objects(self, index: int) -> Objects:
        return self._objects[index]

    def image(self, index: int) -> Any:
        return self._images[index]


def write_coco(folder: Path, source: BoxSource, ids: Sequence[int] = (4, 9)) -> Path:
    """Writes a source as PNG files and a JSON file in COCO's format; returns its path."""
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for i in range(len(source)):
        objects = source.objects(i)
        (folder / f"{i}.png").write_bytes(png(source.image(i)))
        height, width = objects.size
        images.append({"id": 100 + i, "file_name": f"{i}.png", "height": height, "width": width})
        for (top, left, bottom, right), label in zip(objects.boxes, objects.labels, strict=True):
            one = {"image_id": 100 + i, "category_id": ids[label - 1]}
            annotations.append({**one, "bbox": [left, top, right - left, bottom - top]})
    names = zip(ids, source.class_names, strict=True)
    categories = [{"id": number, "name": name} for number, name in names]
    data = {"images": images, "annotations": annotations, "categories": categories[::-1]}
    path = folder / "instances.json"
    path.write_text(json.dumps(data))
    return path
