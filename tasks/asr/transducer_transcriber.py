"""Transcribes speech with a transducer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.params import param
from tekso.framework.task import Program
from tekso.framework.theta import Theta
from tekso.models.decoding.transducer import (
    LogProbs,
    transducer_beam_search,
    transducer_greedy,
)
from tekso.tasks.asr.transcriber import Transcriber, Transcript


class TransducerTranscriber(Transcriber):
    """Finds the text of utterances: greedily, or by time-synchronous beam search."""

    class Params(Transcriber.Params):
        """Params of TransducerTranscriber."""

        beam_size: int = param("Labellings kept by the beam search. 1: greedy.", default=1)
        max_symbols: int = param("Most tokens in a frame.", default=5)

    sizes = (*Transcriber.sizes, "max_symbols")

    def transcripts(
        self, program: Program, samples: Any, num_samples: Any
    ) -> list[list[Transcript]]:
        """See `Transcriber`.

        Shapes:
          samples: [batch, samples], num_samples: [batch]
        """
        given = tf.constant(samples), tf.constant(num_samples)
        if self.params.beam_size == 1:
            return self._greedy(program.call(self._best_path, *given))
        features, lengths = (np.asarray(array) for array in program.call(self._encoded, *given))
        p, found = self.params, []
        for own, length in zip(features, lengths, strict=True):
            hypotheses = transducer_beam_search(
                _OnProgram(program, self, own),
                int(length),
                blank_id=self._model.blank_id,
                beam_size=p.beam_size,
                max_symbols=p.max_symbols,
                language=self.language(),
            )
            best = hypotheses[: p.num_hypotheses]
            found.append([Transcript(one.labels, one.log_prob, one.frames) for one in best])
        return found

    def _greedy(self, found: Any) -> list[list[Transcript]]:
        ids, frames, lengths, log_probs = (np.asarray(array) for array in found)
        rows = zip(ids.tolist(), frames.tolist(), lengths, log_probs, strict=True)
        return [[Transcript(own[:n], float(nats), at[:n])] for own, at, n, nats in rows]

    def _best_path(
        self, theta: Theta, samples: tf.Tensor, num_samples: tf.Tensor, ctx: StepContext
    ) -> tuple[tf.Tensor, ...]:
        frames = self._model.encode(theta.model, samples, ctx, lengths=num_samples)
        most = self.params.max_symbols
        found = transducer_greedy(self._model, theta.model, frames, ctx, max_symbols=most)
        return tuple(found[name] for name in ("ids", "frames", "lengths", "log_probs"))

    def _encoded(
        self, theta: Theta, samples: tf.Tensor, num_samples: tf.Tensor, ctx: StepContext
    ) -> tuple[tf.Tensor, tf.Tensor]:
        frames = self._model.encode(theta.model, samples, ctx, lengths=num_samples)
        return frames.features, frames.lengths

    # A program keeps the trace of a function, so these belong to the transcriber.

    def start(self, theta: Theta, zero: tf.Tensor, ctx: StepContext) -> Any:
        """Returns the prediction network's output and state before the first label."""
        del zero
        return self._model.prediction.start(theta.model.prediction, self.params.beam_size, ctx)

    def extend(self, theta: Theta, labels: tf.Tensor, state: Any, ctx: StepContext) -> Any:
        """Returns the prediction network's output and state after one more label."""
        return self._model.prediction.step(theta.model.prediction, labels, state, ctx)

    def join(
        self, theta: Theta, encoded: tf.Tensor, predicted: tf.Tensor, ctx: StepContext
    ) -> tf.Tensor:
        """Returns the log-probabilities of one node per row."""
        return self._model.joint.step(theta.model.joint, encoded, predicted, ctx)


@dataclasses.dataclass(frozen=True)
class _OnProgram:
    """Scores one encoded utterance [frames, …] by calls of a program, beam_size rows each."""

    program: Program
    transcriber: TransducerTranscriber
    encoded: Any

    @property
    def _rows(self) -> int:
        return int(self.transcriber.params.beam_size)

    def start(self) -> Any:
        """See `TransducerScorer`."""
        return _unstacked(self.program.call(self.transcriber.start, tf.constant(0)), 1)[0]

    def extend(self, states: Sequence[Any], labels: Sequence[int]) -> list[Any]:
        """See `TransducerScorer`."""
        ids = np.zeros(self._rows, np.int32)
        ids[: len(labels)] = labels
        _, state = self._stacked(states)
        found = self.program.call(self.transcriber.extend, tf.constant(ids), state)
        return _unstacked(found, len(states))

    def log_probs(self, frame: int, states: Sequence[Any]) -> LogProbs:
        """See `TransducerScorer`."""
        predicted, _ = self._stacked(states)
        here = tf.constant(np.repeat(self.encoded[frame : frame + 1], self._rows, 0))
        found = self.program.call(self.transcriber.join, here, predicted)
        return np.asarray(found, np.float64)[: len(states)]

    def _stacked(self, states: Sequence[Any]) -> Any:
        """Returns the states as tensors; the last one fills the rows that are left."""
        padded = [*states, *[states[-1]] * (self._rows - len(states))]
        return tf.nest.map_structure(lambda *own: tf.constant(np.stack(own)), *padded)


def _unstacked(found: Any, count: int) -> list[Any]:
    arrays = tf.nest.map_structure(np.asarray, found)
    return [tf.nest.map_structure(lambda x, i=i: x[i], arrays) for i in range(count)]
