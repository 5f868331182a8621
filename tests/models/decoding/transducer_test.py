"""Transducer decoding: beam search against sums over alignments, greedy against a loop."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.models.decoding.transducer import transducer_beam_search, transducer_greedy
from tekso.models.layers.frames import FrameSequence
from tekso.models.layers.log_mel import LogMel
from tekso.models.layers.recurrent import RecurrentStack
from tekso.models.layers.recurrent_cells import LstmCell
from tekso.models.layers.transducer_layers import Joint, PredictionNetwork
from tekso.models.speech_encoder import RecurrentEncoder
from tekso.models.transducer import Transducer

BLANK, TOKENS, FRAMES = 2, 3, 3


class Table:
    """Scores that depend on the frame and on all labels so far."""

    def start(self) -> tuple[int, ...]:
        return ()

    def extend(self, states: Sequence[Any], labels: Sequence[int]) -> list[Any]:
        return [(*state, label) for state, label in zip(states, labels, strict=True)]

    def log_probs(self, frame: int, states: Sequence[Any]) -> np.ndarray:
        return np.stack([self.row(frame, state) for state in states])

    def row(self, frame: int, state: tuple[int, ...]) -> np.ndarray:
        logits = np.random.default_rng([frame, len(state), *state]).normal(0, 1.5, TOKENS)
        return logits - np.log(np.exp(logits).sum())


def alignments(most: int) -> dict[tuple[int, ...], list[tuple[float, tuple[int, ...]]]]:
    """Returns {labels: [(log-probability, frames)]} with at most `most` labels in a frame."""
    found: dict[tuple[int, ...], list[tuple[float, tuple[int, ...]]]] = {}
    parts = [p for n in range(most + 1) for p in itertools.product(range(BLANK), repeat=n)]
    for path in itertools.product(parts, repeat=FRAMES):
        labels: tuple[int, ...] = ()
        frames: tuple[int, ...] = ()
        total = 0.0
        for t, part in enumerate(path):
            for label in part:
                total += Table().row(t, labels)[label]
                labels, frames = (*labels, label), (*frames, t)
            total += Table().row(t, labels)[BLANK]
        found.setdefault(labels, []).append((total, frames))
    return found


def test_a_wide_beam_finds_the_sums_over_all_alignments_and_the_frames_of_the_best() -> None:
    expected = alignments(2)
    found = transducer_beam_search(
        Table(), FRAMES, blank_id=BLANK, beam_size=len(expected), max_symbols=2
    )
    assert len(found) > 50
    totals = [hypothesis.log_prob for hypothesis in found]
    assert totals == sorted(totals, reverse=True)
    for hypothesis in found[:40]:
        paths = expected[hypothesis.labels]
        assert hypothesis.log_prob == pytest.approx(np.logaddexp.reduce([p for p, _ in paths]))
        assert hypothesis.frames == max(paths)[1]


def test_a_narrow_beam_returns_as_many_and_no_better_ones() -> None:
    wide = transducer_beam_search(Table(), FRAMES, blank_id=BLANK, beam_size=99, max_symbols=2)
    narrow = transducer_beam_search(Table(), FRAMES, blank_id=BLANK, beam_size=3, max_symbols=2)
    assert len(narrow) == 3 and narrow[0].log_prob <= wide[0].log_prob + 1e-9
    (empty,) = transducer_beam_search(Table(), 0, blank_id=BLANK, beam_size=3, max_symbols=2)
    assert empty.labels == () and empty.log_prob == 0.0
    with pytest.raises(ValueError, match="beam_size 0"):
        transducer_beam_search(Table(), 1, blank_id=BLANK, beam_size=0, max_symbols=1)


def small_model() -> Transducer:
    model: Transducer = Transducer.Params(
        vocab_size=4,
        front_end=LogMel.Params(sample_rate=8000, num_channels=8, fft_length=256, high_hz=3800.0),
        encoder=RecurrentEncoder.Params(
            num_filters=2,
            dim=6,
            stack=RecurrentStack.Params(num_layers=1, cell=LstmCell.Params(hidden_dim=5)),
        ),
        prediction=PredictionNetwork.Params(
            dim=3, stack=RecurrentStack.Params(num_layers=1, cell=LstmCell.Params(hidden_dim=7))
        ),
        joint=Joint.Params(dim=6, block_frames=3),
    ).instantiate()
    return model


@pytest.mark.parametrize("graph", [False, True])
def test_greedy_search_takes_the_best_transition_of_every_node(graph: bool) -> None:
    model, ctx = small_model(), StepContext()
    theta = tf.nest.map_structure(lambda w: 4.0 * w, model.init(seed=3))
    rng = np.random.default_rng(5)
    features = tf.constant(rng.normal(0, 2, (3, 6, 5)), tf.float32)
    lengths = [6, 4, 0]

    def run(features: tf.Tensor) -> dict[str, tf.Tensor]:
        frames = FrameSequence(features, tf.constant(lengths))
        return transducer_greedy(model, theta, frames, ctx, max_symbols=2)

    found = (tf.function(run, autograph=False) if graph else run)(features)
    some = 0
    for row, length in enumerate(lengths):
        ids: list[int] = []
        places: list[int] = []
        total = 0.0
        for t in range(length):
            for _ in range(2):
                labels = tf.constant([ids], tf.int32, shape=[1, len(ids)])
                predicted = model.prediction.fprop(theta.prediction, labels, ctx)[:, -1]
                scores = model.joint.step(theta.joint, features[row : row + 1, t], predicted, ctx)
                token = int(np.argmax(scores))
                total += float(np.max(scores))
                if token == model.blank_id:
                    break
                ids.append(token)
                places.append(t)
        size = int(found["lengths"][row])
        assert found["ids"][row, :size].numpy().tolist() == ids
        assert found["frames"][row, :size].numpy().tolist() == places
        assert float(found["log_probs"][row]) == pytest.approx(total, rel=1e-4)
        some += size
    assert 3 < some < 20
