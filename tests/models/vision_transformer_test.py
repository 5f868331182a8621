"""Vision Transformers: published numbers of weights, patches, and refused sizes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.models.layers.patch_embedding import ClassToken, PatchEmbedding
from tekso.models.vision_transformer import SIZES, vit


@pytest.mark.parametrize(
    ("size", "count"),
    [("Ti", 5_717_416), ("S", 22_050_664), ("B", 86_567_656), ("L", 304_326_632)],
)
def test_published_networks_have_their_number_of_weights(size: str, count: int) -> None:
    specs = vit(size, classes=1000).instantiate().specs().values()
    assert sum(math.prod(spec.shape) for spec in specs) == count
    dim, layers, _ = SIZES[size]
    layer = 12 * dim**2 + 13 * dim  # Megatron's formula
    ends = (16 * 16 * 3 + 1 + 1 + 197 + 2 + 1000) * dim + 1000
    assert count == layers * layer + ends


def test_mean_pooling_has_no_class_token() -> None:
    shapes = {
        pooling: {
            path: spec.shape
            for path, spec in vit("Ti", classes=3, image_size=32, patch_size=8, pooling=pooling)
            .instantiate()
            .specs()
            .items()
        }
        for pooling in ("class_token", "mean")
    }
    token, mean = shapes["class_token"], shapes["mean"]
    assert set(token) - set(mean) == {"class_token/w"}
    assert token["positions/w"] == (17, 192) and mean["positions/w"] == (16, 192)


def test_patches_are_rows_of_a_product() -> None:
    x = np.random.default_rng(0).normal(size=(2, 6, 4, 3)).astype(np.float32)
    layer = PatchEmbedding.Params(input_dim=3, dim=5, patch_size=2).instantiate()
    theta = layer.init(0)
    rows = x.reshape(2, 3, 2, 2, 2, 3).transpose(0, 1, 3, 2, 4, 5).reshape(2, 6, 12)
    wanted = rows @ theta.projection.w.numpy().reshape(12, 5)
    y = layer.fprop(theta, tf.constant(x), StepContext())
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="2 x 2 do not divide an image of 5 x 4"):
        layer.fprop(theta, tf.constant(x[:, :5]), StepContext())
    token = ClassToken.Params(dim=5).instantiate()
    found = token.fprop(token.theta({"w": tf.range(5.0)}), y, StepContext()).numpy()
    np.testing.assert_array_equal(found[:, 1:], y)
    np.testing.assert_array_equal(found[:, 0], [[0, 1, 2, 3, 4]] * 2)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (lambda: vit("XL"), "size is 'XL'"),
        (
            lambda: vit("Ti", classes=2, image_size=30),
            "patch_size 16 does not divide image_size 30",
        ),
    ],
)
def test_what_cannot_be_built_is_refused(params: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        params().instantiate()


def test_images_of_another_size_are_refused() -> None:
    small = vit("Ti", classes=2, image_size=16, patch_size=8)
    model = small.set({"dim": 6, "stack.num_layers": 1}).instantiate()
    with pytest.raises(ValueError, match=r"\(1, 8, 16, 3\).*image_size is 16"):
        model.fprop(model.init(0), tf.ones([1, 8, 16, 3]), StepContext())
