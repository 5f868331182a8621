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
    TransducerBeam,
    TransducerScorer,
    transducer_greedy,
)
from tekso.models.layers.frames import FrameSequence
from tekso.tasks.asr.transcriber import StreamSearch, Transcriber, Transcript


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
            return self._greedy(program.call(self.best_path, *given))
        features, lengths = (np.asarray(array) for array in program.call(self._encoded, *given))
        found = []
        for own, length in zip(features, lengths, strict=True):
            scorer = _OnProgram(program, self, own)
            beam = self.new_beam(scorer)
            beam.read(scorer, int(length))
            found.append(self.best(beam))
        return found

    def new_beam(self, scorer: TransducerScorer) -> TransducerBeam:
        """Returns a beam search that has read no frames."""
        p = self.params
        return TransducerBeam(
            scorer.start(),
            blank_id=self._model.blank_id,
            beam_size=p.beam_size,
            max_symbols=p.max_symbols,
            language=self.language(),
        )

    def best(self, beam: TransducerBeam) -> list[Transcript]:
        """Returns the transcripts of the frames that a beam search has read."""
        best = beam.hypotheses()[: self.params.num_hypotheses]
        return [Transcript(one.labels, one.log_prob, one.frames) for one in best]

    def stream(self, program: Program) -> StreamSearch:
        """See `Transcriber`."""
        state = self._model.stream_start(1)
        if self.params.beam_size == 1:
            return _GreedyStream(program, self, state)
        return _BeamStream(program, self, state)

    def stream_step(
        self,
        theta: Theta,
        samples: tf.Tensor,
        num_samples: tf.Tensor,
        state: Any,
        ctx: StepContext,
    ) -> tuple[tf.Tensor, tf.Tensor, Any]:
        """Returns the encoder's output [1, T, …] for a chunk, its frames and the next state."""
        encoded, state = self._model.stream(theta.model, samples, num_samples, state, ctx)
        return encoded.features, encoded.lengths, state

    def greedy_step(
        self, theta: Theta, features: tf.Tensor, lengths: tf.Tensor, start: Any, ctx: StepContext
    ) -> Any:
        """Returns the greedy path through a chunk of the encoder's output."""
        encoded = FrameSequence(features, lengths)
        most = self.params.max_symbols
        return transducer_greedy(
            self._model, theta.model, encoded, ctx, max_symbols=most, start=start
        )

    def _greedy(self, found: Any) -> list[list[Transcript]]:
        names = ("ids", "frames", "lengths", "log_probs")
        ids, frames, lengths, log_probs = (np.asarray(found[name]) for name in names)
        rows = zip(ids.tolist(), frames.tolist(), lengths, log_probs, strict=True)
        return [[Transcript(own[:n], float(nats), at[:n])] for own, at, n, nats in rows]

    def best_path(
        self, theta: Theta, samples: tf.Tensor, num_samples: tf.Tensor, ctx: StepContext
    ) -> dict[str, tf.Tensor]:
        """Returns the greedy path; see `transducer_greedy`.

        Shapes:
          samples: [B, N], num_samples: [B]
        """
        frames = self._model.encode(theta.model, samples, ctx, lengths=num_samples)
        most = self.params.max_symbols
        found = transducer_greedy(self._model, theta.model, frames, ctx, max_symbols=most)
        return {name: found[name] for name in ("ids", "frames", "lengths", "log_probs")}

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


class _Stream:
    """Base of the searches in a stream: encodes it chunk by chunk."""

    def __init__(self, program: Program, transcriber: TransducerTranscriber, state: Any) -> None:
        """Starts before the first chunk."""
        self._program, self._transcriber, self._state = program, transcriber, state

    def _encoded(self, samples: Any, num_samples: Any) -> tuple[Any, Any]:
        given = tf.constant(samples), tf.constant(num_samples)
        found = self._program.call(self._transcriber.stream_step, *given, self._state)
        features, lengths, self._state = found
        return features, lengths


class _GreedyStream(_Stream):
    """Greedy search in a stream; see `StreamSearch`."""

    def __init__(self, program: Program, transcriber: TransducerTranscriber, state: Any) -> None:
        super().__init__(program, transcriber, state)
        self._after = program.call(transcriber.start, tf.constant(0))
        self._labels: list[int] = []
        self._places: list[int] = []
        self._log_prob, self._frames = 0.0, 0

    def read(self, samples: Any, num_samples: Any) -> None:
        """See `StreamSearch`."""
        features, lengths = self._encoded(samples, num_samples)
        found = self._program.call(self._transcriber.greedy_step, features, lengths, self._after)
        self._after = found["after"]
        size = int(np.asarray(found["lengths"])[0])
        self._labels += np.asarray(found["ids"])[0, :size].tolist()
        self._places += (self._frames + np.asarray(found["frames"])[0, :size]).tolist()
        self._log_prob += float(np.asarray(found["log_probs"])[0])
        self._frames += int(np.asarray(lengths)[0])

    def transcripts(self) -> list[Transcript]:
        """See `StreamSearch`."""
        return [Transcript(self._labels, self._log_prob, self._places)]


class _BeamStream(_Stream):
    """Beam search in a stream; see `StreamSearch`."""

    _beam: TransducerBeam | None = None

    def read(self, samples: Any, num_samples: Any) -> None:
        """See `StreamSearch`."""
        features, lengths = self._encoded(samples, num_samples)
        scorer = _OnProgram(self._program, self._transcriber, np.asarray(features)[0])
        if self._beam is None:
            self._beam = self._transcriber.new_beam(scorer)
        self._beam.read(scorer, int(np.asarray(lengths)[0]))

    def transcripts(self) -> list[Transcript]:
        """See `StreamSearch`."""
        if self._beam is None:
            return [Transcript([], 0.0, [])]
        return self._transcriber.best(self._beam)


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
