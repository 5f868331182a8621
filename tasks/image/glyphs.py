"""Letters and digits of fonts at any size: a class is a character, a split has whole families."""

from __future__ import annotations

import hashlib
import io
import os
import string
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tekso.framework import files
from tekso.framework.input.errors import InputError, NoSplitError
from tekso.framework.input.skips import Origin
from tekso.framework.input.splits import Split
from tekso.framework.params import param
from tekso.tasks.image.sources import IMAGES, LABELS, ImageArrays

CHARACTERS = string.digits + string.ascii_uppercase + string.ascii_lowercase

_CLONES = {
    "TeX Gyre Adventor": "URW Gothic",
    "TeX Gyre Bonum": "URW Bookman",
    "TeX Gyre Chorus": "Z003",
    "TeX Gyre Cursor": "Nimbus Mono PS",
    "TeX Gyre Heros": "Nimbus Sans",
    "TeX Gyre Heros Cn": "Nimbus Sans",
    "Nimbus Sans Narrow": "Nimbus Sans",
    "TeX Gyre Pagella": "P052",
    "TeX Gyre Schola": "C059",
    "TeX Gyre Termes": "Nimbus Roman",
    "Open Sans Condensed": "Open Sans",
    "Roboto Condensed": "Roboto",
}
_PREFIXES = ("DejaVu", "Linux Libertine", "Linux Biolinum")
"""Families whose names begin alike are drawn alike, so they stay together in a split."""

_SUFFIXES = (".ttf", ".otf")
_NO_LETTERS = ("D050000L", "Standard Symbols PS", "Linux Biolinum Keyboard O")
"""Fonts of symbols, which have other pictures for letters."""

_MARGIN = 0.1  # of the side, around a glyph
_NO_CHARACTER = "\uffff"  # of no font
_LARGE = 4  # glyphs are drawn at this multiple of their size, and made smaller


class Glyphs(ImageArrays):
    """62 classes: the digits and Latin letters of fonts in a folder, in grey, black on white.

    Every glyph fills the image up to a margin, so "o", "O" and "0" differ only in their form. A
    family is in one split with all its weights, and with its clones: TeX Gyre's families are those
    of URW's fonts. Fonts that lack a character, or that cannot be read, are counted.

    Raises:
      InputError: the folder has no fonts, or no family is in the split.
    """

    class Params(ImageArrays.Params):
        """Params of Glyphs."""

        folder: str = param(
            "Folder with font files (.ttf, .otf), also in its folders.",
            default="/usr/share/fonts",
        )
        side: int = param("Height and width of a drawn glyph.", default=28)
        dev_families: list[str] = param(
            "Families for dev; empty: a fifth of the families, by a hash of their names.",
            default=[],
        )

    class_names = tuple(CHARACTERS)

    def load(self, split: Split) -> Mapping[str, Any]:
        """See `ImageArrays`."""
        p = self.params
        if split not in ("train", "dev"):
            raise NoSplitError(
                f"{self.describe()}: there is no split {split!r}, only train and dev"
            )
        if p.side < 8:
            raise InputError(f"{p.path_of('side')} is {p.side}, but must be at least 8")
        fonts = list(self._fonts())
        known = {family for family, _ in fonts}
        unknown = sorted(set(p.dev_families) - known)
        if unknown or not fonts:
            what = f"no family {unknown[0]!r}" if unknown else "no font with letters"
            there = f"; there are {', '.join(sorted(known))}" if known else ""
            what = f"has {what}{there}" if os.path.isdir(p.folder) else "is not a folder"
            raise InputError(
                f"{p.path_of('folder')} is {p.folder!r}, which {what}. Fonts are in packages such "
                "as fonts-dejavu and fonts-lato of Debian: set it to the folder of their files"
            )
        images: list[np.ndarray] = []
        labels: list[int] = []
        for family, path in fonts:
            if (split == "dev") != self._is_dev(family):
                continue
            try:
                drawn = glyphs(path, p.side)
            except (OSError, ValueError) as error:
                self.skips.add(Origin(path), str(error) or type(error).__name__)
                continue
            images += drawn
            labels += range(len(CHARACTERS))
        if not images:
            raise InputError(f"{self.describe()}: no family of {p.folder} is in the split {split}")
        return {IMAGES: np.stack(images), LABELS: np.array(labels, np.int64)}

    def describe(self) -> str:
        """Returns a short description of the collection."""
        return f"glyphs of the fonts in {self.params.folder}"

    def _is_dev(self, family: str) -> bool:
        if self.params.dev_families:
            return family in self.params.dev_families
        first = hashlib.blake2b(family.encode(), digest_size=1).digest()[0]
        return first < 256 // 5

    def _fonts(self) -> Iterator[tuple[str, str]]:
        """Yields family and path of every font with letters, sorted by path; copies once."""
        from PIL import ImageFont

        seen = set()
        for path in _font_files(self.params.folder):
            data = files.read(path)
            digest = hashlib.blake2b(data, digest_size=8).digest()
            if digest in seen:
                continue
            seen.add(digest)
            try:
                name = ImageFont.truetype(io.BytesIO(data), 16).getname()[0] or ""
            except OSError as error:
                self.skips.add(Origin(path), f"not a font: {error}")
                continue
            if name not in _NO_LETTERS:
                yield family_of(name), path


def family_of(name: str) -> str:
    """Returns the family that a font belongs to in a split."""
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            return prefix
    return _CLONES.get(name, name)


def glyphs(path: str, side: int) -> list[np.ndarray]:
    """Returns all characters of a font, each filling an image up to a margin, black on white.

    Shapes:
      returns: for each character, [side, side, 1] uint8

    Raises:
      OSError: the font cannot be read.
      ValueError: the font has no picture of a character.
    """
    from PIL import ImageFont

    font = ImageFont.truetype(io.BytesIO(files.read(path)), _LARGE * side)
    missing = bytes(font.getmask(_NO_CHARACTER))  # what is drawn in the place of a character
    for character in CHARACTERS:
        if bytes(font.getmask(character)) == missing:
            raise ValueError(f"the font has no picture of {character!r}")
    return [_glyph(font, character, side) for character in CHARACTERS]


def _glyph(font: Any, character: str, side: int) -> np.ndarray:
    from PIL import Image, ImageDraw

    left, top, right, bottom = font.getbbox(character)
    if right <= left or bottom <= top:
        raise ValueError(f"the font has no picture of {character!r}")
    width, height = int(right - left) + 1, int(bottom - top) + 1
    drawn = Image.new("L", (width, height), 255)
    ImageDraw.Draw(drawn).text((-left, -top), character, fill=0, font=font)
    inner = side - 2 * max(1, round(_MARGIN * side))
    scale = inner / max(width, height)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    image = Image.new("L", (side, side), 255)
    small = drawn.resize(size, Image.Resampling.BOX)
    image.paste(small, ((side - size[0]) // 2, (side - size[1]) // 2))
    return np.asarray(image)[:, :, None]


def _font_files(folder: str) -> list[str]:
    found = []
    for root, _, names in os.walk(folder):
        found += [os.path.join(root, name) for name in names if name.lower().endswith(_SUFFIXES)]
    return sorted(found)
