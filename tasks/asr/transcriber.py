"""Transcribes speech with a CTC model, and scores the transcripts of an evaluation input."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.input.held_out import spread
from tekso.framework.input.tokenizers import Tokenizer
from tekso.framework.params import Configurable, param
from tekso.framework.task import Program, Scored
from tekso.framework.theta import Theta
from tekso.models.ctc_model import CtcModel
from tekso.models.decoding.ctc import ctc_beam_search, ctc_greedy
from tekso.tasks.asr.audio import Samples
from tekso.tasks.asr.input import BucketedSpeech
from tekso.tasks.asr.word_errors import word_errors

LogProbs = npt.NDArray[np.float32]


class Transcriber(Configurable):
    """Finds the text of utterances: greedily, or by prefix beam search."""

    class Params(Configurable.Params):
        """Params of Transcriber."""

        beam_size: int = param(
            "Prefixes kept by the beam search. 1: the labelling of the most probable path.",
            default=1,
        )
        tokens_per_frame: int = param(
            "Most probable tokens that extend a prefix in the beam search.", default=16
        )

    def __init__(self, params: Any, *, model: CtcModel) -> None:
        """Keeps the model.

        Raises:
          ValueError: a size is below 1.
        """
        super().__init__(params)
        for name in ("beam_size", "tokens_per_frame"):
            if self.params.get(name) < 1:
                path = self.params.path_of(name)
                raise ValueError(f"{path} is {self.params.get(name)}, must be at least 1")
        self._model = model

    def text(self, log_probs: LogProbs, tokenizer: Tokenizer) -> str:
        """Returns the text of one utterance.

        Shapes:
          log_probs: [frames, tokens], without padding
        """
        p, blank_id = self.params, self._model.blank_id
        if p.beam_size == 1:
            labels = ctc_greedy(log_probs, blank_id=blank_id)
        else:
            best, *_ = ctc_beam_search(
                log_probs,
                blank_id=blank_id,
                beam_size=p.beam_size,
                tokens_per_frame=p.tokens_per_frame,
            )
            labels = list(best.labels)
        return " ".join(tokenizer.decode(labels).split())

    def batch_texts(
        self, program: Program, samples: Any, num_samples: Any, tokenizer: Tokenizer
    ) -> list[str]:
        """Returns the texts of a batch.

        Shapes:
          samples: [batch, samples], num_samples: [batch]
        """
        found = program.call(self._log_probs, tf.constant(samples), tf.constant(num_samples))
        log_probs, lengths = (np.asarray(array) for array in found)
        return [
            self.text(own[:length], tokenizer)
            for own, length in zip(log_probs, lengths, strict=True)
        ]

    def one_text(self, program: Program, samples: Samples, tokenizer: Tokenizer) -> str:
        """Returns the text of a recording, padded to a power of two, so that few are traced.

        Shapes:
          samples: [samples]
        """
        length = 1 << max(14, int(len(samples) - 1).bit_length())
        padded = np.zeros([1, length], np.float32)
        padded[0, : len(samples)] = samples
        size = np.array([len(samples)], np.int32)
        return self.batch_texts(program, padded, size, tokenizer)[0]

    def _log_probs(
        self, theta: Theta, samples: tf.Tensor, num_samples: tf.Tensor, ctx: StepContext
    ) -> tuple[tf.Tensor, tf.Tensor]:
        frames = self._model.fprop(theta.model, samples, ctx, lengths=num_samples)
        return tf.nn.log_softmax(tf.cast(frames.features, tf.float32)), frames.lengths


class TranscriptScoring(Configurable):
    """Transcribes an evaluation input and reports word and character error rates.

    The text in the logdir has samples, and the utterances with most word errors.
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
        errors = word_errors(texts, found)
        some = spread(len(texts), self.params.shown).tolist()
        lines = [input.describe(), f"scored: {len(texts):,} utterances", *errors.lines(), ""]
        lines += _shown(some, origins, texts, found)
        worst = errors.worst(self.params.worst)
        if worst:
            lines += ["", "most word errors:", *_shown(worst, origins, texts, found)]
        return Scored(errors.figures, "\n".join(lines))


def _shown(
    which: Sequence[int], origins: Sequence[str], texts: Sequence[str], found: Sequence[str]
) -> list[str]:
    return [f"{origins[i]}\n  model: {found[i]}\n  reference: {texts[i]}" for i in which]
