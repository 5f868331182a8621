"""Transcribes speech with a CTC model."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.params import param
from tekso.framework.task import Program
from tekso.framework.theta import Theta
from tekso.models.decoding.ctc import CtcBeam, ctc_alignment, ctc_greedy
from tekso.tasks.asr.transcriber import Transcriber, Transcript

LogProbs = npt.NDArray[np.float32]


class CtcTranscriber(Transcriber):
    """Finds the text of utterances: greedily, or by prefix beam search."""

    class Params(Transcriber.Params):
        """Params of CtcTranscriber."""

        beam_size: int = param(
            "Prefixes kept by the beam search. 1: the labelling of the most probable path.",
            default=1,
        )
        tokens_per_frame: int = param(
            "Most probable tokens that extend a prefix in the beam search.", default=16
        )

    sizes = (*Transcriber.sizes, "tokens_per_frame")

    def transcripts(
        self, program: Program, samples: Any, num_samples: Any
    ) -> list[list[Transcript]]:
        """See `Transcriber`.

        Shapes:
          samples: [batch, samples], num_samples: [batch]
        """
        found = program.call(self._log_probs, tf.constant(samples), tf.constant(num_samples))
        log_probs, lengths = (np.asarray(array) for array in found)
        return [self._found(own[:n]) for own, n in zip(log_probs, lengths, strict=True)]

    def _found(self, log_probs: LogProbs) -> list[Transcript]:
        """Returns the transcripts of one utterance [frames, tokens], without padding."""
        beam = self.new_beam()
        if beam is not None:
            beam.read(log_probs)
        return self.best(log_probs, beam)

    @property
    def num_tokens(self) -> int:
        """Number of tokens with the blank."""
        return int(self._model.blank_id) + 1

    def new_beam(self) -> CtcBeam | None:
        """Returns a beam search that has read no frames; None for greedy search."""
        p = self.params
        if p.beam_size == 1:
            return None
        return CtcBeam(
            blank_id=self._model.blank_id,
            beam_size=p.beam_size,
            tokens_per_frame=p.tokens_per_frame,
            language=self.language(),
        )

    def best(self, log_probs: LogProbs, beam: CtcBeam | None) -> list[Transcript]:
        """Returns the transcripts of some frames [frames, tokens], which the beam has read."""
        blank_id, most = self._model.blank_id, self.params.num_hypotheses
        if beam is None:
            labels = ctc_greedy(log_probs, blank_id=blank_id)
            pairs = [(labels, float(np.max(log_probs, 1, initial=-np.inf).sum()))]
        else:
            pairs = [(list(one.labels), one.log_prob) for one in beam.hypotheses()[:most]]
        return [
            Transcript(labels, log_prob, ctc_alignment(log_probs, labels, blank_id=blank_id))
            for labels, log_prob in pairs
        ]

    def _log_probs(
        self, theta: Theta, samples: tf.Tensor, num_samples: tf.Tensor, ctx: StepContext
    ) -> tuple[tf.Tensor, tf.Tensor]:
        frames = self._model.fprop(theta.model, samples, ctx, lengths=num_samples)
        return tf.nn.log_softmax(tf.cast(frames.features, tf.float32)), frames.lengths

    def stream(self, program: Program) -> CtcStream:
        """See `Transcriber`."""
        return CtcStream(program, self, self._model.stream_start(1))

    def stream_step(
        self,
        theta: Theta,
        samples: tf.Tensor,
        num_samples: tf.Tensor,
        state: Any,
        ctx: StepContext,
    ) -> tuple[tf.Tensor, tf.Tensor, Any]:
        """Returns log-probabilities [1, T, tokens] of a chunk, its frames and the next state."""
        encoded, state = self._model.stream(theta.model, samples, num_samples, state, ctx)
        scores = self._model.scores(theta.model, encoded, ctx)
        return tf.nn.log_softmax(tf.cast(scores.features, tf.float32)), scores.lengths, state


class CtcStream:
    """Transcribes a recording chunk by chunk; see `StreamSearch`."""

    def __init__(self, program: Program, transcriber: CtcTranscriber, state: Any) -> None:
        """Starts before the first chunk."""
        self._program, self._transcriber, self._state = program, transcriber, state
        self._beam = transcriber.new_beam()
        self._log_probs: list[LogProbs] = []

    def read(self, samples: Any, num_samples: Any) -> None:
        """See `StreamSearch`."""
        given = tf.constant(samples), tf.constant(num_samples)
        found = self._program.call(self._transcriber.stream_step, *given, self._state)
        log_probs, lengths, self._state = found
        own = np.asarray(log_probs)[0, : int(np.asarray(lengths)[0])]
        self._log_probs.append(own)
        if self._beam is not None:
            self._beam.read(own)

    def transcripts(self) -> list[Transcript]:
        """See `StreamSearch`."""
        nothing = np.zeros([0, self._transcriber.num_tokens], np.float32)
        return self._transcriber.best(np.concatenate([nothing, *self._log_probs]), self._beam)
