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
from tekso.models.layers.frames import FrameSequence
from tekso.models.transducer import Transducer

LogProbs = npt.NDArray[np.floating]


def transducer_greedy(
    model: Transducer, theta: Theta, encoded: FrameSequence, ctx: StepContext, *, max_symbols: int
) -> dict[str, tf.Tensor]:
    """Returns the labels of the most probable transition at every node.

    Args:
      model: the model.
      theta: its weights.
      encoded: output of its encoder.
      ctx: the step context.
      max_symbols: most labels in a frame; then the search goes to the next one.

    Shapes:
      encoded: [B, T, …]
      returns: {"ids", "frames": [B, L] int32, the labels and the frame of each; "lengths": [B];
        "log_probs": [B] float32, of the path}, where L = T * max_symbols
    Source: Graves 2012, section 2.5, with a beam of 1.
    """
    batch, length, _ = encoded.features.shape
    most = length * max_symbols
    predicted, state = model.prediction.start(theta.prediction, batch, ctx)
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
        goes_on = is_live & (~is_label | (emitted >= max_symbols))
        gained = tf.where(is_live, tf.reduce_max(scores, 1), tf.zeros_like(now["log_probs"]))
        next_ = {
            "t": t + tf.cast(goes_on, tf.int32),
            "emitted": tf.where(goes_on, tf.zeros_like(emitted), emitted),
            "lengths": now["lengths"] + tf.cast(is_label, tf.int32),
            "log_probs": now["log_probs"] + gained,
            "ids": tf.where(is_new, tf.expand_dims(token, 1), now["ids"]),
            "frames": tf.where(is_new, tf.expand_dims(t, 1), now["frames"]),
            "predicted": predicted,
            "state": state,
        }
        return (next_,)

    (last,) = tf.while_loop(
        lambda now: tf.reduce_any(now["t"] < encoded.lengths),
        iteration,
        (begin,),
        maximum_iterations=most,
    )
    return {name: last[name] for name in ("ids", "frames", "lengths", "log_probs")}


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
      log_prob: its log-probability in nats, summed over the alignments that the search kept.
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

    Raises:
      ValueError: beam_size or max_symbols is below 1.
    Source: Saon, Tüske & Audhkhasi 2020, time-synchronous decoding (algorithm 1).
    """
    if beam_size < 1 or max_symbols < 1:
        raise ValueError(
            f"transducer_beam_search: beam_size {beam_size} and max_symbols {max_symbols} must be "
            "at least 1"
        )
    beam: _Beam = {(): _Partial(0.0, 0.0, (), scorer.start())}
    for frame in range(num_frames):
        beam = _after_frame(scorer, frame, beam, blank_id, beam_size, max_symbols)
    return [TransducerHypothesis(key, own.frames, own.total) for key, own in beam.items()]


def _after_frame(
    scorer: TransducerScorer,
    frame: int,
    beam: _Beam,
    blank_id: int,
    beam_size: int,
    max_symbols: int,
) -> _Beam:
    """Returns the best labellings after a frame, best first."""
    done: _Beam = {}
    for round_ in range(max_symbols + 1):
        scores = scorer.log_probs(frame, [own.state for own in beam.values()])
        for (key, own), row in zip(beam.items(), scores, strict=True):
            gained = float(row[blank_id])
            ended = _Partial(own.total + gained, own.best + gained, own.frames, own.state)
            if key in done:
                done[key].add(ended)
            else:
                done[key] = ended
        if round_ == max_symbols:
            break
        totals = np.array([own.total for own in beam.values()])[:, None] + scores
        totals[:, blank_id] = -np.inf
        order = np.argsort(-totals, axis=None, kind="stable")[:beam_size]
        rows, tokens = np.unravel_index(order, totals.shape)
        ranked = sorted((own.total for own in done.values()), reverse=True)
        lowest = ranked[beam_size - 1] if len(ranked) >= beam_size else -np.inf
        chosen = [
            (int(i), int(v)) for i, v in zip(rows, tokens, strict=True) if totals[i, v] > lowest
        ]
        if not chosen:  # no labelling with more labels can be among the best
            break
        before = list(beam.items())
        states = scorer.extend([before[i][1].state for i, _ in chosen], [v for _, v in chosen])
        beam = {}
        for (i, token), state in zip(chosen, states, strict=True):
            key, own = before[i]
            gained = float(scores[i, token])
            frames = (*own.frames, frame)
            beam[(*key, token)] = _Partial(own.total + gained, own.best + gained, frames, state)
    best = sorted(done, key=lambda key: (-done[key].total, key))[:beam_size]
    return {key: done[key] for key in best}
