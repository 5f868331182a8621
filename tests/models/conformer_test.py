"""The Conformer: relative positions and convolutions against NumPy, padding, published counts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework import registry
from tekso.framework.context import StepContext
from tekso.framework.initializers import Zeros
from tekso.framework.run.inspection import model_record, task_of
from tekso.models.conformer import Conformer, Size, conformer
from tekso.models.layers.attention import MultiHeadAttention
from tekso.models.layers.conformer_block import ConformerBlock, ConvolutionModule
from tekso.models.layers.frames import FrameSequence
from tekso.models.layers.normalization import LayerNorm
from tekso.models.layers.recurrent import RecurrentStack
from tekso.models.layers.recurrent_cells import LstmCell
from tekso.models.layers.relative_scores import RelativeSinusoids
from tekso.models.speech_encoder import RecurrentEncoder

RNG = np.random.default_rng(5)
X = RNG.normal(size=(2, 7, 6)).astype(np.float32)


def randomized(layer: Any) -> Any:
    theta = layer.init(seed=0)
    rng = np.random.default_rng(1)
    return tf.nest.map_structure(
        lambda w: tf.constant(np.abs(rng.normal(0, 0.5, w.shape)).astype(np.float32)), theta
    )


def test_relative_scores_are_those_of_transformer_xl() -> None:
    layer = MultiHeadAttention.Params(
        input_dim=6, num_heads=2, positions=RelativeSinusoids.Params(), use_bias=False
    ).instantiate()
    theta = randomized(layer)
    q, k, v = (np.einsum("btd,dnh->btnh", X, theta[name]) for name in "qkv")
    table, own = theta.positions.r.numpy(), theta.positions
    expected = np.zeros_like(X)
    for b in range(2):
        for n in range(2):
            scores = np.zeros((7, 7))
            for i in range(7):
                for j in range(7):
                    rates = [(i - j) / 10_000 ** (2 * m / 6) for m in range(3)]
                    waves = np.array([*map(math.sin, rates), *map(math.cos, rates)])
                    content = (q[b, i, n] + own.u.numpy()[n]) @ k[b, j, n]
                    position = (q[b, i, n] + own.v.numpy()[n]) @ (waves @ table[:, n])
                    scores[i, j] = (content + position) / math.sqrt(3)
            weights = np.exp(scores - scores.max(1, keepdims=True))
            weights /= weights.sum(1, keepdims=True)
            expected[b] += weights @ v[b, :, n] @ theta.out.numpy()[n]
    found = layer.fprop(theta, tf.constant(X), StepContext())
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_relative_scores_are_for_whole_sequences() -> None:
    layer = RelativeSinusoids.Params(num_heads=2, head_dim=3).instantiate()
    places = np.arange(1, 8, dtype=np.int32)
    q = tf.zeros([2, 7, 2, 3])
    with pytest.raises(ValueError, match="positions must be 0, 1, 2"):
        layer.bias(layer.init(seed=0), q, places, places, StepContext(), scale=1.0)


def test_the_convolution_module_is_its_formula() -> None:
    layer = ConvolutionModule.Params(dim=6, kernel_size=4).instantiate()
    theta = randomized(layer)
    mask = np.arange(7) < np.array([[7], [5]])

    def linear(name: str, x: np.ndarray) -> np.ndarray:
        found: np.ndarray = x @ theta[name].w.numpy() + theta[name].b.numpy()
        return found

    y = linear("value", X) / (1 + np.exp(-linear("gate", X))) * mask[:, :, None]
    padded = np.pad(y, ((0, 0), (1, 2), (0, 0)))
    kernel = theta.depthwise.w.numpy()[:, 0, :, 0]
    y = np.stack([(padded[:, t : t + 4] * kernel).sum(1) for t in range(7)], 1)
    y += theta.depthwise.b.numpy()
    norm = theta.norm
    y = (y - norm.moving_mean) / np.sqrt(norm.moving_variance + 1e-3) * norm.scale + norm.bias
    expected = linear("output", y / (1 + np.exp(-y)))
    found = layer.fprop(theta, tf.constant(X), StepContext(), mask=tf.constant(mask))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_padding_has_no_effect_on_an_utterance(mode: Any) -> None:
    block = ConformerBlock.Params(
        num_heads=2, convolution=ConvolutionModule.Params(kernel_size=5, norm=LayerNorm.Params())
    )
    layer = Conformer.Params(input_dim=8, dim=6, num_layers=2, block=block).instantiate()
    theta = layer.init(seed=3)
    x = RNG.normal(size=(2, 30, 8)).astype(np.float32)
    lengths = tf.constant([30, 17])
    ctx = StepContext(mode=mode, num_examples=2)
    noisy = x.copy()
    noisy[1, 17:] = 9.0
    whole, other = (
        layer.fprop(theta, FrameSequence(tf.constant(v), lengths), ctx) for v in (x, noisy)
    )
    alone = layer.fprop(theta, FrameSequence(tf.constant(x[1:, :17]), lengths[1:]), ctx)
    assert whole.lengths.numpy().tolist() == [8, 5] and whole.features.shape == (2, 8, 6)
    np.testing.assert_array_equal(whole.features, other.features)
    np.testing.assert_allclose(whole.features[1, :5], alone.features[0], atol=2e-5)
    assert not np.any(whole.features[1, 5:])


COUNTS: dict[Size, int] = {"S": 8_713_152, "M": 27_331_584, "L": 115_120_128}


@pytest.mark.parametrize("size", COUNTS)
def test_the_encoders_have_their_counts(size: Size) -> None:
    encoder = conformer(size).set(input_dim=80).instantiate()
    specs = encoder.specs().values()
    assert sum(math.prod(spec.shape) for spec in specs if spec.trainable) == COUNTS[size]
    tree = registry.get(f"asr.librispeech.Conformer{size}")().tree()
    total = model_record("", task_of(tree))["total_weights"]
    width, blocks = {"S": (144, 16), "M": (256, 16), "L": (512, 17)}[size]
    statistics, output = 2 * width * blocks, (width + 1) * 1025
    assert total in (COUNTS[size] + output, COUNTS[size] + output + statistics)


def test_the_first_convolutions_have_filters_of_their_own() -> None:
    params = conformer("S").set(input_dim=40, num_layers=1, num_filters=8)
    specs = params.instantiate().specs()
    assert specs["subsampling/second/w"].shape[-2:] == (8, 8)
    assert specs["subsampling/projection/w"].shape == (10 * 8, 144)


def bias_gradient(encoder: Any, x: np.ndarray) -> float:
    """Returns the norm of the gradient of the bias before the first block, or the first LSTM."""
    layer = encoder.instantiate()
    theta = layer.init(seed=1)
    ctx = StepContext(mode="train", num_examples=2)
    bias = theta.subsampling.projection.b
    with tf.GradientTape() as tape:
        tape.watch(bias)
        y = layer.fprop(theta, FrameSequence(tf.constant(x), tf.constant([40, 40])), ctx).features
        loss = tf.reduce_sum(y * np.random.default_rng(2).normal(size=y.shape).astype(np.float32))
    return float(tf.norm(tape.gradient(loss, bias)))


@pytest.mark.parametrize(
    "encoder",
    [
        conformer("S", dropout_rate=0.0).set(input_dim=80, num_layers=1),
        Conformer.Params(input_dim=80, dim=32, num_layers=2, num_filters=4),
        RecurrentEncoder.Params(
            input_dim=80, num_filters=4, dim=32, stack=RecurrentStack.Params(
                num_layers=1, direction="bidirectional", cell=LstmCell.Params(hidden_dim=16)
            ),
        ),
    ],
    ids=["S", "narrow", "lstm"],
)  # fmt: skip
def test_masked_spans_do_not_multiply_the_gradient(encoder: Any) -> None:
    x = np.random.default_rng(0).normal(size=(2, 40, 80)).astype(np.float32)
    ordinary = bias_gradient(encoder, x)
    x[:, 12:28] = 0.0  # as SpecAugment does
    assert bias_gradient(encoder, x) < 3 * ordinary


def test_with_a_bias_of_zero_masked_spans_multiply_the_gradient() -> None:
    encoder = Conformer.Params(input_dim=80, dim=32, num_layers=2, num_filters=4)
    x = np.random.default_rng(0).normal(size=(2, 40, 80)).astype(np.float32)
    x[:, 12:28] = 0.0
    before = bias_gradient(encoder.copy().set(bias_init=Zeros.Params()), x)
    assert before > 100 * bias_gradient(encoder, x)
