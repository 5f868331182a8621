"""Several sources of speech as one, for example of several languages."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from tekso.framework.input.errors import InputError
from tekso.framework.input.joined import JoinedIndex
from tekso.framework.input.skips import Origin, SkipReport
from tekso.framework.input.sources import digest
from tekso.framework.input.splits import Split
from tekso.framework.params import REQUIRED, param
from tekso.tasks.asr.utterances import AnySpeech, Utterance


class JoinedSpeech(AnySpeech):
    """The utterances of all sources, one source after the other; an input shuffles them.

    One recogniser then learns all of them, with the tokens of all. `text_form` is that of this
    source.
    """

    class Params(AnySpeech.Params):
        """Params of JoinedSpeech."""

        sources: list[AnySpeech.Params] = param("The sources.", default=REQUIRED)

    def __init__(self, params: Any, *, split: Split = "train") -> None:
        """Opens the split of all sources.

        Raises:
          InputError: there is no source, or one has no utterances.
        """
        if not params.sources:
            raise InputError(f"{params.path_of('sources')} is empty: name at least one source")
        super().__init__(params, split=split)
        form = self.params.text_form
        self._sources: list[AnySpeech] = [
            _with_form(source, form).instantiate(split=split) for source in self.params.sources
        ]
        self._index = JoinedIndex(len(source) for source in self._sources)

    def __len__(self) -> int:
        return len(self._index)

    def origin(self, index: int) -> Origin:
        """Returns the position of an utterance."""
        source, own = self._place(index)
        return source.origin(own)

    def audio_file(self, index: int) -> str | None:
        """See `AnySpeech`."""
        source, own = self._place(index)
        return source.audio_file(own)

    def fingerprint(self) -> str:
        """Returns a digest of those of the sources."""
        return digest(self.fingerprint_parts())

    def fingerprint_parts(self) -> Iterator[bytes]:
        """See `AnySpeech`."""
        return itertools.chain.from_iterable(one.fingerprint_parts() for one in self._sources)

    def content_digest(self) -> str:
        """See `AnySpeech`."""
        return digest(source.content_digest().encode() for source in self._sources)

    def describe(self) -> str:
        """Returns a short description of the source."""
        names = (source.owner.__name__ for source in self.params.sources)
        return " and ".join(dict.fromkeys(names))

    def skipped(self) -> SkipReport:
        """Returns a report of the records skipped so far, of all sources."""
        return sum((source.skipped() for source in self._sources), super().skipped())

    def _place(self, index: int) -> tuple[AnySpeech, int]:
        """Returns the source of an utterance and its index there."""
        number, within = self._index.place(index)
        return self._sources[number], within

    def _utterance(self, index: int) -> Utterance:
        source, own = self._place(index)
        return source._utterance(own)

    def _read(self, index: int) -> Utterance:
        source, own = self._place(index)
        found: Utterance = source[own]
        return found

    def _read_all(self) -> Iterator[tuple[Origin, Any]]:
        return itertools.chain.from_iterable(one._read_all() for one in self._sources)


def _with_form(source: Any, form: str) -> Any:
    return source if source.text_form == form else source.copy().set(text_form=form)
