"""Base of the transcribers, and the scoring of the transcripts of an evaluation input."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from tekso.framework.input.held_out import spread
from tekso.framework.input.tokenizers import Tokenizer
from tekso.framework.params import Configurable, param
from tekso.framework.task import Program, Scored
from tekso.framework.trained import LoadTrained
from tekso.models.speech_encoder import StreamError
from tekso.models.speech_model import SpeechModel
from tekso.tasks.asr.audio import Samples
from tekso.tasks.asr.input import BucketedSpeech
from tekso.tasks.asr.language_fusion import LanguageFusion, LanguageScores
from tekso.tasks.asr.lexicon import Lexicon
from tekso.tasks.asr.word_errors import best_constant, word_errors


@dataclasses.dataclass(frozen=True)
class Transcript:
    """The tokens of an utterance.

    Attributes:
      labels: tokens.
      log_prob: log-probability in nats, as far as the search sums it; with a language model, plus
        its score.
      frames: frame of the encoder's output in which each token begins; None: not known.
    """

    labels: Sequence[int]
    log_prob: float
    frames: Sequence[int] | None = None


class StreamSearch(Protocol):
    """Transcribes a recording chunk by chunk."""

    def read(self, samples: Any, num_samples: Any) -> None:
        """Reads the next chunk; see `SpeechModel.stream`.

        Shapes:
          samples: [1, first of stream_samples] float32; num_samples: [1] int32
        """
        ...

    def transcripts(self) -> list[Transcript]:
        """Returns the transcripts of all chunks so far, best first, as `transcripts` would."""
        ...


class Transcriber(Configurable):
    """Base of the transcribers; a subclass defines `transcripts`."""

    class Params(Configurable.Params):
        """Params of a transcriber."""

        num_hypotheses: int = param(
            "Transcripts of each recording in the records of --mode=decode, at most beam_size.",
            default=1,
        )
        language_model: LanguageFusion.Params | None = param(
            "A language model that the beam search adds (shallow fusion); None: none.",
            default=None,
        )

    def __init__(self, params: Any, *, model: SpeechModel) -> None:
        """Keeps the model.

        Raises:
          ValueError: a size is below 1, or there are more hypotheses than the beam has.
        """
        super().__init__(params)
        p = self.params
        for name in self.sizes:
            if p.get(name) < 1:
                raise ValueError(f"{p.path_of(name)} is {p.get(name)}, must be at least 1")
        if p.num_hypotheses > self.beam_size:
            raise ValueError(
                f"{p.path_of('num_hypotheses')} is {p.num_hypotheses}, must be at most beam_size, "
                f"{self.beam_size}"
            )
        self._fusion: LanguageFusion | None = None
        if p.language_model is not None:
            if self.beam_size < 2:
                raise ValueError(
                    f"{p.path_of('language_model')} needs a beam search: set "
                    f"{p.path_of(self.beam_size_field)} to at least 2"
                )
            self._fusion = p.language_model.instantiate()
        self._language: LanguageScores | None = None
        self._model: Any = model

    @property
    def model(self) -> SpeechModel:
        """The model."""
        found: SpeechModel = self._model
        return found

    sizes: ClassVar[Sequence[str]] = ("beam_size", "num_hypotheses")
    """Fields of the Params that must be at least 1."""

    beam_size_field: ClassVar[str] = "beam_size"

    @property
    def beam_size(self) -> int:
        """Hypotheses that the search keeps."""
        return int(self.params.get(self.beam_size_field))

    def use_trained(self, load: LoadTrained, tokenizer: Tokenizer) -> None:
        """Loads the language model, if the Params name one; see `LanguageFusion.load`."""
        if self._fusion is not None:
            size = self._model.params.vocab_size
            self._language = self._fusion.load(load, tokenizer, size)

    def language(self) -> LanguageScores | None:
        """Returns the scores of the language model, if the Params name one.

        Raises:
          RuntimeError: it has not been loaded.
        """
        if self._fusion is not None and self._language is None:
            raise RuntimeError(
                f"{self.params.path_of('language_model')} has not been loaded: call "
                "task.use_trained first"
            )
        return self._language

    def transcripts(
        self, program: Program, samples: Any, num_samples: Any
    ) -> list[list[Transcript]]:
        """Returns up to num_hypotheses transcripts of every recording, best first, at least one.

        Shapes:
          samples: [batch, samples], num_samples: [batch]
        """
        raise NotImplementedError(f"{type(self).__name__} has no transcripts()")

    def stream(self, program: Program) -> StreamSearch:
        """Returns a search that reads a recording while it arrives.

        Raises:
          StreamError: the model needs whole utterances.
        """
        raise StreamError(f"{type(self).__name__} needs whole utterances")

    def batch_texts(
        self, program: Program, samples: Any, num_samples: Any, tokenizer: Tokenizer
    ) -> list[str]:
        """Returns the texts of a batch.

        Shapes:
          samples: [batch, samples], num_samples: [batch]
        """
        found = self.transcripts(program, samples, num_samples)
        return [text_of(best.labels, tokenizer) for best, *_ in found]

    def record(self, program: Program, samples: Samples, tokenizer: Tokenizer) -> dict[str, Any]:
        """Returns what is known of a recording, padded to a power of two, so that few are traced.

        "text"; "words", pairs of a word and the second of its beginning, if frames are known; with
        num_hypotheses above 1 "hypotheses", pairs of a text and its log-probability. There are none
        if the search found none, as for an empty recording, and fewer than num_hypotheses if some
        have the same text.

        Shapes:
          samples: [samples]
        """
        length = 1 << max(14, int(len(samples) - 1).bit_length())
        padded = np.zeros([1, length], np.float32)
        padded[0, : len(samples)] = samples
        size = np.array([len(samples)], np.int32)
        (found,) = self.transcripts(program, padded, size)
        return self.record_of(found, tokenizer)

    def record_of(self, found: Sequence[Transcript], tokenizer: Tokenizer) -> dict[str, Any]:
        """Returns the record of transcripts, best first; see `record`."""
        best = found[0]
        record: dict[str, Any] = {"text": text_of(best.labels, tokenizer)}
        if best.frames is not None:
            seconds = [frame * self._model.seconds_per_frame for frame in best.frames]
            record["words"] = words_of(best.labels, seconds, tokenizer)
        if self.params.num_hypotheses > 1:
            best_of: dict[str, float] = {}  # a text has several sequences of tokens, as by spaces
            for one in found:
                if np.isfinite(one.log_prob):  # JSON has no infinite numbers
                    best_of.setdefault(text_of(one.labels, tokenizer), one.log_prob)
            record["hypotheses"] = [[text, log_prob] for text, log_prob in best_of.items()]
        return record


def text_of(labels: Sequence[int], tokenizer: Tokenizer) -> str:
    """Returns the text of some tokens, with single spaces."""
    return " ".join(tokenizer.decode(list(labels)).split())


def words_of(
    labels: Sequence[int], seconds: Sequence[float], tokenizer: Tokenizer
) -> list[list[Any]]:
    """Returns [word, second of its first token] for every word of a transcript."""
    if isinstance(tokenizer, Lexicon):
        return [[word, round(seconds[i], 3)] for word, i in tokenizer.words(labels)]
    words: list[list[Any]] = []
    before, inside = "", False
    for i, second in enumerate(seconds):
        text = tokenizer.decode(list(labels[: i + 1]))
        for letter in text[len(before) :]:
            if letter.isspace():
                inside = False
            elif inside:
                words[-1][0] += letter
            else:
                words.append([letter, round(second, 3)])
                inside = True
        before = text
    return words


class TranscriptScoring(Configurable):
    """Transcribes an evaluation input and reports word and character error rates.

    The rates of the best constant word are reported beside them, as a baseline. The text in the
    logdir has samples, and the utterances with most word errors.
    """

    class Params(Configurable.Params):
        """Params of TranscriptScoring."""

        shown: int = param("Transcripts that are shown with their references.", default=10)
        worst: int = param("Utterances with most word errors that are shown.", default=10)

    def score(
        self,
        program: Program,
        input: BucketedSpeech,
        steps: Iterable[int],
        transcriber: Transcriber,
        *,
        stopped: Callable[[], bool],
    ) -> Scored | None:
        """Returns the rates of the utterances of some batches; see `Task.score`.

        Args:
          program: calls functions with the weights.
          input: the utterances.
          steps: steps of the input, each once.
          transcriber: finds the texts.
          stopped: called before every batch.
        """
        texts, origins, found = [], [], []
        for step in steps:
            if stopped():
                return None
            batch = input.batch(step)
            transcribed = transcriber.batch_texts(
                program, batch["samples"], batch["num_samples"], input.tokenizer
            )
            for row, example in input.examples_of(step):
                texts.append(input.text(example))
                origins.append(input.origin(example))
                found.append(transcribed[row])
        errors, constant = word_errors(texts, found), best_constant(texts)
        some = spread(len(texts), self.params.shown).tolist()
        note = constant.note(errors)
        lines = [input.describe(), f"scored: {len(texts):,} utterances", *errors.lines(), note, ""]
        lines += _shown(some, origins, texts, found)
        worst = errors.worst(self.params.worst)
        if worst:
            lines += ["", "most word errors:", *_shown(worst, origins, texts, found)]
        figures = {**errors.figures, **constant.figures}
        return Scored(figures, "\n".join(lines), notes=(note,))


def _shown(
    which: Sequence[int], origins: Sequence[str], texts: Sequence[str], found: Sequence[str]
) -> list[str]:
    return [f"{origins[i]}\n  model: {found[i]}\n  reference: {texts[i]}" for i in which]
