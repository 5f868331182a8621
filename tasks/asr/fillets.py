"""The dialogues of the game Fish Fillets: acted speech in Czech and Dutch, with exact texts."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from tekso.framework import files
from tekso.framework.input.errors import InputError
from tekso.framework.input.skips import Origin
from tekso.framework.input.splits import Split, check_fractions, split_of
from tekso.framework.params import param
from tekso.tasks.asr.sources import SpeechSource
from tekso.tasks.asr.utterances import Utterance

_LINE = re.compile(
    r'dialogId\("([^"]+)",\s*"([^"]*)",\s*"(?:[^"\\]|\\.)*"\)\s*'
    r'dialogStr\(\s*"((?:[^"\\]|\\.)*)"\s*\)'
)
_ESCAPED = re.compile(r"\\(.)")
_DIGIT = re.compile("[0-9]")
_GAME = "usr/share/games/fillets-ng"


class FilletsDialogues(SpeechSource):
    """Lines of dialogue, divided by the level of the game, so that no scene is in two splits.

    Lines with digits are left out, since their spoken form is in English.

    Debian's packages fillets-ng-data (texts) and fillets-ng-data-cs or -nl (recordings, 104 and 95
    minutes). Unpack them, without installing, into one folder:

        apt-get download fillets-ng-data fillets-ng-data-nl
        for deb in fillets-ng-data*.deb; do dpkg-deb -x $deb fillets; done

    Licence: GPL-2.
    """

    class Params(SpeechSource.Params):
        """Params of FilletsDialogues."""

        folder: str = param(
            "Folder in which the packages are unpacked. Empty: the environment variable "
            "TEKSO_FILLETS, or else / (installed packages).",
            default="",
        )
        language: str = param("cs or nl.", default="nl")
        speakers: list[str] = param(
            "Speakers, by the names of their fonts: font_small, font_big, …. Empty: all.",
            default=[],
        )
        dev_fraction: float = param("Share of the levels in the dev split.", default=0.1)
        test_fraction: float = param("Share of the levels in the test split.", default=0.1)

    def describe(self) -> str:
        """Returns a short description of the source."""
        return f"Fish Fillets dialogues {self.params.language}"

    def load(self, split: Split) -> Sequence[tuple[Utterance, Origin]]:
        """See `SpeechSource`."""
        p = self.params
        check_fractions(p)
        root = files.join(p.folder or os.environ.get("TEKSO_FILLETS", "/"), _GAME)
        levels = [files.join(root, part) for part in ("script", "sound")]
        texts: dict[str, tuple[str, str]] = {}
        for level in self._names(levels[0]):
            path = files.join(levels[0], level, f"dialogs_{p.language}.lua")
            if files.exists(path):
                script = files.read(path).decode("utf-8", "replace")
                texts |= {name: (font, text) for name, font, text in _LINE.findall(script)}
        found = []
        for level in self._names(levels[1]):
            sounds = files.join(levels[1], level, p.language)
            names = sorted(files.names(sounds)) if files.is_folder(sounds) else []
            if split_of(level, p.dev_fraction, p.test_fraction) != split:
                continue
            for name in names:
                font, text = texts.get(name.removesuffix(".ogg"), ("", ""))
                if text and not _DIGIT.search(text) and (not p.speakers or font in p.speakers):
                    path = files.join(sounds, name)
                    found.append((Utterance(path, _ESCAPED.sub(r"\1", text)), Origin(path)))
        return found

    def _names(self, folder: str) -> list[str]:
        if not files.is_folder(folder):
            package = f"fillets-ng-data and fillets-ng-data-{self.params.language}"
            raise InputError(
                f"{folder} does not exist. Unpack Debian's packages {package} (apt-get download …; "
                f"dpkg-deb -x …) and set {self.params.path_of('folder')} or TEKSO_FILLETS to the "
                "folder"
            )
        return sorted(files.names(folder))
