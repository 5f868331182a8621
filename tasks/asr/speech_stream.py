"""Transcribes samples while they arrive, for example those of a microphone."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tekso.framework.input.tokenizers import Tokenizer
from tekso.framework.task import Program
from tekso.models.speech_encoder import StreamError
from tekso.models.speech_model import SpeechModel
from tekso.tasks.asr.audio import Samples
from tekso.tasks.asr.transcriber import StreamSearch, Transcriber, text_of


class SpeechStream:
    """Collects samples in chunks, and transcribes each chunk when it is complete.

    The transcript of a finished stream is that of the whole recording. A model that needs whole
    utterances transcribes the stream when it is finished.

    Attributes:
      waits_because: why the model transcribes only the finished stream; None: it does not wait.
    """

    def __init__(self, program: Program, transcriber: Transcriber, tokenizer: Tokenizer) -> None:
        """Starts without samples."""
        self._program, self._transcriber, self._tokenizer = program, transcriber, tokenizer
        self._model: SpeechModel = transcriber.model
        self.waits_because: str | None = None
        self._search: StreamSearch | None = None
        try:
            self._search = transcriber.stream(program)
        except StreamError as error:
            self.waits_because = str(error)
        self._kept: Samples = np.zeros(0, np.float32)  # what the next chunk needs
        self._count = 0

    @property
    def seconds(self) -> float:
        """Length of the stream so far."""
        return float(self._count / self._model.front_end.params.sample_rate)

    def add(self, samples: npt.ArrayLike) -> str | None:
        """Adds samples; returns the transcript so far if a chunk is complete, or else None.

        Shapes:
          samples: [samples] float in [-1, 1), at the rate of the model
        """
        new = np.asarray(samples, np.float32)
        self._count += len(new)
        self._kept = np.concatenate([self._kept, new])
        if self._search is None:
            return None
        size, step = self._model.stream_samples
        before = len(self._kept)
        while len(self._kept) >= size:
            self._search.read(self._kept[np.newaxis, :size], np.array([size], np.int32))
            self._kept = self._kept[step:]
        if len(self._kept) == before:
            return None
        return text_of(self._search.transcripts()[0].labels, self._tokenizer)

    def finish(self) -> dict[str, Any]:
        """Returns the record of the stream, as `Transcriber.record` does; no samples follow."""
        if self._search is None:
            return self._transcriber.record(self._program, self._kept, self._tokenizer)
        size, _ = self._model.stream_samples
        if self._model.front_end.num_frames(len(self._kept)):
            padded = np.zeros([1, size], np.float32)
            padded[0, : len(self._kept)] = self._kept
            self._search.read(padded, np.array([len(self._kept)], np.int32))
        return self._transcriber.record_of(self._search.transcripts(), self._tokenizer)
