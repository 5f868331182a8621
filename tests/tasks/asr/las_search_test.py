"""Hybrid decoding: the search of LAS with CTC scores against all transcripts, scored one by one."""

from __future__ import annotations

import itertools
from typing import Any

import asterisk_folder
import numpy as np
import pytest
import tensorflow as tf
from eager_program import EagerProgram
from speech_tasks import las_params

from tekso.framework.context import StepContext
from tekso.models.ctc_loss import ctc_frames_needed

RECORDING = asterisk_folder.tones_of("ab")[:1000]  # 3 frames of the encoder's output
SEARCH = {
    "model.vocab_size": 2,
    "transcriber.search.beam_size": 40,
    "transcriber.search.length_normalization": 0.0,
    "transcriber.search.max_length": 4,
    "transcriber.num_hypotheses": 6,
}


def found_by(task: Any, theta: Any, recordings: list[np.ndarray]) -> list[Any]:
    length = max(map(len, recordings))
    samples = np.stack([np.pad(one, (0, length - len(one))) for one in recordings])
    sizes = np.array([*map(len, recordings)], np.int32)
    found: list[Any] = task.transcriber.transcripts(EagerProgram(theta), samples, sizes)
    return found


def mixed_log_prob(task: Any, theta: Any, labels: tuple[int, ...]) -> float:
    """Returns w log P_ctc + (1 - w) log P_attention, which is the task's loss; -inf for none."""
    batch = {
        "samples": tf.constant([RECORDING], tf.float32),
        "num_samples": tf.constant([len(RECORDING)]),
        "labels": tf.constant([labels], tf.int32, shape=[1, len(labels)]),
        "num_labels": tf.constant([len(labels)]),
        "weights": tf.ones([1]),
    }
    if int(ctc_frames_needed(batch["labels"], batch["num_labels"])[0]) > 3:
        return -np.inf
    flow = batch
    for piece in task.model.pieces():
        flow = piece.run(theta.model, flow, StepContext())
    return -float(task.nats(flow, StepContext())[0])


def hybrid(weight: float, **changes: Any) -> tuple[Any, Any]:
    task = las_params(**{**SEARCH, "model.ctc_weight": weight, **changes}).instantiate()
    return task, tf.nest.map_structure(lambda w: 3.0 * w, task.init(seed=3))


@pytest.mark.parametrize("weight", [0.4, 0.9])
def test_a_wide_beam_finds_the_best_transcripts_with_their_mixed_scores(weight: float) -> None:
    task, theta = hybrid(weight, **{"transcriber.ctc_weight": weight})
    (found,) = found_by(task, theta, [RECORDING])
    scores = {
        labels: mixed_log_prob(task, theta, labels)
        for size in range(4)
        for labels in itertools.product(range(2), repeat=size)
    }
    best = sorted(scores, key=lambda labels: -scores[labels])
    assert [tuple(one.labels) for one in found] == best[:6]
    for one in found:
        assert one.log_prob == pytest.approx(scores[tuple(one.labels)], abs=1e-3)


def test_the_scores_change_the_order_and_weight_0_is_the_search_without_them() -> None:
    plain, theta = hybrid(0.9)
    task, _ = hybrid(0.9, **{"transcriber.ctc_weight": 0.9})
    without, with_ctc = (found_by(one, theta, [RECORDING])[0] for one in (plain, task))
    assert [one.labels for one in without] != [one.labels for one in with_ctc]
    attention_only = las_params(**SEARCH).instantiate()
    same = found_by(attention_only, theta, [RECORDING])[0]
    assert [(one.labels, one.log_prob) for one in same] == [
        (one.labels, one.log_prob) for one in without
    ]


def test_a_recording_has_the_transcripts_of_itself_alone_in_any_batch() -> None:
    """Padding of a shorter recording has no effect, nor has a narrow beam of others."""
    changes = {"transcriber.ctc_weight": 0.5, "transcriber.search.beam_size": 6}
    task, theta = hybrid(0.5, **{**changes, "model.vocab_multiple": 4})
    short = asterisk_folder.tones_of("cad")
    alone = [found_by(task, theta, [one])[0] for one in (RECORDING, short)]
    together = found_by(task, theta, [RECORDING, short])
    for one, other in zip(alone, together, strict=True):
        assert [list(t.labels) for t in one] == [list(t.labels) for t in other]
        np.testing.assert_allclose(
            [t.log_prob for t in one], [t.log_prob for t in other], atol=1e-3
        )


def test_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ctc_weight is 0.3, but the model has no CTC layer"):
        las_params(**SEARCH, **{"transcriber.ctc_weight": 0.3}).instantiate()
    with pytest.raises(ValueError, match=r"ctc_weight is 1.5, must be in 0 … 1"):
        las_params(**SEARCH, **{"transcriber.ctc_weight": 1.5}).instantiate()
