"""Captioner: token by token as all at once, pieces, languages, and encoders without classifier."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.models.captioner import Captioner
from tekso.models.layers.attention import MultiHeadAttention
from tekso.models.layers.feed_forward import FeedForward
from tekso.models.layers.language_token import LanguageToken
from tekso.models.layers.positions import LearnedPositions
from tekso.models.layers.residual_blocks import BasicBlock
from tekso.models.layers.stack import Stack
from tekso.models.layers.transformer import TransformerLayer
from tekso.models.memory_decoder import decoder_layer
from tekso.models.resnet import SMALL_STEM, ResNet
from tekso.models.unet import UNet
from tekso.models.vision_transformer import vit

B, T, V, SIDE = 3, 5, 11, 8
LAYER = TransformerLayer.Params(
    attention=MultiHeadAttention.Params(num_heads=2), feed_forward=FeedForward.Params(hidden_dim=12)
)


def resnet() -> Any:
    return ResNet.Params(num_blocks=[1, 1], width=4, stem=SMALL_STEM, block=BasicBlock.Params())


def small_vit() -> Any:
    stack = Stack.Params(num_layers=1, layer=LAYER)
    return vit("Ti", image_size=SIDE, patch_size=4).set(dim=6, stack=stack)


def model(**changes: Any) -> Any:
    given: dict[str, Any] = {"encoder": resnet(), "dim": 8, "target_vocab_size": V}
    given |= {"decoder": Stack.Params(num_layers=2, layer=decoder_layer(LAYER))}
    return Captioner.Params(**{**given, **changes}).instantiate()


def batch(seed: int = 0) -> dict[str, tf.Tensor]:
    r = np.random.default_rng(seed)
    ids = r.integers(1, V, [B, T]).astype(np.int32)
    return {
        "x": tf.constant(r.normal(size=[B, SIDE, SIDE, 3]), tf.float32),
        "target_ids": tf.constant(ids),
        "target_labels": tf.constant(r.integers(1, V, [B, T]), tf.int32),
        "target_segment_ids": tf.ones([B, T], tf.int32),
        "language_ids": tf.constant([0, 1, 2]),
    }


@pytest.mark.parametrize(
    ("changes", "length"),
    [
        ({}, 16),
        ({"encoder": small_vit(), "num_languages": 3}, 6),
        ({"memory_positions": LearnedPositions.Params(max_length=16)}, 16),
    ],
)
def test_token_by_token_is_as_all_at_once(changes: Any, length: int) -> None:
    captioner, ctx, data = model(**changes), StepContext(mode="decode"), batch()
    theta = captioner.init(seed=1)
    memory = captioner.encode(theta, data, ctx)
    assert memory.shape == [B, length, 8]
    state = captioner.start_decoding(theta, {"memory": memory}, T, ctx)
    steps = []
    for t in range(T):
        step = captioner.decode_step(theta, data["target_ids"][:, t], state, t, ctx)
        steps.append(step.logits)
        state = step.state
        np.testing.assert_allclose(tf.reduce_sum(step.attention, 1), np.ones(B), rtol=1e-5)
    logits = captioner.logits(theta, data, ctx)
    np.testing.assert_allclose(tf.stack(steps, 1), logits, rtol=1e-4, atol=1e-5)
    log_p = tf.nn.log_softmax(logits).numpy()
    labels = data["target_labels"].numpy()
    want = -np.take_along_axis(log_p, labels[..., None], 2)[..., 0]
    found = captioner.token_cross_entropy(theta, data, ctx)
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)
    flow: Any = dict(data)
    for piece in captioner.pieces():
        flow = piece.run(theta, flow, ctx)
    np.testing.assert_allclose(flow["cross_entropy"], found, rtol=1e-6)


def test_pieces_own_every_weight() -> None:
    captioner = model(num_languages=3, memory_positions=LearnedPositions.Params(max_length=16))
    paths = sorted(captioner.specs())
    owned = {path for piece in captioner.pieces() for path in piece.weights(paths)}
    assert owned == set(paths)
    assert not [path for path in paths if "classifier" in path]


def test_the_language_changes_the_caption_and_the_other_images_do_not() -> None:
    captioner, ctx, data = model(num_languages=3), StepContext(), batch()
    theta = captioner.init(seed=1)
    first = captioner.logits(theta, data, ctx).numpy()
    other = captioner.logits(theta, {**data, "language_ids": tf.constant([0, 2, 2])}, ctx).numpy()
    np.testing.assert_allclose(first[[0, 2]], other[[0, 2]], rtol=1e-5)
    assert np.abs(first[1] - other[1]).max() > 1e-3


def test_the_language_token_is_the_row_of_its_language() -> None:
    layer = LanguageToken.Params(dim=2, num_languages=3).instantiate()
    theta, x = layer.init(seed=1), tf.ones([2, 1, 2])
    y = layer.fprop(theta, x, StepContext(), language_ids=tf.constant([2, 0])).numpy()
    np.testing.assert_array_equal(y[:, 0], theta.w.numpy()[[2, 0]])
    np.testing.assert_array_equal(y[:, 1], np.ones([2, 2]))


@pytest.mark.parametrize(("params", "dim"), [(resnet(), 8), (small_vit(), 6)])
def test_features_are_what_the_classifier_would_read(params: Any, dim: int) -> None:
    whole = params.copy().set(classes=3).instantiate()
    encoder = params.copy().set(classes=None).instantiate()
    theta, ctx, x = whole.init(seed=1), StepContext(), batch()["x"]
    theta["classifier"]["w"] = tf.random.stateless_normal([dim, 3], [1, 2])
    features = encoder.fprop(theta, x, ctx).numpy()
    assert encoder.feature_dim == features.shape[-1] == dim
    pooled = features[:, 0] if features.ndim == 3 else features.mean(axis=(1, 2))
    want = pooled @ theta.classifier.w.numpy() + theta.classifier.b.numpy()
    np.testing.assert_allclose(whole.fprop(theta, x, ctx), want, rtol=1e-4, atol=1e-5)
    assert set(encoder.specs()) == {p for p in whole.specs() if not p.startswith("classifier")}


def test_a_model_without_features_needs_classes() -> None:
    with pytest.raises(ValueError, match="UNet: classes is None, but this model needs a number"):
        UNet.Params(classes=None).instantiate()


def test_a_decoder_must_attend_to_the_image() -> None:
    causal = LAYER.copy()
    causal.attention.mask = "causal"
    with pytest.raises(ValueError, match="Captioner: no layer of the decoder attends"):
        model(decoder=Stack.Params(num_layers=1, layer=causal))
