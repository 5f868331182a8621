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
from tekso.models.decoding.ctc import ctc_alignment, ctc_beam_search, ctc_greedy
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
        p, blank_id = self.params, self._model.blank_id
        if p.beam_size == 1:
            labels = ctc_greedy(log_probs, blank_id=blank_id)
            pairs = [(labels, float(np.max(log_probs, 1, initial=-np.inf).sum()))]
        else:
            hypotheses = ctc_beam_search(
                log_probs,
                blank_id=blank_id,
                beam_size=p.beam_size,
                tokens_per_frame=p.tokens_per_frame,
                language=self.language(),
            )
            pairs = [(list(one.labels), one.log_prob) for one in hypotheses[: p.num_hypotheses]]
        return [
            Transcript(labels, log_prob, ctc_alignment(log_probs, labels, blank_id=blank_id))
            for labels, log_prob in pairs
        ]

    def _log_probs(
        self, theta: Theta, samples: tf.Tensor, num_samples: tf.Tensor, ctx: StepContext
    ) -> tuple[tf.Tensor, tf.Tensor]:
        frames = self._model.fprop(theta.model, samples, ctx, lengths=num_samples)
        return tf.nn.log_softmax(tf.cast(frames.features, tf.float32)), frames.lengths
