"""Sources of speech: each record is an utterance, its audio file and its transcript."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tekso.framework import files
from tekso.framework.input.errors import InputError
from tekso.framework.input.skips import Origin
from tekso.framework.input.sources import digest
from tekso.framework.input.splits import (
    Split,
    check_fractions,
    files_param,
    held_out_fractions,
    load_split,
    split_of,
)
from tekso.framework.params import REQUIRED, param
from tekso.tasks.asr.transcripts import spoken_form
from tekso.tasks.asr.utterances import AnySpeech, Utterance


class SpeechSource(AnySpeech):
    """Base of the sources that know all utterances at the start; a subclass defines `load`.

    `SplitByText` is the base of those that hold out utterances by their transcripts.
    """

    class Params(AnySpeech.Params):
        """Params of SpeechSource."""

    def __init__(self, params: Any, *, split: Split = "train") -> None:
        """Lists the utterances of the split.

        Raises:
          InputError: there are none, or files are missing.
        """
        super().__init__(params, split=split)
        self._utterances: Sequence[tuple[Utterance, Origin]] = load_split(self, split)
        if not self._utterances:
            raise InputError(f"{self.describe()}: the split {split} has no utterances")

    def load(self, split: Split) -> Sequence[tuple[Utterance, Origin]]:
        """Returns the utterances of a split and their positions, always in the same order."""
        raise NotImplementedError(f"{type(self).__name__} has no load(split)")

    def __len__(self) -> int:
        return len(self._utterances)

    def origin(self, index: int) -> Origin:
        """Returns the position of an utterance."""
        return self._utterances[index][1]

    def audio_file(self, index: int) -> str | None:
        """See `AnySpeech`."""
        audio = self._utterances[index][0].audio
        return audio if isinstance(audio, str) else None

    def fingerprint(self) -> str:
        """Returns a digest of names and transcripts, and of samples in memory."""
        return digest(self.fingerprint_parts())

    def fingerprint_parts(self) -> Iterator[bytes]:
        """See `AnySpeech`."""
        for utterance, _ in self._utterances:
            audio = utterance.audio
            name = audio if isinstance(audio, str) else np.asarray(audio[0]).tobytes().hex()
            yield name.encode("utf-8", "surrogateescape")
            yield utterance.text.encode()

    def content_digest(self) -> str:
        """See `AnySpeech`; a file is known by its size and the time of its last change."""
        parts = [super().content_digest()]
        for utterance, _ in self._utterances:
            if isinstance(utterance.audio, str):
                parts.append(str(files.stamp(utterance.audio)))
        return digest(part.encode() for part in parts)

    def _utterance(self, index: int) -> Utterance:
        return self._utterances[index][0]

    def _read(self, index: int) -> Utterance:
        return self._formed(*self._utterances[index])


class InMemorySpeech(SpeechSource):
    """Recordings in memory, from a method `recordings` of a subclass.

    A subclass:

        class Digits(InMemorySpeech):
            def recordings(self, split):
                return [(samples, "seven") for samples in …]
    """

    class Params(SpeechSource.Params):
        """Params of InMemorySpeech."""

        sample_rate: int = param("Samples per second of the recordings.", default=REQUIRED)

    def recordings(self, split: Split) -> Sequence[tuple[Any, str]]:
        """Returns (samples, text) of a split; samples are float in [-1, 1), [samples]."""
        raise NotImplementedError(f"{type(self).__name__} has no recordings(split)")

    def load(self, split: Split) -> Sequence[tuple[Utterance, Origin]]:
        """See `SpeechSource`."""
        rate = self.params.sample_rate
        return [
            (Utterance((samples, rate), text), Origin(f"{split} recording {i} in memory"))
            for i, (samples, text) in enumerate(self.recordings(split))
        ]

    def describe(self) -> str:
        """Returns a short description of the source."""
        return "recordings in memory"


class SplitByText(SpeechSource):
    """Base of sources that hold out utterances by the spoken form of their transcripts.

    The split depends on this form alone, so no held-out sentence is in the training data.
    """

    class Params(SpeechSource.Params):
        """Params of SplitByText."""

        dev_fraction: float = param("Share of the texts in the dev split.", default=0.1)
        test_fraction: float = param("Share of the texts in the test split.", default=0.1)

    def in_split(self, text: str, split: Split) -> bool:
        """Returns whether utterances with this text belong to the split."""
        return split_of(spoken_form(text), *self.fractions()) == split

    def fractions(self) -> tuple[float, float]:
        """Returns the shares of the texts that are in the splits dev and test."""
        return self.params.dev_fraction, self.params.test_fraction


class AsteriskPrompts(SplitByText):
    """The voice prompts of Asterisk: one speaker, 8 kHz, about 24 minutes in English.

    Debian's packages asterisk-core-sounds-XX and -XX-wav have the texts and the recordings. Unpack
    them, without installing, into one folder:

        apt-get download asterisk-core-sounds-en asterisk-core-sounds-en-wav
        for deb in asterisk-core-sounds-*.deb; do dpkg-deb -x $deb asterisk; done

    Licence: CC-BY-SA-3.0 (English, Spanish, French), CC-BY-3.0 (Italian, Russian).
    """

    class Params(SplitByText.Params):
        """Params of AsteriskPrompts."""

        folder: str = param(
            "Folder in which the packages are unpacked. Empty: the environment variable "
            "TEKSO_ASTERISK, or else / (installed packages).",
            default="",
        )
        language: str = param("Code of the language in the package's name.", default="en")
        voice: str = param("Name of the folder of the recordings.", default="en_US_f_Allison")

    def describe(self) -> str:
        """Returns a short description of the source."""
        return f"Asterisk prompts {self.params.voice}"

    def load(self, split: Split) -> Sequence[tuple[Utterance, Origin]]:
        """See `SpeechSource`."""
        p = self.params
        check_fractions(p)
        root = p.folder or os.environ.get("TEKSO_ASTERISK", "/")
        package = f"asterisk-core-sounds-{p.language}"
        table = files.join(root, f"usr/share/doc/{package}/core-sounds-{p.language}.txt.gz")
        sounds = files.join(root, f"usr/share/asterisk/sounds/{p.voice}")
        if not files.exists(table) or not files.is_folder(sounds):
            missing = sounds if files.exists(table) else table
            raise InputError(
                f"{missing} does not exist. Unpack Debian's packages {package} and {package}-wav "
                f"(apt-get download …; dpkg-deb -x …) and set {p.path_of('folder')} or "
                "TEKSO_ASTERISK to the folder"
            )
        try:
            lines = gzip.decompress(files.read(table)).decode("utf-8-sig").splitlines()
        except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
            raise InputError(f"{table} is damaged: {error}") from error
        texts = {}
        for line in lines:
            key, colon, text = line.partition(":")
            if colon and not line.startswith(";"):
                texts[key.strip()] = text.strip()
        found = []
        for key, text in sorted(texts.items()):
            path = files.join(sounds, f"{key}.wav")
            if spoken_form(text) and self.in_split(text, split) and files.exists(path):
                found.append((Utterance(path, text), Origin(path)))
        return found


class LibriSpeech(SpeechSource):
    """LibriSpeech in its published folders: subset/speaker/chapter/utterance.flac.

    Source: Panayotov et al. 2015; https://www.openslr.org/12. Licence: CC-BY-4.0.
    """

    class Params(SpeechSource.Params):
        """Params of LibriSpeech."""

        folder: str = param("The folder LibriSpeech.", default=REQUIRED)
        train: list[str] = param(
            "Subsets to train on.",
            default=["train-clean-100", "train-clean-360", "train-other-500"],
        )
        dev: list[str] = param("Subsets of the split dev.", default=["dev-clean"])
        test: list[str] = param("Subsets of the split test.", default=["test-clean"])

    def describe(self) -> str:
        """Returns a short description of the source."""
        return f"LibriSpeech in {self.params.folder}"

    def load(self, split: Split) -> Sequence[tuple[Utterance, Origin]]:
        """See `SpeechSource`."""
        p = self.params
        found = []
        for subset in p.get(split):
            pattern = files.join(p.folder, subset, "*", "*", "*.trans.txt")
            for table in files.glob(pattern, what=p.path_of("folder")):
                offset = 0
                for line in files.read(table).decode("utf-8", "replace").splitlines(keepends=True):
                    name, _, text = line.strip().partition(" ")
                    path = files.join(os.path.dirname(table), f"{name}.flac")
                    if name:
                        found.append((Utterance(path, text), Origin(table, offset)))
                    offset += len(line.encode())
        return found


class TranscriptFiles(SplitByText):
    """Tables of audio files and transcripts: TSV with a header, or JSON lines.

    A path in a table is relative to the folder of the table. A line without a path or a text is
    malformed. Without dev_files, a share of the texts of `files` is held out; so for test_files.
    """

    class Params(SplitByText.Params):
        """Params of TranscriptFiles."""

        files: str = param(
            "Training tables, named .tsv, .jsonl or .json: globs, separated by commas.",
            default=REQUIRED,
        )
        dev_files: str = param("Tables of the split dev. Empty: held out.", default="")
        test_files: str = param("Tables of the split test. Empty: held out.", default="")
        path_field: str = param("Column or field of the path.", default="path")
        text_field: str = param("Column or field of the transcript.", default="text")

    def describe(self) -> str:
        """Returns a short description of the source."""
        return f"transcripts {self.params.get(files_param(self.params, self.split))}"

    def load(self, split: Split) -> Sequence[tuple[Utterance, Origin]]:
        """See `SpeechSource`."""
        p = self.params
        check_fractions(p)
        name = files_param(p, split)
        found = []
        for table in files.glob(p.get(name), what=p.path_of(name)):
            for fields, origin in self._lines(table):
                path, text = fields.get(p.path_field), fields.get(p.text_field)
                if not isinstance(path, str) or not path or not isinstance(text, str):
                    self.skips.add(origin, f"no {p.path_field!r} or {p.text_field!r}")
                    continue
                if name == "files" and not self.in_split(text, split):
                    continue
                own = path if os.path.isabs(path) else files.join(os.path.dirname(table), path)
                found.append((Utterance(own, text), origin))
        return found

    def fractions(self) -> tuple[float, float]:
        """See `SplitByText`; a split with tables of its own has no text of `files`."""
        return held_out_fractions(self.params, "files")

    def _lines(self, table: str) -> list[tuple[dict[str, Any], Origin]]:
        lines = files.read(table).split(b"\n")
        starts = np.cumsum([0, *(len(line) + 1 for line in lines)])
        rows = [
            (line.rstrip(b"\r").decode("utf-8", "replace"), Origin(table, int(start)))
            for line, start in zip(lines, starts, strict=False)
        ]
        if table.endswith(".tsv"):
            header = rows[0][0].lstrip("\ufeff").split("\t")
            missing = {self.params.path_field, self.params.text_field} - set(header)
            if missing:
                raise InputError(
                    f"{table}: no column {sorted(missing)[0]!r}; its columns are {header}"
                )
            return [
                (dict(zip(header, line.split("\t"), strict=False)), origin)
                for line, origin in rows[1:]
                if line
            ]
        if not table.endswith((".jsonl", ".json")):
            raise InputError(f"{table}: a table of transcripts must be named .tsv, .jsonl or .json")
        return [(_fields_of(line), origin) for line, origin in rows if line.strip()]


def _fields_of(line: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}
