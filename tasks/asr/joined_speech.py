"""Several sources of speech as one, for example of several languages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tekso.framework.input.skips import InputError, Origin
from tekso.framework.input.splits import Split
from tekso.framework.params import REQUIRED, param
from tekso.tasks.asr.sources import SpeechSource, Utterance


class JoinedSpeech(SpeechSource):
    """The utterances of all sources, one source after the other; an input shuffles them.

    One recogniser then learns all of them, with the tokens of all. `text_form` is that of this
    source.
    """

    class Params(SpeechSource.Params):
        """Params of JoinedSpeech."""

        sources: list[SpeechSource.Params] = param("The sources.", default=REQUIRED)

    def __init__(self, params: Any, *, split: Split = "train") -> None:
        """Lists the utterances of the split.

        Raises:
          InputError: there is no source, or one has no utterances.
        """
        if not params.sources:
            raise InputError(f"{params.path_of('sources')} is empty: name at least one source")
        super().__init__(params, split=split)

    def describe(self) -> str:
        """Returns a short description of the source."""
        names = (source.owner.__name__ for source in self.params.sources)
        return " and ".join(dict.fromkeys(names))

    def load(self, split: Split) -> Sequence[tuple[Utterance, Origin]]:
        """See `SpeechSource`."""
        return [
            utterance
            for source in self.params.sources
            for utterance in source.instantiate(split=split).load(split)
        ]
