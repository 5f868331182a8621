"""EncoderDecoder: a whole model in NumPy, which tables are one, what is refused."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework import theta as theta_lib
from tekso.framework.context import StepContext
from tekso.models.encoder_decoder import DECODER_LAYER, ENCODER_LAYER, EncoderDecoder
from tekso.models.layers.embedding import Embedding
from tekso.models.layers.softmax import Softmax
from tekso.models.layers.stack import RepeatedStack, Stack

sys.path.insert(0, str(Path(__file__).resolve().parent))

import sentence_pairs

V, D, HEADS, F, L = 11, 6, 2, 7, 2
SIZES = [(4, 3), (2, 5)]


def params(kind: Any = Stack, **fields: Any) -> EncoderDecoder.Params:
    """Sinusoidal positions, pre-norm, ReLU, biases, one table for all."""
    p = EncoderDecoder.Params(source_vocab_size=V, target_vocab_size=V, dim=D)
    p.encoder = kind.Params(num_layers=L, layer=ENCODER_LAYER)
    p.decoder = kind.Params(num_layers=L, layer=DECODER_LAYER)
    return p.set({"*num_heads": HEADS, "*hidden_dim": F, **fields})


def pairs() -> dict[str, tf.Tensor]:
    return sentence_pairs.batch([[p] for p in sentence_pairs.random_pairs(0, SIZES, V)], 5, 5)


class NumpyModel:
    """The model of `params()`, for one unpadded pair, query by query and head by head."""

    def __init__(self, theta: Any) -> None:
        self.w = {path: np.float64(value) for path, value in theta_lib.flatten(theta).items()}

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        deviation = np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
        return centred / deviation * self.w[f"{name}/scale"] + self.w[f"{name}/bias"]

    def attention(
        self, x: np.ndarray, seen: np.ndarray, name: str, *, causal: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        w = self.w
        y = np.zeros_like(x) + w[f"{name}/out_bias"]
        attention_weights = np.zeros([len(x), len(seen)])
        for h in range(HEADS):
            q = x @ w[f"{name}/q"][:, h] + w[f"{name}/q_bias"][h]
            k = seen @ w[f"{name}/k"][:, h] + w[f"{name}/k_bias"][h]
            v = seen @ w[f"{name}/v"][:, h] + w[f"{name}/v_bias"][h]
            for t in range(len(x)):
                n = t + 1 if causal else len(seen)
                e = np.exp(k[:n] @ q[t] / math.sqrt(D / HEADS))
                y[t] += (e / e.sum()) @ v[:n] @ w[f"{name}/out"][h]
                attention_weights[t, :n] += e / e.sum() / HEADS
        return y, attention_weights

    def layer(self, x: np.ndarray, name: str, memory: Any = None) -> tuple[np.ndarray, Any]:
        w, attention_weights = self.w, None
        y = self.norm(x, f"{name}/attention_norm")
        x = x + self.attention(y, y, f"{name}/attention", causal=memory is not None)[0]
        if memory is not None:
            y = self.norm(x, f"{name}/memory_attention_norm")
            y, attention_weights = self.attention(
                y, memory, f"{name}/memory_attention", causal=False
            )
            x = x + y
        y = self.norm(x, f"{name}/feed_forward_norm")
        y = np.maximum(
            y @ w[f"{name}/feed_forward/hidden/w"] + w[f"{name}/feed_forward/hidden/b"], 0
        )
        return x + y @ w[f"{name}/feed_forward/output/w"] + w[
            f"{name}/feed_forward/output/b"
        ], attention_weights

    def embedded(self, ids: list[int]) -> np.ndarray:
        half = D // 2
        angles = np.arange(len(ids))[:, None] * 1e4 ** (-np.arange(half) / (half - 1))
        waves = np.concatenate([np.sin(angles), np.cos(angles)], 1)
        return self.w["target_embedding/table"][ids] * math.sqrt(D) + waves

    def logits(self, source: list[int], target: list[int]) -> tuple[np.ndarray, np.ndarray]:
        memory = self.embedded(source)
        for i in range(L):
            memory, _ = self.layer(memory, f"encoder/layers/{i}")
        memory = self.norm(memory, "encoder_norm")
        x = self.embedded(target)
        for i in range(L):
            x, attention_weights = self.layer(x, f"decoder/layers/{i}", memory)
        return self.norm(x, "decoder_norm") @ self.w["target_embedding/table"].T, attention_weights


def test_logits_and_attention_are_those_of_the_formula() -> None:
    model = params(target_embedding=Embedding.Params(scale="sqrt_dim")).instantiate()
    r, batch = np.random.default_rng(5), pairs()
    theta = theta_lib.map_leaves(
        lambda w: tf.cast(w + r.standard_normal(w.shape) / 5, tf.float32), model.init(seed=1)
    )

    logits = model.logits(theta, batch, StepContext()).numpy()
    attention = model.attention(theta, batch, StepContext()).numpy()

    alone = NumpyModel(theta)
    for i, (s, t) in enumerate(SIZES):
        source, target = (batch[f"{side}_ids"][i].numpy() for side in ("source", "target"))
        want, attention_weights = alone.logits(source[:s].tolist(), target[:t].tolist())
        np.testing.assert_allclose(logits[i, :t], want, rtol=1e-4, atol=2e-5)
        np.testing.assert_allclose(attention[i, :t, :s], attention_weights, rtol=1e-4, atol=1e-6)


def test_what_is_left_out_says_which_tables_are_one() -> None:
    def tables(**fields: Any) -> dict[str, tuple[int, ...]]:
        specs = params(**fields).instantiate().specs()
        return {
            p: s.shape for p, s in specs.items() if p.split("/")[0][:3] in ("sou", "tar", "sof")
        }

    own = {"source_embedding": Embedding.Params(), "source_vocab_size": 13}
    one = {"target_embedding/table": (V, D)}
    assert tables() == one
    assert tables(**own) == {"source_embedding/table": (13, D), **one}
    assert tables(softmax=Softmax.Params()) == {**one, "softmax/w": (V, D)}
    assert len(tables(**own, softmax=Softmax.Params())) == 3


def test_repeated_stacks_start_and_compute_as_written_out_ones() -> None:
    changes = {"*dropout_rate": 0.2}
    model, repeated = (params(k, **changes).instantiate() for k in (Stack, RepeatedStack))
    ctx = StepContext(mode="train", step=3)

    want = model.token_cross_entropy(model.init(7), pairs(), ctx)
    got = repeated.token_cross_entropy(repeated.init(7), pairs(), ctx)

    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_dropout_of_both_sides_is_drawn_apart() -> None:
    model = params(dropout_rate=0.5).instantiate()
    ctx = StepContext(mode="train")
    kept = [
        d.fprop({}, tf.ones([2, 5, D]), ctx) for d in (model.source_dropout, model.target_dropout)
    ]
    assert np.abs(kept[0] - kept[1]).max() > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"source_vocab_size": 13},
            r"source_vocab_size 13 and .* 11 differ.*source_embedding\.scale=sqrt_dim",
        ),
        ({"decoder.layer.attention.mask": "none"}, r"decoder/layers/0/attention has mask='none'"),
        ({"encoder.layer.attention.mask": "causal"}, r"encoder/layers/0/attention has .*'causal'"),
        (
            {"decoder.layer.memory_attention": None},
            r"no layer of the decoder attends to the source",
        ),
        ({"source_embedding": Embedding.Params(dim=5)}, r"Embedding.Params.dim is 5, .* it has 6"),
    ],
)
def test_what_does_not_fit_together_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        params(**changes).instantiate()
