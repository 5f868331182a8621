"""Emoji with their names: pictures of the package emoji-datasource-google."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tekso.framework import files
from tekso.framework.input.errors import InputError
from tekso.framework.input.splits import Split, split_of
from tekso.framework.params import param
from tekso.tasks.captioning.sources import Caption, CaptionFiles

_TONES = {
    "1F3FB": "light",
    "1F3FC": "medium-light",
    "1F3FD": "medium",
    "1F3FE": "medium-dark",
    "1F3FF": "dark",
}
_HELD_OUT = 0.1


class Emoji(CaptionFiles):
    """3,786 emoji of Google, 64 × 64 pixels, and a caption for each: name and colour of the skin.

        man running with medium skin tone

    The split test has 10 % of the 1,911 emoji with all their skin tones: concepts that are not in
    training. The split dev has 10 % of the skin tones of the other emoji: new combinations of parts
    that are in training.

    Raises:
      InputError: the folder is not that of the package.
    """

    class Params(CaptionFiles.Params):
        """Params of Emoji."""

        folder: str = param(
            "The folder `package` of emoji-datasource-google, with emoji.json.", default=""
        )

    package = (
        "The pictures are in the npm package emoji-datasource-google: npm pack "
        "emoji-datasource-google@16.0.0 && tar xzf emoji-datasource-google-16.0.0.tgz, and set the "
        "folder package"
    )

    def describe(self) -> str:
        """Returns a short description of the collection."""
        return "emoji of Google"

    def _records(self, split: Split) -> Iterable[tuple[str, Sequence[Caption]]]:
        folder = self.params.folder
        path = files.join(folder, "emoji.json")
        if not folder or not files.exists(path):
            raise InputError(
                f"there is no file {path}. {self.package}: {self.params.path_of('folder')}=FOLDER"
            )
        try:
            for one in json.loads(files.read(path)):
                for code, text, own in _captions(one):
                    if own == split:
                        name = f"{code}.png"
                        place = files.join(folder, "img", "google", "64", name)
                        yield place, (Caption(text),)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path}: not the emoji.json of the package: {error!r}") from error


def _captions(one: Mapping[str, Any]) -> Iterable[tuple[str, str, Split]]:
    """Yields name of the file, caption and split of an emoji and its skin tones."""
    base, name = one["unified"], " ".join(str(one["name"]).lower().split())
    is_new = split_of(base, 0.0, _HELD_OUT) == "test"
    yield one["image"].removesuffix(".png"), name, "test" if is_new else "train"
    for tones, variant in (one.get("skin_variations") or {}).items():
        own = "test" if is_new else split_of(variant["unified"], _HELD_OUT, 0.0)
        yield variant["image"].removesuffix(".png"), f"{name} with {_toned(tones)}", own


def _toned(tones: str) -> str:
    found = [_TONES[tone] for tone in tones.split("-")]
    return f"{' and '.join(found)} skin tone{'s' if len(found) > 1 else ''}"
