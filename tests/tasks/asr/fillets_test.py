"""The dialogues of a game as a source of speech, and several sources as one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile

from tekso.framework.input.errors import InputError
from tekso.tasks.asr.fillets import FilletsDialogues
from tekso.tasks.asr.joined_speech import JoinedSpeech

GAME = Path("usr/share/games/fillets-ng")


def write(folder: Path, language: str, word: str) -> FilletsDialogues.Params:
    """Writes 20 levels of two lines each; returns the Params of their source."""
    for level in range(20):
        script = folder / GAME / f"script/level{level}"
        sound = folder / GAME / f"sound/level{level}/{language}"
        for path in (script, sound):
            path.mkdir(parents=True, exist_ok=True)
        lines = [
            f'dialogId("{level}-m", "font_small", "x")\ndialogStr("{word}, \\"a\\" {level * "i"}")',
            f'dialogId("{level}-v", "font_big", "x \\"y\\"")\n\ndialogStr( "{word} b")',
            f'dialogId("{level}-n", "font_big", "x")\ndialogStr("{word} 10")',
            f'dialogId("{level}-none", "font_big", "x")\ndialogStr("without a recording")',
        ]
        (script / f"dialogs_{language}.lua").write_text("\n".join(lines))
        for name in "mvn":
            soundfile.write(sound / f"{level}-{name}.ogg", np.zeros(800), 8000)
    return FilletsDialogues.Params(folder=str(folder), language=language)


def texts(params: FilletsDialogues.Params | JoinedSpeech.Params, split: str) -> list[str]:
    return [record.text for _, record in params.instantiate(split=split).records()]


def test_lines_have_their_recordings_and_levels_are_in_one_split(tmp_path: Path) -> None:
    params = write(tmp_path, "nl", "ja")
    levels: set[str] = set()
    for split in ("train", "dev", "test"):
        source = params.copy().set(dev_fraction=0.3, test_fraction=0.2).instantiate(split=split)
        own = {str(source.origin(i)).split("/sound/")[1].split("/")[0] for i in range(len(source))}
        assert len(source) == 2 * len(own) and not own & levels  # without the line with digits
        levels |= own
    assert len(levels) == 20
    found = texts(params, "train")
    assert "ja b" in found and any(text.startswith("ja a i") for text in found)
    small = texts(params.copy().set(speakers=["font_small"]), "train")
    assert len(small) == len(found) / 2 and "ja b" not in small


def test_several_sources_are_one(tmp_path: Path) -> None:
    both = [write(tmp_path / "1", "nl", "ja"), write(tmp_path / "2", "cs", "ano")]
    joined = JoinedSpeech.Params(sources=both)
    for split in ("train", "dev"):
        assert texts(joined, split) == texts(both[0], split) + texts(both[1], split)
    source = joined.instantiate()
    index = len(both[0].instantiate())  # the first of the second source
    assert "/cs/" in str(source.origin(index)) and source.seconds(index) == 0.1
    assert source[index].text.startswith("ano") and len(source.samples(index, 4000)) == 400
    raw = texts(joined.copy().set(text_form="raw"), "train")
    assert all(text.startswith(("ja, ", "ja b", "ano, ", "ano b")) for text in raw)
    one = JoinedSpeech.Params(sources=both[:1])
    assert one.instantiate().fingerprint() != joined.instantiate().fingerprint()
    with pytest.raises(InputError, match="sources is empty"):
        JoinedSpeech.Params(sources=[]).instantiate()


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="packages fillets-ng-data and fillets-ng-data-cs"):
        FilletsDialogues.Params(folder=str(tmp_path), language="cs").instantiate()
