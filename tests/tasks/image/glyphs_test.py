"""Glyphs: every family is in one split, and what cannot be used is counted or named."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest

from tekso.framework.input.errors import InputError
from tekso.tasks.image.glyphs import CHARACTERS, Glyphs, family_of

FONTS = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
"""Fonts that are part of matplotlib: the families DejaVu, STIX and Computer Modern."""


def folder_of(root: Path, *names: str) -> str:
    (root / "more").mkdir()
    for name in names:
        shutil.copy(FONTS / name, root / "more" / name)
    return str(root)


def source(folder: str, split: str = "train", **params: Any) -> Any:
    given = {"folder": folder, "side": 12, "dev_families": ["DejaVu"], **params}
    return Glyphs.Params(**given).instantiate(split=split)


def test_a_font_has_a_picture_of_every_character_that_fills_its_image(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "DejaVuSans.ttf", "DejaVuSerif.ttf", "STIXGeneral.ttf")
    train, dev = source(folder), source(folder, "dev")
    assert train.images.shape == (62, 12, 12, 1)
    assert dev.images.shape == (124, 12, 12, 1)  # both fonts of one family
    assert train.labels.tolist() == list(range(62))
    assert "".join(train.class_names) == CHARACTERS
    dark = train.images[..., 0] < 250
    rows, columns = dark.any(axis=2).sum(1), dark.any(axis=1).sum(1)
    assert (np.maximum(rows, columns) >= 9).all()
    assert (train.images[:, 0] == 255).all()  # a margin
    assert len({image.tobytes() for image in train.images}) > 55


def test_copies_of_a_font_count_once_and_files_that_are_no_fonts_are_counted(
    tmp_path: Path,
) -> None:
    folder = folder_of(tmp_path, "DejaVuSans.ttf", "STIXGeneral.ttf")
    shutil.copy(FONTS / "STIXGeneral.ttf", tmp_path / "copy.TTF")
    (tmp_path / "broken.otf").write_bytes(b"no font")
    train = source(folder)
    assert len(train) == 62
    (skip,) = train.skipped().named
    assert skip.file.endswith("broken.otf")
    assert skip.reason.startswith("not a font")


def test_a_font_without_letters_is_counted(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "DejaVuSans.ttf", "STIXGeneral.ttf", "STIXSizOneSymReg.ttf")
    train = source(folder)
    assert len(train) == 62
    assert [skip.reason for skip in train.skipped().named] == ["the font has no picture of '0'"]


@pytest.mark.parametrize(
    ("params", "split", "message"),
    [
        ({"dev_families": ["DejaVue"]}, "train", r"no family 'DejaVue'; there are DejaVu\. Fonts"),
        ({}, "train", "no family of .* is in the split train"),
        ({}, "test", "there is no split 'test', only train and dev"),
        ({"side": 3}, "train", "side is 3, but must be at least 8"),
    ],
)
def test_settings_that_leave_nothing_are_named(
    tmp_path: Path, params: Any, split: str, message: str
) -> None:
    folder = folder_of(tmp_path, "DejaVuSans.ttf")
    with pytest.raises(InputError, match=message):
        source(folder, split, **params)


def test_a_folder_without_fonts_says_where_there_are_some(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no font with letters\. Fonts are in packages"):
        source(str(tmp_path), dev_families=[])
    with pytest.raises(InputError, match=r"folder is '\S+missing', which is not a folder\. Fonts"):
        source(str(tmp_path / "missing"))


def test_clones_and_relatives_are_one_family() -> None:
    assert family_of("TeX Gyre Termes") == family_of("Nimbus Roman")
    assert family_of("Nimbus Sans Narrow") == family_of("TeX Gyre Heros Cn")
    assert family_of("DejaVu Sans Mono") == family_of("DejaVu Serif")
    assert family_of("Lato") == "Lato"
