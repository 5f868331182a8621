"""The transcripts of a source of speech as a source of text, for language models."""

from __future__ import annotations

from typing import Any

from tekso.framework.input.skips import Origin
from tekso.framework.input.sources import Source
from tekso.framework.input.splits import Split
from tekso.framework.params import REQUIRED, param
from tekso.tasks.asr.utterances import AnySpeech


class TranscriptTexts(Source):
    """Each record is a transcript; the audio is not read.

    The splits are those of the speech, so a language model sees no held-out sentence. A tokenizer
    that learns its table from the texts learns that of the recogniser.
    """

    class Params(Source.Params):
        """Params of TranscriptTexts."""

        corpus: AnySpeech.Params = param("The speech.", default=REQUIRED)

    def __init__(self, params: Any, *, split: Split = "train") -> None:
        """Lists the utterances of the split.

        Raises:
          InputError: there are none, or files are missing.
        """
        super().__init__(params, split=split)
        self._speech: AnySpeech = self.params.corpus.instantiate(split=split)

    def __len__(self) -> int:
        return len(self._speech)

    def describe(self) -> str:
        """Returns a short description of the source."""
        return f"transcripts of {self.params.corpus.owner.__name__}"

    def origin(self, index: int) -> Origin:
        """Returns the position of an utterance."""
        return self._speech.origin(index)

    def fingerprint(self) -> str:
        """Returns a digest of the utterances."""
        return self._speech.fingerprint()

    def _read(self, index: int) -> str:
        text: str = self._speech[index].text
        return text
