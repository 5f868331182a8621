"""Small sets of captioned pictures for tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from tekso.framework.input.skips import Origin
from tekso.framework.params import param
from tekso.tasks.captioning.sources import Caption, CaptionSource

COLOURS = {"red": (250, 20, 20), "green": (20, 250, 20), "blue": (20, 20, 250)}
PLACES = ("top", "bottom")


class Bars(CaptionSource):
    """Pictures of a coloured bar at the top or bottom: "red bar at the top"; several captions."""

    class Params(CaptionSource.Params):
        """Params of Bars."""

        count: int = param("Images for training; a third of it for dev.", default=12)
        side: int = param("Height and width.", default=8)
        colours: int = param("Channels.", default=3)
        captions: int = param("Captions of each image.", default=1)
        languages: list[str] = param("Languages, each with its captions.", default=[])

    has_files = False

    def __init__(self, params: Any, *, split: Any = "train") -> None:
        super().__init__(params, split=split)
        p = self.params
        self.languages = tuple(p.languages)
        count = p.count if split == "train" else p.count // 3
        rng = np.random.default_rng(len(split))
        self._images = rng.integers(60, size=(count, p.side, p.side, 3), dtype=np.uint8)
        self._captions = []
        for i, image in enumerate(self._images):
            name = list(COLOURS)[i % 3]
            place, half = PLACES[i // 3 % 2], p.side // 2
            image[:half] = COLOURS[name] if place == "top" else image[:half]
            image[half:] = COLOURS[name] if place == "bottom" else image[half:]
            texts = [f"{name} bar at the {place}", f"a bar that is {name}", f"{place}: {name}"]
            self._captions.append(
                tuple(
                    Caption(text if number == 0 else " ".join(text.split()[::-1]), language)
                    for number, language in enumerate(self.languages or ("",))
                    for text in texts[: p.captions]
                )
            )

    def __len__(self) -> int:
        return len(self._images)

    def origin(self, index: int) -> Origin:
        return Origin("bars", index, "record")

    def describe(self) -> str:
        return "bars"

    def captions(self, index: int) -> tuple[Caption, ...]:
        return self._captions[index]

    def image(self, index: int) -> Any:
        image = self._images[index]
        return image if self.params.colours == 3 else image.mean(2, keepdims=True).astype(np.uint8)
