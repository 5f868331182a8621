"""ContrastiveLoss against the formula, and over replicas; embeddings of DualEncoder."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework import schedules
from tekso.framework.context import StepContext
from tekso.framework.execution.replica_context import ReplicaContext
from tekso.framework.learner import Learner
from tekso.framework.learning_step import UpdateScalars, trained_weights
from tekso.framework.optimizers.sgd import SGD
from tekso.models.contrastive_loss import ContrastiveLoss, Embedded
from tekso.models.dual_encoder import DualEncoder, TextTower
from tekso.models.layers.attention import MultiHeadAttention
from tekso.models.layers.feed_forward import FeedForward
from tekso.models.layers.residual_blocks import BasicBlock
from tekso.models.layers.stack import Stack
from tekso.models.layers.transformer import TransformerLayer
from tekso.models.resnet import SMALL_STEM, ResNet

N, DIM = 6, 3


def pairs(seed: int = 0) -> Embedded:
    r = np.random.default_rng(seed)
    unit = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in r.normal(size=[2, N, DIM])]
    weights = np.array([1, 1, 0, 1, 2, 1], np.float64)
    return Embedded(*(tf.constant(x) for x in (*unit, weights)))


def formula(x: Embedded, scale: float) -> np.ndarray:
    """Returns the loss of every pair, by two softmaxes over the pairs that count."""
    images, texts, weights = (t.numpy() for t in x)
    losses = np.zeros(N)
    for i in np.flatnonzero(weights):
        for a, b in ((images, texts), (texts, images)):
            scores = np.array([scale * a[i] @ b[j] for j in np.flatnonzero(weights)])
            own = scale * a[i] @ b[i]
            losses[i] -= 0.5 * math.log(math.exp(own) / np.exp(scores).sum())
    return losses


def test_losses_are_those_of_the_formula_and_weight_0_is_no_contrast() -> None:
    layer, x = ContrastiveLoss.Params(temperature=0.2).instantiate(), pairs()
    nats, hits = layer.fprop(layer.init(seed=1), x, StepContext())
    counted = x.weights.numpy() > 0
    np.testing.assert_allclose(nats.numpy()[counted], formula(x, 5.0)[counted], rtol=1e-6)
    scores = (x.images.numpy() @ x.texts.numpy().T)[:, counted]
    closest = np.flatnonzero(counted)[scores.argmax(1)]
    np.testing.assert_array_equal(hits.numpy()[counted], (closest == np.arange(N))[counted])


def test_the_scale_is_learned_up_to_its_limit() -> None:
    layer, x = ContrastiveLoss.Params(temperature=0.5, most_scale=4.0).instantiate(), pairs()
    for log_scale, scale, is_learned in (
        *((math.log(3.0), 3.0, True), (math.log(4.0), 4.0, True)),
        (math.log(9.0), 4.0, False),
    ):
        theta = layer.init(seed=1)
        theta["log_scale"] = tf.constant([log_scale], tf.float64)
        with tf.GradientTape() as tape:
            tape.watch(theta["log_scale"])
            nats, _ = layer.fprop(theta, x, StepContext())
            total = tf.reduce_sum(nats * tf.cast(x.weights > 0, nats.dtype))
        assert float(total) == pytest.approx(formula(x, scale).sum(), rel=1e-6)
        assert (abs(float(tape.gradient(total, theta["log_scale"])[0])) > 1e-3) == is_learned


def test_an_update_limits_the_scale_so_that_it_can_fall_again() -> None:
    layer = ContrastiveLoss.Params(temperature=0.25, most_scale=4.0).instantiate()
    (spec,) = layer.specs().values()
    learner = Learner.Params(optimizer=SGD.Params(), schedule=schedules.Constant.Params(value=1.0))
    (weight,) = trained_weights(learner.instantiate().groups({spec.path: spec}))
    value = tf.constant([math.log(4.0)])
    scalars = UpdateScalars(
        tf.constant(True), {"": None}, {"": tf.constant(1.0)}, tf.constant(0, tf.int64)
    )
    for gradient, scale in ((-0.5, 4.0), (0.5, 4.0 * math.exp(-0.5))):
        value, _ = weight.updated(value, tf.constant([gradient]), {}, scalars)
        assert float(tf.exp(value)[0]) == pytest.approx(scale)
    theta, x = layer.init(seed=1), pairs()
    theta["log_scale"], _ = weight.updated(value, tf.constant([-9.0]), {}, scalars)
    with tf.GradientTape() as tape:
        tape.watch(theta["log_scale"])
        total = tf.reduce_sum(layer.fprop(theta, x, StepContext()).nats)
    assert abs(float(tape.gradient(total, theta["log_scale"])[0])) > 1e-3


def test_parts_on_replicas_have_the_losses_of_the_whole_batch() -> None:
    """The sum over replicas is emulated: first the parts are recorded, then their sums are used."""
    layer, x = ContrastiveLoss.Params().instantiate(), pairs()
    theta = layer.init(seed=1)
    whole = layer.fprop(theta, x, StepContext())
    parts = [slice(0, 2), slice(2, N)]
    recorded: list[list[tf.Tensor]] = []
    for part in parts:
        own: list[tf.Tensor] = []
        recorded.append(own)
        _run(layer, theta, x, part, lambda t, own=own: own.append(t) or t)
    sums = [a + b for a, b in zip(*recorded, strict=True)]
    for part in parts:
        given = iter(sums)
        nats, hits = _run(layer, theta, x, part, lambda _, given=given: next(given))
        np.testing.assert_allclose(nats, whole.nats[part], rtol=1e-12)
        np.testing.assert_array_equal(hits, whole.hits[part])


def _run(layer: Any, theta: Any, x: Embedded, part: slice, all_reduce: Any) -> Any:
    ctx = ReplicaContext(all_reduce=all_reduce, example_offset=part.start, num_examples=N)
    return layer.fprop(theta, Embedded(*(t[part] for t in x)), ctx)


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"most_scale": -1.0}])
def test_temperature_and_limit_are_positive(params: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        ContrastiveLoss.Params(**params).instantiate()


def test_embeddings_have_unit_length_and_padding_of_a_text_has_no_effect() -> None:
    layer = TransformerLayer.Params(
        attention=MultiHeadAttention.Params(num_heads=2),
        feed_forward=FeedForward.Params(hidden_dim=12),
    )
    model = DualEncoder.Params(
        dim=5,
        image=ResNet.Params(num_blocks=[1], width=4, stem=SMALL_STEM, block=BasicBlock.Params()),
        text=TextTower.Params(vocab_size=9, dim=8, stack=Stack.Params(num_layers=1, layer=layer)),
    ).instantiate()
    theta, ctx = model.init(seed=1), StepContext()
    r = np.random.default_rng(0)
    x = tf.constant(r.normal(size=[2, 6, 6, 3]), tf.float32)
    ids = tf.constant([[3, 4, 0, 0], [5, 6, 7, 8]])
    segments = tf.constant([[1, 1, 0, 0], [1, 1, 1, 1]])
    data = {"x": x, "ids": ids, "segment_ids": segments}
    images, texts = model.fprop(theta, data, ctx)
    for found in (images, texts):
        assert found.shape == [2, 5]
        np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1.0, rtol=1e-5)
    other = model.embed_texts(theta, tf.constant([[3, 4, 8, 1]]), segments[:1], ctx)
    np.testing.assert_allclose(other, texts[:1], rtol=1e-4, atol=1e-6)
    short = model.embed_texts(theta, ids[:1, :2], segments[:1, :2], ctx)
    np.testing.assert_allclose(short, texts[:1], rtol=1e-4, atol=1e-6)
