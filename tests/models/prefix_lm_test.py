"""PrefixLm: who sees whom, where positions continue, what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework import theta as theta_lib
from tekso.framework.context import StepContext
from tekso.models.decoder_only import CAUSAL_LAYER
from tekso.models.layers.attention_positions import RotaryPositions
from tekso.models.layers.stack import Stack
from tekso.models.prefix_lm import PrefixLm
from tekso.models.transformer_lm import TransformerLm

sys.path.insert(0, str(Path(__file__).resolve().parent))

import sentence_pairs

V, D = 11, 6


def params(**fields: Any) -> PrefixLm.Params:
    p = PrefixLm.Params(source_vocab_size=V, target_vocab_size=V, dim=D)
    p.stack = Stack.Params(num_layers=2, layer=CAUSAL_LAYER)
    return p.set({"*num_heads": 2, "*hidden_dim": 7, **fields})


def batch() -> dict[str, tf.Tensor]:
    pair = sentence_pairs.random_pairs(0, [(4, 3)], V)
    return sentence_pairs.batch([pair], 5, 3)


def perturbed(model: Any) -> Any:
    r = np.random.default_rng(5)
    return theta_lib.map_leaves(
        lambda w: tf.cast(w + r.standard_normal(w.shape) / 5, tf.float32), model.init(seed=1)
    )


def test_source_sees_all_of_the_source_and_nothing_of_the_target() -> None:
    model = params(final_norm=None).instantiate()
    theta, ctx = perturbed(model), StepContext()

    def source_part(ids: dict[str, Any]) -> np.ndarray:
        flow: dict[str, Any] = {**batch(), **ids}
        for piece in model.pieces()[:3]:
            flow = piece.run(theta, flow, ctx)
        return flow["x"][0, :5].numpy()

    def changed(name: str, place: int) -> dict[str, Any]:
        ids = batch()[name].numpy()
        ids[:, place] = (ids[:, place] + 1) % V
        return {name: tf.constant(ids)}

    before = source_part({})
    for place in range(4):
        difference = np.abs(source_part(changed("source_ids", place)) - before).max(-1)
        assert difference[:4].min() > 1e-4
        assert difference[4] == 0  # padding
    np.testing.assert_array_equal(source_part(changed("target_ids", 0)), before)


@pytest.mark.parametrize("positions", [None, RotaryPositions.Params()])
def test_with_a_source_of_one_token_it_is_a_language_model_that_continues(positions: Any) -> None:
    changes = {"stack.layer.attention.head_dim": 4, "stack.layer.attention.positions": positions}
    model = params(**changes).instantiate()
    lm = TransformerLm.Params(vocab_size=V, dim=D, stack=model.params.stack).instantiate()
    theta, pair = perturbed(model), ([7], [3, 4, 5, 0])
    padded = sentence_pairs.batch([[pair]], 6, 4)  # five of padding between source and target

    got = model.logits(theta, padded, StepContext())

    want = lm.logits(theta, tf.constant([[7, 0, 3, 4, 5]]), StepContext())[:, 1:]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_all_weights_are_those_of_a_language_model() -> None:
    p = params()
    lm = TransformerLm.Params(vocab_size=V, dim=D, stack=p.stack)
    assert p.instantiate().specs().keys() == lm.instantiate().specs().keys()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"source_vocab_size": 13}, r"source_vocab_size 13 and target_vocab_size 11 differ"),
        ({"stack.layer.attention.mask": "none"}, r"stack/layers/0/attention has mask='none'"),
    ],
)
def test_what_does_not_fit_together_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        params(**changes).instantiate()
