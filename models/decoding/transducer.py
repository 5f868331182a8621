"""Decoding of transducers: greedy in the graph, and time-synchronous beam search on the host.

Legend: B batch, T frames, L most labels, V tokens and the blank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tekso.framework import workarounds
from tekso.framework.context import StepContext
from tekso.framework.theta import Theta
from tekso.framework.while_loops import while_loop
from tekso.models.decoding.prefix_scores import PrefixScores, PrefixTotals
from tekso.models.layers.frames import FrameSequence
from tekso.models.transducer import Transducer

LogProbs = npt.NDArray[np.floating]


def transducer_greedy(
    model: Transducer,
    theta: Theta,
    encoded: FrameSequence,
    ctx: StepContext,
    *,
    max_symbols: int,
    start: Any = None,
) -> dict[str, Any]:
    """Returns the labels of the most probable transition at every node.

    Args:
      model: the model.
      theta: its weights.
      encoded: output of its encoder.
      ctx: the step context.
      max_symbols: most labels in a frame; then the search goes to the next one.
      start: "after" of the frames before, in a stream; None: there are none.

    Shapes:
      encoded: [B, T, …]
      returns: {"ids", "frames": [B, L] int32, the labels and the frame of each; "lengths": [B];
        "log_probs": [B] float32, of the path; "after": output and state of the prediction network},
        where L = T * max_symbols
    Source: Graves 2012, section 2.5, with a beam of 1.
    """
    batch, length, _ = encoded.features.shape
    most = length * max_symbols
    if start is None:
        start = model.prediction.start(theta.prediction, batch, ctx)
    predicted, state = start
    none = tf.zeros([batch], tf.int32)
    ids = tf.zeros([batch, most], tf.int32)
    begin = {
        "t": none, "emitted": none, "lengths": none, "log_probs": tf.zeros([batch]),
        "ids": ids, "frames": ids, "predicted": predicted, "state": state,
    }  # fmt: skip

    def iteration(now: dict[str, Any]) -> tuple[dict[str, Any]]:
        (weights, features, num_frames), now = workarounds.capture(
            ctx, ((theta, encoded.features, encoded.lengths), now)
        )
        t = now["t"]
        here = tf.gather(features, tf.minimum(t, length - 1), batch_dims=1)
        scores = model.joint.step(weights.joint, here, now["predicted"], ctx)
        token = tf.argmax(scores, 1, output_type=tf.int32)
        is_live = t < num_frames
        is_label = is_live & tf.not_equal(token, model.blank_id)
        label = tf.where(is_label, token, tf.zeros_like(token))
        place = tf.expand_dims(tf.range(most), 0)
        is_new = tf.expand_dims(is_label, 1) & tf.equal(place, tf.expand_dims(now["lengths"], 1))
        after = model.prediction.step(weights.prediction, label, now["state"], ctx)

        def if_label(new: tf.Tensor, old: tf.Tensor) -> tf.Tensor:
            return tf.where(tf.expand_dims(is_label, 1), new, old)

        predicted, state = tf.nest.map_structure(if_label, after, (now["predicted"], now["state"]))
        emitted = now["emitted"] + tf.cast(is_label, tf.int32)
        continues = is_live & (~is_label | (emitted >= max_symbols))
        gained = tf.where(is_live, tf.reduce_max(scores, 1), tf.zeros_like(now["log_probs"]))
        next_ = {
            "t": t + tf.cast(continues, tf.int32),
            "emitted": tf.where(continues, tf.zeros_like(emitted), emitted),
            "lengths": now["lengths"] + tf.cast(is_label, tf.int32),
            "log_probs": now["log_probs"] + gained,
            "ids": tf.where(is_new, tf.expand_dims(token, 1), now["ids"]),
            "frames": tf.where(is_new, tf.expand_dims(t, 1), now["frames"]),
            "predicted": predicted,
            "state": state,
        }
        return (next_,)

    (last,) = while_loop(
        lambda now: tf.reduce_any(now["t"] < encoded.lengths),
        iteration,
        (begin,),
        maximum_iterations=most,
    )
    found = {name: last[name] for name in ("ids", "frames", "lengths", "log_probs")}
    return {**found, "after": (last["predicted"], last["state"])}


class TransducerScorer(Protocol):
    """A transducer with one encoded utterance, on the host."""

    def start(self) -> Any:
        """Returns the state of the hypothesis without labels."""
        ...

    def extend(self, states: Sequence[Any], labels: Sequence[int]) -> list[Any]:
        """Returns the states after one more label each."""
        ...

    def log_probs(self, frame: int, states: Sequence[Any]) -> LogProbs:
        """Returns the log-probabilities of all tokens in a frame: [states, V]."""
        ...


@dataclasses.dataclass(frozen=True)
class TransducerHypothesis:
    """A labelling.

    Attributes:
      labels: its tokens.
      frames: frame of each token in its most probable alignment that the search kept.
      log_prob: its log-probability in nats, summed over the alignments that the search kept, plus
        the score of the language model.
    """

    labels: tuple[int, ...]
    frames: tuple[int, ...]
    log_prob: float


@dataclasses.dataclass
class _Partial:
    """A labelling up to a frame: the summed alignments, and the best one."""

    total: float
    best: float
    frames: tuple[int, ...]
    state: Any

    def after(self, gained: float) -> _Partial:
        return _Partial(self.total + gained, self.best + gained, self.frames, self.state)

    def add(self, other: _Partial) -> None:
        self.total = float(np.logaddexp(self.total, other.total))
        if other.best > self.best:
            self.best, self.frames = other.best, other.frames


_Beam = dict[tuple[int, ...], _Partial]


def transducer_beam_search(
    scorer: TransducerScorer,
    num_frames: int,
    *,
    blank_id: int,
    beam_size: int,
    max_symbols: int,
    language: PrefixScores | None = None,
) -> list[TransducerHypothesis]:
    """Returns the most probable labellings, best first.

    In every frame, each hypothesis emits up to max_symbols labels, in rounds, and then the blank.
    Equal labellings are merged. If the beam holds all of them, the result is exact for alignments
    with at most max_symbols labels in a frame.

    Args:
      scorer: scores of the utterance.
      num_frames: its frames.
      blank_id: token of the blank.
      beam_size: labellings kept after each frame and in each round, and returned, at most.
      max_symbols: most labels in a frame.
      language: scores that are added for each token and the end; None: none.

    Raises:
      ValueError: beam_size or max_symbols is below 1.
    Source: Saon, Tüske & Audhkhasi 2020, time-synchronous decoding (algorithm 1).
    """
    beam = TransducerBeam(
        scorer.start(),
        blank_id=blank_id,
        beam_size=beam_size,
        max_symbols=max_symbols,
        language=language,
    )
    beam.read(scorer, num_frames)
    return beam.hypotheses()


class TransducerBeam:
    """A time-synchronous beam search that reads frames in any number of parts."""

    def __init__(
        self,
        state: Any,
        *,
        blank_id: int,
        beam_size: int,
        max_symbols: int,
        language: PrefixScores | None = None,
    ) -> None:
        """Starts with the labelling without labels, whose state is given."""
        if beam_size < 1 or max_symbols < 1:
            raise ValueError(
                f"transducer_beam_search: beam_size {beam_size} and max_symbols {max_symbols} must "
                "be at least 1"
            )
        self._blank_id, self._beam_size, self._most = blank_id, beam_size, max_symbols
        self._language = PrefixTotals(language)
        self._beam: _Beam = {(): _Partial(0.0, 0.0, (), state)}
        self._frames = 0  # read so far

    def read(self, scorer: TransducerScorer, num_frames: int) -> None:
        """Reads the next frames, which the scorer numbers from 0."""
        for frame in range(num_frames):
            self._beam = self._after_frame(scorer, frame)
            self._frames += 1

    def hypotheses(self) -> list[TransducerHypothesis]:
        """Returns the labellings of the frames read so far, best first."""
        self._language.prepare(self._beam)
        found = [
            TransducerHypothesis(key, own.frames, own.total + self._language.ended(key))
            for key, own in self._beam.items()
        ]
        return sorted(found, key=lambda one: (-one.log_prob, one.labels))

    def _rank(self, key: tuple[int, ...], own: _Partial) -> float:
        return own.total + self._language.total(key)

    def _after_frame(self, scorer: TransducerScorer, frame: int) -> _Beam:
        """Returns the best labellings after a frame, best first."""
        beam: _Beam = self._beam
        done: _Beam = {}
        for round_ in range(self._most + 1):
            scores = scorer.log_probs(frame, [own.state for own in beam.values()])
            for (key, own), row in zip(beam.items(), scores, strict=True):
                ended = own.after(float(row[self._blank_id]))
                if key in done:
                    done[key].add(ended)
                else:
                    done[key] = ended
            chosen = [] if round_ == self._most else self._extensions(beam, scores, done)
            if not chosen:  # no labelling with more labels can be among the best
                break
            before = list(beam.items())
            states = scorer.extend([before[i][1].state for i, _ in chosen], [v for _, v in chosen])
            beam = {}
            for (i, token), state in zip(chosen, states, strict=True):
                key, own = before[i]
                longer = own.after(float(scores[i, token]))
                longer.state, longer.frames = state, (*own.frames, self._frames)
                beam[(*key, token)] = longer
        best = sorted(done, key=lambda key: (-self._rank(key, done[key]), key))
        return {key: done[key] for key in best[: self._beam_size]}

    def _extensions(self, beam: _Beam, scores: LogProbs, done: _Beam) -> list[tuple[int, int]]:
        """Returns (row in the beam, token) of the best labellings with one more label."""
        self._language.prepare(beam)
        totals = np.array(scores, np.float64)
        for row, (key, own) in zip(totals, beam.items(), strict=True):
            row += self._rank(key, own)
            row[: self._blank_id] += self._language.next(key)
        totals[:, self._blank_id] = -np.inf
        order = np.argsort(-totals, axis=None, kind="stable")[: self._beam_size]
        rows, tokens = np.unravel_index(order, totals.shape)
        ranked = sorted((self._rank(key, own) for key, own in done.items()), reverse=True)
        lowest = ranked[self._beam_size - 1] if len(ranked) >= self._beam_size else -np.inf
        pairs = ((int(i), int(v)) for i, v in zip(rows, tokens, strict=True))
        return [(i, v) for i, v in pairs if totals[i, v] > lowest]
