"""Adapters of tables, convolutions and experts: formulas, equal first outputs, merged weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.theta import flatten
from tekso.models.adapters import merged_weights, without_adapters
from tekso.models.layers.conv_norm import ConvNorm
from tekso.models.layers.convolution import Conv2D, SeparableConv2D
from tekso.models.layers.convolution_1d import Conv1D
from tekso.models.layers.convolution_transpose import ConvTranspose2D
from tekso.models.layers.embedding import Embedding
from tekso.models.layers.expert_routing import TopKRouter
from tekso.models.layers.lora import Lora
from tekso.models.layers.mixture_of_experts import ExpertLinear, MixtureOfExperts
from tekso.models.layers.patch_embedding import PatchEmbedding
from tekso.models.layers.softmax import SampledSoftmax, Softmax
from tekso.models.layers.stack import RepeatedStack
from tekso.models.layers.transformer import TransformerLayer
from tekso.models.speech_encoder import ConvSubsampling

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 3, 6)).astype(np.float32)
IMAGE = RNG.normal(size=(2, 6, 4, 3)).astype(np.float32)
IDS = np.array([[0, 6, 3], [3, 1, 5]], np.int32)
LORA = Lora.Params(rank=2, alpha=6.0)
KERNEL, TABLE, EXPERT = "*kernel_adapter", "*table_adapter", "*expert_adapter"


def of_image(layer: Any, theta: Any, ctx: StepContext) -> tf.Tensor:
    return layer.fprop(theta, tf.constant(IMAGE), ctx)


def of_sequence(layer: Any, theta: Any, ctx: StepContext) -> tf.Tensor:
    return layer.fprop(theta, tf.constant(X), ctx)


def scores(layer: Any, theta: Any, ctx: StepContext) -> tf.Tensor:
    return layer.logits(theta, tf.constant(X), ctx)[..., :7]


def nats(layer: Any, theta: Any, ctx: StepContext) -> tf.Tensor:
    ctx = StepContext(mode="train", seed=3, step=2, num_examples=2)
    return layer.cross_entropy(theta, tf.constant(X), tf.constant(IDS), ctx)


def tied(layer: Any, theta: Any, ctx: StepContext) -> tf.Tensor:
    x, theta = layer.fprop_shared(theta, tf.constant(IDS), ctx)
    return layer.cross_entropy(theta, x, tf.constant(IDS), ctx)


EMBEDDING = Embedding.Params(vocab_size=7, dim=6, vocab_multiple=4, scale="sqrt_dim")
SOFTMAX = Softmax.Params(vocab_size=7, input_dim=6, vocab_multiple=4, use_bias=True)
SIZES = {"input_dim": 3, "output_dim": 4}
EXPERTS = MixtureOfExperts.Params(
    input_dim=6, hidden_dim=4, num_experts=3, router=TopKRouter.Params(), experts="gated"
)
CASES: dict[str, tuple[Any, str, Any]] = {
    "rows": (EMBEDDING, TABLE, lambda layer, theta, ctx: layer.fprop(theta, IDS, ctx)),
    "tied": (EMBEDDING, TABLE, tied),
    "tied logits": (EMBEDDING, TABLE, scores),
    "softmax": (SOFTMAX, TABLE, nats),
    "logits": (SOFTMAX, TABLE, scores),
    "sampled": (
        SampledSoftmax.Params(vocab_size=7, input_dim=6, use_bias=True, num_samples=5),
        TABLE,
        nats,
    ),
    "conv": (Conv2D.Params(**SIZES, strides=(2, 1), activation="relu"), KERNEL, of_image),
    "dilated": (Conv2D.Params(**SIZES, dilations=(1, 2), padding="FIXED"), KERNEL, of_image),
    "conv1d": (
        Conv1D.Params(input_dim=6, output_dim=4, padding="CAUSAL", dilation=2),
        KERNEL,
        of_sequence,
    ),
    "blocks": (ConvTranspose2D.Params(**SIZES), KERNEL, of_image),
    "transposed": (ConvTranspose2D.Params(**SIZES, kernel_shape=(4, 3)), KERNEL, of_image),
    "separable": (SeparableConv2D.Params(**SIZES, multiplier=2), KERNEL, of_image),
    "normalised": (ConvNorm.Params(**SIZES), KERNEL, of_image),
    "patches": (PatchEmbedding.Params(input_dim=3, dim=5, patch_size=2), KERNEL, of_image),
    "experts": (EXPERTS, EXPERT, of_sequence),
    "repeated": (
        RepeatedStack.Params(
            num_layers=2,
            layer=TransformerLayer.Params(dim=6, feed_forward=EXPERTS).set(
                {"attention.num_heads": 3}
            ),
        ),
        EXPERT,
        of_sequence,
    ),
}


def pair(name: str, lora: Any = LORA) -> tuple[Any, Any, Any]:
    """Returns the layer without and with adapters, and the function that computes it."""
    plain, field, compute = CASES[name]
    adapted = plain.copy().set({field: lora})
    assert without_adapters(adapted).to_text() == plain.to_text()
    return plain.copy().instantiate(), adapted.instantiate(), compute


@pytest.mark.parametrize("name", CASES)
def test_a_layer_starts_with_the_outputs_of_the_layer_without(name: str) -> None:
    plain, adapted, compute = pair(name)
    base, theta = plain.init(seed=3), adapted.init(seed=3)
    kept = [path for path in adapted.specs() if "_lora_" not in path]
    assert kept == list(plain.specs()) and len(adapted.specs()) > len(kept)
    found, want = compute(adapted, theta, StepContext()), compute(plain, base, StepContext())
    if compute in (nats, tied):  # x has more columns, so its products are added in another order
        np.testing.assert_allclose(found, want, rtol=1e-6)
    else:
        np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("name", CASES)
def test_merged_weights_give_the_outputs_of_the_adapted_layer(name: str) -> None:
    plain, adapted, compute = pair(name)
    values = {
        path: RNG.normal(0, 0.7, spec.shape).astype("float32")
        for path, spec in adapted.specs().items()
        if "moving" not in path
    }
    values |= {p: s.initial_value(0) for p, s in adapted.specs().items() if p not in values}
    merged = merged_weights(adapted, values)
    assert merged.keys() == plain.specs().keys()
    ctx = StepContext()
    theta = adapted.theta({path: tf.constant(value) for path, value in values.items()})
    found = compute(adapted, theta, ctx)
    base = plain.theta({path: tf.constant(value) for path, value in merged.items()})
    np.testing.assert_allclose(found, compute(plain, base, ctx), rtol=1e-3, atol=1e-4)
    without = plain.theta({path: tf.constant(values[path]) for path in merged})
    assert np.max(np.abs(found - compute(plain, without, ctx))) > 0.1


def test_the_update_of_a_table_is_the_product_of_the_rows_and_lora_b() -> None:
    layer = Embedding.Params(vocab_size=7, dim=6, table_adapter=LORA).instantiate()
    theta = layer.init(seed=1)
    theta = layer.theta({**theta, "table_lora_b": tf.constant(X[0, :2])})
    table, a, b = (theta[f"table{end}"].numpy() for end in ("", "_lora_a", "_lora_b"))
    found = layer.fprop(theta, tf.constant(IDS), StepContext())
    np.testing.assert_allclose(found, table[IDS] + 3.0 * a[IDS] @ b, rtol=1e-5)
    whole = table + 3.0 * a @ b
    found = layer.logits(theta, tf.constant(X), StepContext())
    np.testing.assert_allclose(found, X @ whole.T, rtol=1e-4, atol=1e-5)
    y = X @ whole.T
    true = np.take_along_axis(y, IDS[..., None], -1)[..., 0]
    want = np.log(np.exp(y).sum(-1)) - true
    found = layer.cross_entropy(theta, tf.constant(X), tf.constant(IDS), StepContext())
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)
    assert np.std(a) == pytest.approx(2**-0.5, rel=0.4)  # its fan-in is the rank


def test_the_update_of_a_kernel_is_a_convolution_and_a_product() -> None:
    layer = Conv2D.Params(**SIZES, padding="VALID", kernel_adapter=LORA).instantiate()
    rng = np.random.default_rng(2)
    values = {p: rng.normal(size=s.shape).astype("float32") for p, s in layer.specs().items()}
    theta = layer.theta({path: tf.constant(value) for path, value in values.items()})
    whole = values["w"] + 3.0 * np.einsum("hwir,ro->hwio", values["w_lora_a"], values["w_lora_b"])
    windows = np.lib.stride_tricks.sliding_window_view(IMAGE, (3, 3), (1, 2))
    want = np.einsum("bxyihw,hwio->bxyo", windows, whole) + values["b"]
    np.testing.assert_allclose(of_image(layer, theta, StepContext()), want, rtol=1e-3, atol=1e-3)


def test_every_expert_has_an_update_of_its_own() -> None:
    layer = ExpertLinear.Params(
        num_experts=2, input_dim=6, output_dim=5, use_bias=False, expert_adapter=LORA
    ).instantiate()
    specs = layer.specs()
    assert specs["w_lora_a"].dims == ("experts", "embed", "rank")
    assert specs["w_lora_b"].dims == ("experts", "rank", "mlp")
    rng = np.random.default_rng(2)
    w, a, b = (rng.normal(size=spec.shape).astype("float32") for spec in specs.values())
    x = rng.normal(size=(2, 3, 4, 6)).astype("float32")
    theta = layer.theta({"w": w, "w_lora_a": a, "w_lora_b": b})
    want = np.stack([x[e] @ (w[e] + 3.0 * a[e] @ b[e]) for e in range(2)])
    found = layer.fprop(theta, tf.constant(x), StepContext())
    np.testing.assert_allclose(found, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["logits", "conv", "experts"])
def test_dropout_is_of_the_update_alone(name: str) -> None:
    _, adapted, compute = pair(name, LORA.copy().set(dropout_rate=0.5))
    train = StepContext(mode="train", seed=1, step=2, num_examples=2)
    flat = flatten(adapted.init(seed=0))
    zero = compute(adapted, adapted.theta(flat), train)
    ones = {p: tf.ones_like(t) if p.endswith("_lora_b") else t for p, t in flat.items()}
    np.testing.assert_array_equal(zero, compute(adapted, adapted.theta(flat), StepContext()))
    some = compute(adapted, adapted.theta(ones), train)
    assert np.max(np.abs(some - compute(adapted, adapted.theta(ones), StepContext()))) > 0.01


def test_convolutions_of_speech_have_adapters_and_grouped_ones_are_refused() -> None:
    params = ConvSubsampling.Params(input_dim=8, output_dim=4, kernel_adapter=LORA)
    adapted = [path for path in params.instantiate().specs() if "_lora_" in path]
    assert adapted == [f"{n}/w_lora_{f}" for n in ("first", "second") for f in "ab"]
    grouped = ConvNorm.Params(input_dim=4, output_dim=4, num_groups=2, kernel_adapter=LORA)
    with pytest.raises(ValueError, match=r"kernel_adapter is set, but .* has 2 groups"):
        grouped.instantiate()
    wrong = Embedding.Params(vocab_size=7, dim=6, table_adapter=Lora.Params(only=["w"]))
    with pytest.raises(ValueError, match=r"table_adapter\.only names 'w', but .* are table"):
        wrong.instantiate().specs()
