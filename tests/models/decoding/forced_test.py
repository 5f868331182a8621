"""Forced decoding against the tables, and against what a beam search says of its hypotheses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.models.decoding.beam_search import BeamSearch
from tekso.models.decoding.forced import score_targets

END = 1
SOURCES = [[2, 3, 1], [3, 2, 3, 2, 1], [2, 1]]


def test_token_log_probs_are_those_of_the_tables(
    toy: Any, make_theta: Any, make_batch: Any, make_plain: Any
) -> None:
    theta = make_theta(2, vocab=5)
    targets = np.random.default_rng(0).integers(0, 5, [3, 2, 6]).astype(np.int32)
    lengths = np.array([[6, 3], [0, 1], [2, 5]], np.int32)
    arguments = make_batch(SOURCES), tf.constant(targets), tf.constant(lengths), StepContext(), END
    outcome = score_targets(toy, theta, *arguments, return_attention=True)
    for row, source in enumerate(SOURCES):
        plain = make_plain(theta, source)
        for i in range(2):
            memory, before = 0, END
            want, attention_weights = np.zeros(6), np.zeros([6, 5])
            for t, token in enumerate(targets[row, i, : lengths[row, i]]):
                log_probs, attention, memory = plain.step(memory, before, t)
                want[t], before = log_probs[token], int(token)
                attention_weights[t, : len(source)] = attention
            found = {name: value[row, i].numpy() for name, value in outcome.items()}
            np.testing.assert_allclose(found["token_log_probs"], want, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(found["log_probs"], want.sum(), rtol=1e-5)
            np.testing.assert_allclose(found["scores"], want.sum(), rtol=1e-5)
            np.testing.assert_allclose(found["attention"], attention_weights, rtol=1e-5)


@pytest.mark.parametrize("jit", [False, True])
def test_scores_what_a_search_found_as_the_search_did(
    jit: bool, toy: Any, make_theta: Any, make_batch: Any
) -> None:
    theta, batch = make_theta(6), make_batch(SOURCES)
    theta["logits"] -= tf.one_hot(END, 4) * 2.0  # so that not all end
    how = {"length_normalization": 0.8, "coverage_penalty": 0.3}
    search = BeamSearch.Params(beam_size=4, num_hypotheses=4, max_length=5, **how).instantiate()

    @tf.function(autograph=False, jit_compile=jit)
    def run(theta: Any, batch: Any) -> Any:
        found = search.search(toy, theta, batch, StepContext(), END)
        targets = found["ids"], found["lengths"]
        return found, score_targets(toy, theta, batch, *targets, StepContext(), END, **how)

    found, forced = run(theta, batch)
    assert not found["is_finished"].numpy().all()
    assert found["is_finished"].numpy().any()
    for name in ("log_probs", "scores"):
        np.testing.assert_allclose(forced[name], found[name], rtol=1e-5)


def test_attention_that_there_is_not_is_refused(toy: Any, make_theta: Any, make_batch: Any) -> None:
    class BlindDecoder(type(toy)):
        has_attention = False

    model, targets = BlindDecoder.Params().instantiate(), tf.zeros([3, 1, 2], tf.int32)
    arguments = make_theta(0), make_batch(SOURCES), targets, tf.fill([3, 1], 2), StepContext(), END
    with pytest.raises(ValueError, match="BlindDecoder does not provide"):
        score_targets(model, *arguments, coverage_penalty=0.1)
