"""A small folder in the form of the package emoji-datasource-google, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from small_pictures import png

TONES = ["1F3FB", "1F3FE", "1F3FB-1F3FF"]


def write_emoji(folder: Path, count: int, *, pictures: bool = False) -> None:
    """Writes emoji.json, and pictures if asked: each third emoji has three further skin tones."""
    table = []
    for i in range(count):
        code = f"1F{i:03X}"
        one: dict[str, Any] = {"unified": code, "name": f"THING {i}", "image": f"{code}.png"}
        if i % 3 == 0:
            one["skin_variations"] = {
                tone: {"unified": f"{code}-{tone}", "image": f"{code}-{tone}.png"} for tone in TONES
            }
        table.append(one)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "emoji.json").write_text(json.dumps(table))
    if not pictures:
        return
    images = folder / "img" / "google" / "64"
    images.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for one in table:
        for name in (one, *one.get("skin_variations", {}).values()):
            pixels = rng.integers(256, size=(16, 16, 3), dtype=np.uint8)
            (images / name["image"]).write_bytes(png(pixels))
