"""Drop path, squeeze-and-excite and residual blocks against their formulas in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.theta import Theta
from tekso.models.layers.conv_norm import ConvNorm
from tekso.models.layers.drop_path import DropPath, linear_rates
from tekso.models.layers.normalization import BatchNorm, LayerNorm
from tekso.models.layers.residual_blocks import BasicBlock, BottleneckBlock
from tekso.models.layers.squeeze_excite import SqueezeExcite

X = np.random.default_rng(0).normal(size=(2, 5, 4, 6)).astype(np.float32)


def run(params: Any, theta: Any = None, x: np.ndarray = X, **ctx: Any) -> np.ndarray:
    layer = params.instantiate()
    theta = layer.init(0) if theta is None else theta
    return layer.fprop(theta, tf.constant(x), StepContext(**ctx)).numpy()


def test_drop_path_drops_whole_examples_by_their_global_position() -> None:
    x = np.ones((400, 2, 3), np.float32)
    params = DropPath.Params(rate=0.25)
    y = run(params, x=x, mode="train", seed=1, step=3)
    assert np.all(y == y[:, :1, :1])
    np.testing.assert_allclose(np.unique(y), [0, 1 / 0.75], rtol=1e-6)
    assert 0.18 < np.mean(y == 0) < 0.32
    second = run(params, x=x[300:], mode="train", seed=1, step=3, example_offset=300)
    np.testing.assert_array_equal(second, y[300:])
    assert not np.array_equal(run(params, x=x, mode="train", seed=1, step=4), y)
    np.testing.assert_array_equal(run(params, x=x), x)
    with pytest.raises(ValueError, match=r"rate 1\.0"):
        DropPath.Params(rate=1.0).instantiate()
    assert linear_rates(0.2, 5) == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])
    assert linear_rates(0.2, 1) == [0]


def test_squeeze_excite_scales_channels_by_a_gate_of_their_means() -> None:
    layer = SqueezeExcite.Params(dim=6, reduction=2).instantiate()
    assert {path: spec.shape for path, spec in layer.specs().items()} == {
        "reduce/w": (6, 3),
        "reduce/b": (3,),
        "expand/w": (3, 6),
        "expand/b": (6,),
    }
    rng = np.random.default_rng(1)
    w = {p: rng.normal(size=s.shape).astype("f4") for p, s in layer.specs().items()}
    hidden = np.maximum(X.mean((1, 2)) @ w["reduce/w"] + w["reduce/b"], 0)
    gate = 1 / (1 + np.exp(-(hidden @ w["expand/w"] + w["expand/b"])))
    theta = layer.theta({path: tf.constant(value) for path, value in w.items()})
    y = layer.fprop(theta, tf.constant(X), StepContext())
    np.testing.assert_allclose(y, X * gate[:, None, None], rtol=1e-5)


def test_a_block_starts_as_its_shortcut() -> None:
    for kind, channels in ((BasicBlock, 6), (BottleneckBlock, 24)):
        x = np.resize(X, (2, 5, 4, channels))
        params = kind.Params(input_dim=channels, width=6)
        np.testing.assert_array_equal(run(params, x=x, mode="train"), np.maximum(x, 0))
    params = BottleneckBlock.Params(input_dim=6, width=2, stride=2)
    shortcut = ConvNorm.Params(
        input_dim=6, output_dim=8, kernel_shape=(1, 1), strides=(2, 2), norm=params.norm
    )
    theta = params.instantiate().init(0)
    wanted = run(shortcut, theta.shortcut, mode="train")
    assert wanted.shape == (2, 3, 2, 8)
    np.testing.assert_array_equal(run(params, theta, mode="train"), np.maximum(wanted, 0))


@pytest.mark.parametrize(
    ("kind", "shapes"),
    [
        (BasicBlock, [(3, 3, 6, 8), (3, 3, 8, 8)]),
        (BottleneckBlock, [(1, 1, 6, 8), (3, 3, 4, 8), (1, 1, 8, 32)]),
    ],
)
def test_convolutions_and_strides_of_a_block(kind: Any, shapes: list[Any]) -> None:
    params = kind.Params(input_dim=6, width=8, stride=2, norm=BatchNorm.Params())
    if kind is BottleneckBlock:
        params.num_groups = 2
    block = params.instantiate()
    specs = block.specs()
    assert [specs[f"convs/{i}/conv/w"].shape for i in range(len(shapes))] == shapes
    strided = [i for i, conv in enumerate(block.convs) if conv.params.strides == (2, 2)]
    assert strided == [0 if kind is BasicBlock else 1]
    activations = [conv.params.activation for conv in block.convs]
    assert activations == ["relu"] * (len(shapes) - 1) + ["identity"]
    scales = [block.init(0).convs[str(i)].norm.scale[0].numpy() for i in range(len(shapes))]
    assert scales == [1] * (len(shapes) - 1) + [0]


def test_other_normalisations_keep_their_first_scale() -> None:
    params = BasicBlock.Params(input_dim=6, width=6, norm=LayerNorm.Params(dims=("channels",)))
    assert params.instantiate().init(0).convs["1"].norm.scale[0].numpy() == 1


def test_conv_norm_is_a_convolution_without_bias_then_norm_then_activation() -> None:
    params = ConvNorm.Params(
        input_dim=6, output_dim=3, kernel_shape=(1, 1), activation="relu", dtype="float64"
    )
    layer = params.instantiate()
    assert sorted(layer.specs()) == ["conv/w"] + [
        f"norm/{name}" for name in ("bias", "moving_mean", "moving_variance", "scale")
    ]
    assert {spec.dtype for spec in layer.specs().values()} == {"float64"}
    theta = layer.init(0)
    y = X.astype("f8") @ theta.conv.w[0, 0].numpy()
    normal = (y - y.mean((0, 1, 2))) / np.sqrt(y.var((0, 1, 2)) + 1e-3)
    found = layer.fprop(theta, tf.constant(X), StepContext(mode="train"))
    np.testing.assert_allclose(found, np.maximum(normal, 0), rtol=1e-9, atol=1e-12)
    assert isinstance(theta.norm, Theta)
