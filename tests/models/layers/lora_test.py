"""Adapters: the formula, equal first outputs, which matrices have one, and the merged matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.initializers import Normal, Zeros
from tekso.framework.learner import Learner
from tekso.framework.optimizers.adam import AdamW
from tekso.framework.schedules import Constant
from tekso.models.layers.attention import MultiHeadAttention
from tekso.models.layers.feed_forward import GatedFeedForward
from tekso.models.layers.linear import Linear
from tekso.models.layers.lora import Lora
from tekso.models.layers.recurrent_cells import GruCell, LstmCell
from tekso.models.layers.source_attention import AdditiveAttention
from tekso.models.layers.stack import RepeatedStack
from tekso.models.layers.transformer import TransformerLayer
from tekso.models.mlp import Mlp

X = np.random.default_rng(0).normal(size=(2, 3, 6)).astype(np.float32)
LAYERS: dict[str, Any] = {
    "linear": Linear.Params(input_dim=6, output_dim=5),
    "attention": MultiHeadAttention.Params(input_dim=6, num_heads=2, num_kv_heads=1),
    "gated": GatedFeedForward.Params(input_dim=6, hidden_dim=4),
    "repeated": RepeatedStack.Params(
        num_layers=2,
        layer=TransformerLayer.Params(dim=6, attention=MultiHeadAttention.Params(num_heads=3)).set(
            {"feed_forward.hidden_dim": 4}
        ),
    ),
}


def of(layer: Any, theta: Any, mode: Any = "eval") -> np.ndarray:
    return layer.fprop(theta, tf.constant(X), StepContext(mode=mode, seed=1, step=2)).numpy()


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_with_adapters_starts_with_the_outputs_of_the_layer_without(name: str) -> None:
    plain = LAYERS[name].instantiate()
    adapted = (
        LAYERS[name].copy().set({"adapter" if name != "repeated" else "*.adapter": Lora.Params()})
    )
    adapted = adapted.instantiate()
    base = plain.init(seed=3)
    theta = adapted.init(seed=3)
    np.testing.assert_array_equal(of(adapted, theta), of(plain, base))
    kept = {path: spec for path, spec in adapted.specs().items() if "_lora_" not in path}
    assert list(kept) == list(plain.specs())


def test_the_update_of_a_matrix_is_alpha_by_rank_times_the_two_factors() -> None:
    rng = np.random.default_rng(1)
    w, a, b = rng.normal(size=(6, 5)), rng.normal(size=(6, 3)), rng.normal(size=(3, 5))
    params = Linear.Params(input_dim=6, output_dim=5, dtype="float64")
    layer = params.set(adapter=Lora.Params(rank=3, alpha=12.0)).instantiate()
    theta = layer.theta({"w": w, "b": np.ones(5), "w_lora_a": a, "w_lora_b": b})
    y = layer.fprop(theta, tf.constant(X, tf.float64), StepContext())
    np.testing.assert_allclose(y, X @ w + 1 + 12 / 3 * (X @ a) @ b, rtol=1e-12)


def test_factors_have_the_dims_of_their_matrix() -> None:
    params = MultiHeadAttention.Params(input_dim=6, num_heads=2, adapter=Lora.Params(rank=5))
    specs = params.instantiate().specs()
    for name, shape, dims in [
        ("q_lora_a", (6, 5), ("embed", "rank")),
        ("q_lora_b", (5, 2, 3), ("rank", "heads", "head_dim")),
        ("out_lora_a", (2, 3, 5), ("heads", "head_dim", "rank")),
        ("out_lora_b", (5, 6), ("rank", "embed")),
    ]:
        assert (specs[name].shape, specs[name].dims) == (shape, dims)
    assert specs["out_lora_a"].fans.fan_in == 6
    assert isinstance(specs["q_lora_b"].init, Zeros)


@pytest.mark.parametrize("name", LAYERS)
def test_merged_matrices_give_the_outputs_of_the_adapted_layer(name: str) -> None:
    lora = Lora.Params(rank=2, alpha=3.0)
    path = "adapter" if name != "repeated" else "*.adapter"
    adapted = LAYERS[name].copy().set({path: lora}).instantiate()
    plain = LAYERS[name].instantiate()
    rng = np.random.default_rng(4)
    values = {p: rng.normal(size=s.shape).astype("float32") for p, s in adapted.specs().items()}
    merged = {p: v for p, v in values.items() if "_lora_" not in p}
    for layer in adapted.walk():
        head = f"{layer.path}/" if layer.path else ""
        for matrix, one in layer.adapted() if hasattr(layer, "adapted") else ():
            w = f"{head}{matrix}"
            stacked = adapted.specs()[w].stacked
            factors = values[f"{w}_lora_a"], values[f"{w}_lora_b"]
            merged[w] = one.merged(merged[w], *factors, stacked=stacked)
            assert merged[w].dtype == np.float32
    theta, base = (
        layer.theta({p: tf.constant(v) for p, v in given.items()})
        for layer, given in ((adapted, values), (plain, merged))
    )
    want = of(adapted, theta)
    assert (
        np.max(np.abs(want - of(plain, plain.theta({p: tf.constant(values[p]) for p in merged}))))
        > 0.1
    )
    np.testing.assert_allclose(of(plain, base), want, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("params", "names"),
    [
        (
            LstmCell.Params(hidden_dim=4, projection_dim=3),
            ["w_input", "w_recurrent", "w_projection"],
        ),
        (GruCell.Params(hidden_dim=4), ["w_input", "w_recurrent", "w_candidate"]),
        (AdditiveAttention.Params(query_dim=4, memory_dim=3), ["w_query", "w_key"]),
        (Mlp.Params(output_dim=2, hidden_dims=[3]), ["layers/0/w", "layers/1/w"]),
    ],
)
def test_recurrent_cells_attention_to_a_source_and_mlps_have_adapters(
    params: Any, names: list[str]
) -> None:
    sizes = {"input_dim": 6} if "input_dim" in params else {}
    specs = params.copy().set({**sizes, "adapter": Lora.Params()}).instantiate().specs()
    factors = [f"{name}_lora_{part}" for name in names for part in "ab"]
    assert sorted(path for path in specs if "_lora_" in path) == sorted(factors)


def test_only_the_named_matrices_are_adapted() -> None:
    params = MultiHeadAttention.Params(input_dim=6, num_heads=2)
    layer = params.copy().set(adapter=Lora.Params(only=["q", "v"])).instantiate()
    assert [name for name, _ in layer.adapted()] == ["q", "v"]
    with pytest.raises(ValueError, match=r"adapter.only names 'w', .* are q, k, v, out"):
        params.set(adapter=Lora.Params(only=["w"])).instantiate().specs()


def test_dropout_is_of_the_update_alone() -> None:
    lora = Lora.Params(dropout_rate=0.5)
    layer = Linear.Params(input_dim=6, output_dim=5, adapter=lora).instantiate()
    theta = layer.init(seed=0)
    np.testing.assert_array_equal(of(layer, theta, "train"), of(layer, theta))  # lora_b is 0
    theta = layer.theta({**theta, "w_lora_b": tf.ones([8, 5])})
    assert np.max(np.abs(of(layer, theta, "train") - of(layer, theta))) > 0.1


@pytest.mark.parametrize("wrong", [{"rank": 0}, {"alpha": 0.0}, {"dropout_rate": 1.0}])
def test_values_out_of_range_are_reported(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"adapter: .*{next(iter(wrong))} "):
        Linear.Params(input_dim=6, output_dim=5, adapter=Lora.Params(**wrong)).instantiate()


def test_slots_exist_for_adapters_alone_and_patterns_of_frozen_weights_match() -> None:
    layer = Linear.Params(input_dim=6, output_dim=5, adapter=Lora.Params(rank=2)).instantiate()
    learner = Learner.Params(
        optimizer=AdamW.Params(weight_decay=0.1, weight_decay_exclude=["b"]),
        schedule=Constant.Params(value=0.1),
        frozen=["(?!.*_lora_[ab]$).*"],
    ).instantiate()
    slots = {path for path in learner.slots(layer.specs()) if "/" in path}
    slots -= {"updates/applied", "nonfinite/total", "nonfinite/consecutive"}
    assert {path.rpartition("/")[0] for path in slots} == {"w_lora_a", "w_lora_b"}


def test_the_initial_values_of_other_weights_do_not_depend_on_adapters() -> None:
    params = Linear.Params(input_dim=6, output_dim=5, init=Normal.Params())
    theta = params.copy().set(adapter=Lora.Params()).instantiate().init(seed=5)
    np.testing.assert_array_equal(theta.w, params.instantiate().init(seed=5).w)
    assert np.std(theta.w_lora_a.numpy()) == pytest.approx(6**-0.5, rel=0.3)
