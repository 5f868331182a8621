"""Mixture of experts, against loops over elements in NumPy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.models.layers.attention import MultiHeadAttention
from tekso.models.layers.expert_routing import Router, SwitchRouter, TopKRouter
from tekso.models.layers.mixture_of_experts import MixtureOfExperts
from tekso.models.layers.rematerialize import Rematerialize
from tekso.models.layers.stack import RepeatedStack, Stack
from tekso.models.layers.transformer import TransformerLayer
from tekso.models.transformer_lm import TransformerLm

B, T, D, E, H = 3, 7, 5, 4, 6
PROGRAM = Path(__file__).with_name("mixture_of_experts_program.py")

ROUTERS = {
    "switch": SwitchRouter.Params(z_weight=0.001),
    "switch_tight": SwitchRouter.Params(capacity_factor=0.5, z_weight=0.1),
    "switch_jitter": SwitchRouter.Params(jitter=0.3),
    "top_2": TopKRouter.Params(z_weight=0.001),
    "top_2_tight": TopKRouter.Params(capacity_factor=0.4),
    "top_2_random": TopKRouter.Params(later_choices="random", capacity_factor=2.0),
    "top_3": TopKRouter.Params(num_choices=3, capacity_factor=0.6),
    "all": TopKRouter.Params(num_choices=E),
}


def layer_of(router: Router.Params, **fields: Any) -> MixtureOfExperts:
    fields = {"input_dim": D, "hidden_dim": H, "num_experts": E, **fields}
    return MixtureOfExperts.Params(router=router, **fields).instantiate()


def random_weights(layer: Any, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {path: rng.normal(size=spec.shape) for path, spec in layer.specs().items()}


def random_x(*shape: int) -> np.ndarray:
    return np.random.default_rng([1, *shape]).normal(size=shape)


def theta_of(layer: Any, weights: dict[str, np.ndarray]) -> Any:
    return layer.theta({path: tf.constant(w) for path, w in weights.items()})


def context(mode: Any = "train", **fields: Any) -> StepContext:
    return StepContext(mode=mode, seed=2, step=3, **{"num_examples": B, **fields})


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def expert(w: dict[str, np.ndarray], e: int, x: np.ndarray, gated: bool) -> np.ndarray:
    def linear(name: str, x: np.ndarray) -> np.ndarray:
        bias = w[f"{name}/b"][e] if f"{name}/b" in w else 0
        return x @ w[f"{name}/w"][e] + bias

    h = linear("hidden", x)
    h = np.maximum(linear("gate", x), 0) * h if gated else np.maximum(h, 0)
    return linear("output", h)


def by_loops(
    layer: MixtureOfExperts,
    w: dict[str, np.ndarray],
    x: np.ndarray,
    ctx: StepContext,
    is_token: np.ndarray | None = None,
) -> dict[str, Any]:
    """Output, losses and metrics, element by element in the order in which slots are given out."""
    p, r = layer.params, layer.router.params
    k, training = layer.router.num_choices, ctx.is_training
    factor = r.capacity_factor if training else r.eval_capacity_factor
    length = x.shape[1]
    capacity = length if factor is None else int(np.ceil(factor * k * length / E))
    capacity = min(max(capacity, 1), length)
    is_token = np.ones(x.shape[:2], bool) if is_token is None else is_token
    seen = x
    if training and r.jitter:
        uniform = np.float64(ctx.uniform(layer.router, x.shape, "jitter"))
        seen = x * (1 - r.jitter + 2 * r.jitter * uniform)
    logits = seen @ w["router/w"]
    probs = softmax(logits)
    is_random = training and isinstance(r, TopKRouter.Params) and r.later_choices == "random"
    draws = [
        np.float64(ctx.uniform(layer.router, x.shape[:2], f"choice_{i}")) if is_random else None
        for i in range(k)
    ]
    y = np.zeros_like(x)
    balance = z = dropped = chosen = imbalance = 0.0
    for b in range(len(x)):
        there = np.flatnonzero(is_token[b])
        used, load, first = np.zeros(E, int), np.zeros(E), np.zeros(E)
        for i in range(k):
            for t in there:
                best = np.argsort(-probs[b, t], kind="stable")[:k]
                e = best[i]
                weight = probs[b, t, e]
                if isinstance(layer.router, TopKRouter):
                    weight = weight / probs[b, t, best].sum()
                first[e] += i == 0
                if i > 0 and is_random and draws[i][b, t] >= k * weight:
                    continue
                load[e] += 1
                if used[e] == capacity:
                    dropped += 1
                    continue
                used[e] += 1
                y[b, t] += weight * expert(w, e, x[b, t], p.experts == "gated")
        if len(there):
            balance += E * np.sum(first / len(there) * probs[b, there].mean(0))
            z += np.mean(np.log(np.exp(logits[b, there]).sum(-1)) ** 2)
            imbalance += load.max() / load.mean()
        chosen += load.sum()
    return {
        "y": y,
        "experts/balance": r.balance_weight * balance / B,
        "experts/z": r.z_weight * z / B,
        "experts/dropped": (dropped, chosen),
        "experts/imbalance": (imbalance, is_token.any(-1).sum()),
    }


@pytest.mark.parametrize("experts", ["plain", "gated"])
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("router", ROUTERS)
def test_equals_loops_over_elements(router: str, padded: bool, mode: str, experts: str) -> None:
    layer = layer_of(ROUTERS[router], experts=experts, use_bias=experts == "plain")
    w, x = random_weights(layer), random_x(B, T, D)
    is_token = np.arange(T) < np.array([[T], [3], [0]]) if padded else None
    ctx = context(mode)

    y = layer.fprop(
        theta_of(layer, w),
        tf.constant(x),
        ctx,
        is_token=None if is_token is None else tf.constant(is_token),
    )

    want = by_loops(layer, w, x, ctx, is_token)
    np.testing.assert_allclose(y, want.pop("y"), rtol=1e-9, atol=1e-12)
    # What is collected is float32.
    found = {name: value for name, (value, _) in ctx.collected.sums["loss"].items()}
    for name in ("experts/balance", "experts/z"):
        expected = want.pop(name)
        expected = expected if mode == "train" else 0.0
        np.testing.assert_allclose(found.pop(name, 0.0), expected, rtol=1e-6)
    assert not found
    found = ctx.collected.sums["metric"]
    assert set(found) == set(want)
    for name, pair in want.items():
        np.testing.assert_allclose(found[name], pair, rtol=1e-6)


def test_examples_of_the_routers_overflow_where_they_are_tight() -> None:
    dropped = {}
    for name, router in ROUTERS.items():
        layer = layer_of(router)
        ctx = context()
        layer.fprop(theta_of(layer, random_weights(layer)), tf.constant(random_x(B, T, D)), ctx)
        dropped[name] = float(ctx.collected.sums["metric"]["experts/dropped"][0])
    assert min(dropped[name] for name in ("switch_tight", "top_2_tight", "top_3")) > 0
    assert dropped["all"] == 0  # an element goes to an expert once: length slots are enough


def test_element_without_a_slot_gets_zero_and_later_ones_do_not_matter_to_switch() -> None:
    layer = layer_of(SwitchRouter.Params(capacity_factor=0.5), use_bias=True)
    theta = theta_of(layer, random_weights(layer))
    x = np.repeat(random_x(1, 1, D), T, 1)  # all want one expert, which has ceil(0.5 * 7 / 4) = 1

    y = layer.fprop(theta, tf.constant(x), context(num_examples=1))

    assert np.abs(y[0, 0]).max() > 0.1
    np.testing.assert_array_equal(y[0, 1:], np.zeros([T - 1, D]))
    x = random_x(B, T, D)
    whole = layer.fprop(theta, tf.constant(x), context())
    changed = np.concatenate([x[:, :4], -x[:, 4:]], 1)
    np.testing.assert_array_equal(
        whole[:, :4], layer.fprop(theta, tf.constant(changed), context())[:, :4]
    )


@pytest.mark.parametrize(
    ("router", "length", "training", "expected"),
    [
        (SwitchRouter.Params(), 128, True, 40),  # 1.25 * 128 / 4
        (SwitchRouter.Params(), 128, False, 64),
        (SwitchRouter.Params(eval_capacity_factor=None), 128, False, 128),
        (SwitchRouter.Params(), 1, True, 1),
        (SwitchRouter.Params(capacity_factor=0.01), 9, True, 1),
        (SwitchRouter.Params(capacity_factor=9.0), 9, True, 9),
        (SwitchRouter.Params(capacity_factor=1.1), 40, True, 11),  # in floating point 11.000…01
        (TopKRouter.Params(capacity_factor=1.0), 10, True, 5),  # 2 * 10 / 4
    ],
)
def test_capacity(router: Router.Params, length: int, training: bool, expected: int) -> None:
    layer = layer_of(router)
    assert layer.router.capacity(length, training=training) == expected


@pytest.mark.parametrize("router", ["switch_tight", "top_2", "top_2_random"])
@pytest.mark.parametrize("experts", ["plain", "gated"])
def test_gradients_are_those_of_finite_differences(router: str, experts: str) -> None:
    layer = layer_of(ROUTERS[router], experts=experts)
    w, x = random_weights(layer), random_x(B, T, D)
    c = random_x(B, T, D)[::-1].copy()

    def loss(values: dict[str, Any]) -> float:
        want = by_loops(layer, values, values["x"], context())
        return (want["y"] * c).sum() + want["experts/balance"] + want["experts/z"]

    flat = {path: tf.constant(value) for path, value in {**w, "x": x}.items()}
    ctx = context()
    with tf.GradientTape() as tape:
        tape.watch(flat)
        y = layer.fprop(layer.theta({p: v for p, v in flat.items() if p != "x"}), flat["x"], ctx)
        total = tf.reduce_sum(y * c) + tf.cast(ctx.collected.total("loss"), tf.float64)
    gradients = tape.gradient(total, flat)

    rng, step = np.random.default_rng(4), 1e-6
    for path, value in {**w, "x": x}.items():
        for _ in range(3):
            direction = rng.normal(size=value.shape)
            ends = [loss({**w, "x": x, path: value + s * direction}) for s in (step, -step)]
            slope = (ends[0] - ends[1]) / (2 * step)
            found = float(np.sum(np.asarray(gradients[path]) * direction))
            # The losses pass through float32: 1e-7 of them; differences have 1e-16 / 1e-6.
            np.testing.assert_allclose(found, slope, rtol=1e-6, atol=1e-7, err_msg=path)


@pytest.mark.parametrize("router", ["switch_jitter", "top_2_tight", "top_2_random"])
@pytest.mark.parametrize("parts", [[3], [1, 2], [1, 1, 1]])
def test_parts_of_a_batch_add_up_to_the_whole(router: str, parts: list[int]) -> None:
    params = ROUTERS[router].copy().set(z_weight=0.1)
    layer = layer_of(params, dropout_rate=0.3)
    w, x = random_weights(layer), random_x(B, T, D)
    flat = {path: tf.constant(value) for path, value in w.items()}

    def run(start: int, stop: int) -> tuple[Any, ...]:
        ctx = context(example_offset=start)
        with tf.GradientTape() as tape:
            tape.watch(flat)
            y = layer.fprop(layer.theta(flat), tf.constant(x[start:stop]), ctx)
            loss = tf.reduce_sum(tf.square(y)) + tf.cast(ctx.collected.total("loss"), y.dtype)
        metrics = tf.nest.map_structure(float, ctx.collected.sums["metric"])
        return y, tape.gradient(loss, flat), metrics

    whole_y, whole_gradients, whole_metrics = run(0, B)
    ends = np.cumsum(parts)
    runs = [run(end - size, end) for size, end in zip(parts, ends, strict=True)]

    np.testing.assert_allclose(tf.concat([y for y, _, _ in runs], 0), whole_y, rtol=1e-12)
    for path, gradient in whole_gradients.items():
        total = sum(np.asarray(gradients[path]) for _, gradients, _ in runs)
        np.testing.assert_allclose(total, gradient, rtol=1e-6, atol=1e-7)
    for name, pair in whole_metrics.items():
        total = np.sum([metrics[name] for _, _, metrics in runs], 0)
        np.testing.assert_allclose(total, pair, rtol=1e-6)


def test_dropout_acts_on_the_hidden_layer_in_training() -> None:
    layer = layer_of(SwitchRouter.Params(), dropout_rate=0.5, activation="identity")
    theta, x = theta_of(layer, random_weights(layer)), tf.constant(random_x(B, T, D))
    kept = layer_of(SwitchRouter.Params(), activation="identity").fprop(theta, x, context())
    once, again = (layer.fprop(theta, x, context()) for _ in range(2))
    np.testing.assert_array_equal(once, again)
    assert np.abs(once - kept).max() > 0.1
    # Out of training nothing is dropped: what is left is the other capacity.
    same = layer_of(SwitchRouter.Params(eval_capacity_factor=1.25), dropout_rate=0.5)
    plain = layer_of(SwitchRouter.Params())
    np.testing.assert_array_equal(
        same.fprop(theta, x, context("eval")), plain.fprop(theta, x, context())
    )


def test_balance_loss_is_1_where_experts_are_even_and_the_number_of_experts_where_one_has_all() -> (
    None
):
    layer = layer_of(SwitchRouter.Params(balance_weight=1.0), input_dim=E, use_bias=False)
    weights = random_weights(layer)
    weights["router/w"] = 50.0 * np.eye(E)
    for x, expected in (([[0, 1, 2, 3] * 2], 1.0), ([[2] * 8], E)):
        ctx = context(num_examples=1)
        layer.fprop(theta_of(layer, weights), tf.one_hot(x, E, dtype=tf.float64), ctx)
        loss = ctx.collected.sums["loss"]["experts/balance"][0]
        imbalance = np.divide(*ctx.collected.sums["metric"]["experts/imbalance"])
        np.testing.assert_allclose([loss, imbalance], expected, rtol=1e-6)


@pytest.mark.parametrize("shape", [(B, D), (B, 2, 3, D)])
def test_other_ranks_are_one_length(shape: tuple[int, ...]) -> None:
    layer = layer_of(TopKRouter.Params(eval_capacity_factor=0.6))
    theta, x = theta_of(layer, random_weights(layer)), random_x(*shape)
    y = layer.fprop(theta, tf.constant(x), StepContext())
    flat = layer.fprop(theta, tf.constant(x.reshape(B, -1, D)), StepContext())
    np.testing.assert_array_equal(y, np.reshape(flat, shape))
    with pytest.raises(ValueError, match=r"MixtureOfExperts: x is \[5\], must be \[batch"):
        layer.fprop(theta, tf.constant(x.reshape(-1)[:D]), StepContext())


@pytest.mark.parametrize("experts", ["plain", "gated"])
def test_weights_and_dims(experts: str) -> None:
    layer = layer_of(SwitchRouter.Params(), experts=experts, dtype="bfloat16")
    specs = layer.specs()
    found = {path: (spec.shape, spec.dims, spec.dtype) for path, spec in specs.items()}
    expected = {
        "router/w": ((D, E), ("embed", None), "float32"),
        "hidden/w": ((E, D, H), ("experts", "embed", "mlp"), "bfloat16"),
        "hidden/b": ((E, H), ("experts", "mlp"), "bfloat16"),
        "output/w": ((E, H, D), ("experts", "mlp", "embed"), "bfloat16"),
        "output/b": ((E, D), ("experts", "embed"), "bfloat16"),
    }
    if experts == "gated":
        expected |= {"gate/w": expected["hidden/w"], "gate/b": expected["hidden/b"]}
    assert found == expected
    count = D * E + E * ((3 if experts == "gated" else 2) * D * H)
    count += E * ((2 if experts == "gated" else 1) * H + D)
    assert sum(spec.size for spec in specs.values()) == count
    assert specs["output/w"].fans == (H, D)


def test_router_computes_in_float32_under_bfloat16() -> None:
    layer = layer_of(SwitchRouter.Params(), dtype="bfloat16")
    x = tf.cast(random_x(B, T, D), tf.bfloat16)
    theta = layer.init(seed=1)
    y = layer.fprop(theta, x, StepContext())
    routing = layer.router.fprop(theta.router, x, StepContext())
    wide = layer.router.fprop(theta.router, tf.cast(x, tf.float32), StepContext())
    assert y.dtype == tf.bfloat16
    assert routing.weights.dtype == tf.float32
    np.testing.assert_array_equal(routing.weights, wide.weights)


@pytest.mark.parametrize(
    ("router", "message"),
    [
        (SwitchRouter.Params(capacity_factor=0.0), "SwitchRouter: capacity_factor is 0.0, .* than"),
        (SwitchRouter.Params(eval_capacity_factor=-1.0), "eval_capacity_factor is -1.0, must"),
        (SwitchRouter.Params(jitter=1.0), r"jitter is 1.0, must be in \[0, 1\)"),
        (SwitchRouter.Params(balance_weight=-1.0), "balance_weight is -1.0"),
        (SwitchRouter.Params(z_weight=-1.0), "z_weight is -1.0"),
        (SwitchRouter.Params(num_experts=3), "num_experts is 3, but .* it has 4"),
        (TopKRouter.Params(num_choices=5), "num_choices is 5, must be in 1 … 4, the number of"),
    ],
)
def test_what_cannot_be_is_refused_when_built(router: Router.Params, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer_of(router)


# --- in a Transformer ---


def transformer(**router: Any) -> TransformerLayer.Params:
    return TransformerLayer.Params(
        dim=6,
        attention=MultiHeadAttention.Params(num_heads=2, mask="causal"),
        feed_forward=MixtureOfExperts.Params(
            hidden_dim=7, num_experts=E, router=SwitchRouter.Params(**router)
        ),
    )


def test_transformer_layer_takes_it_in_place_of_a_dense_one() -> None:
    layer = transformer(eval_capacity_factor=None).instantiate()
    theta, x, ctx = layer.init(seed=1), tf.constant(random_x(B, T, 6), tf.float32), StepContext()
    want = layer.fprop(theta, x, ctx)

    cache, parts = layer.init_cache(B, T), []
    for start, stop in ((0, 3), (3, 4), (4, T)):
        y, cache = layer.extend_step(theta, x[:, start:stop], cache, start, ctx)
        parts.append(y)

    assert layer.specs()["feed_forward/hidden/w"].shape == (E, 6, 7)
    np.testing.assert_allclose(tf.concat(parts, 1), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("repeated", [False, True])
def test_padding_of_packed_texts_takes_no_slot(repeated: bool) -> None:
    stack = RepeatedStack if repeated else Stack
    layer = Rematerialize.Params(layer=transformer(capacity_factor=0.6)) if repeated else None
    model = TransformerLm.Params(
        vocab_size=11,
        dim=6,
        stack=stack.Params(num_layers=2, layer=layer or transformer(capacity_factor=0.6)),
    ).instantiate()
    theta = model.init(seed=1)
    rng = np.random.default_rng(0)
    segments = np.array([[0, 0, 1, 1, 1, 2, 2], [0, 0, 0, 0, 0, 1, 1], [0] * 7], np.int32)

    def run(ids: np.ndarray) -> tuple[np.ndarray, Any]:
        ctx = context()

        @tf.function(autograph=False)
        def compute(ids: tf.Tensor) -> Any:
            y = model.hidden(theta, ids, ctx, segment_ids=tf.constant(segments))
            return y, ctx.collected.sums

        y, sums = compute(tf.constant(ids))
        return np.asarray(y)[segments > 0], tf.nest.map_structure(float, sums)

    ids = rng.integers(0, 11, [3, 7]).astype(np.int32)
    others = np.where(segments > 0, ids, rng.integers(0, 11, [3, 7])).astype(np.int32)
    (y, sums), (other_y, other_sums) = run(ids), run(others)

    np.testing.assert_allclose(y, other_y, rtol=1e-5, atol=1e-6)
    assert sums["metric"]["experts/dropped"][1] == 2 * (segments > 0).sum()  # of two layers
    assert sums["metric"]["experts/imbalance"][1] == 2 * 2
    tf.nest.map_structure(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), sums, other_sums
    )


MESH_RULES = {
    "switch": [
        {"batch": "data", "experts": "data", "mlp": "model"},
        {"batch": "data", "experts": "model", "expert_batch": "data", "token_experts": "model"},
        {"length": "data", "experts": "model"},
    ],
    "top_2": [
        {"batch": "data", "experts": "data", "embed": "model"},
        {"length": "model", "batch": "data", "experts": "data"},
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("case", MESH_RULES)
def test_a_mesh_gives_what_one_device_gives(case: str) -> None:
    rules = MESH_RULES[case]
    done = processes.run([str(PROGRAM), case, json.dumps(rules)], optimized=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for some, differences in zip(rules, found, strict=True):
        # Sums in another order: float32 rounding of numbers around 1.
        assert differences["loss"] < 1e-6, some
        assert differences["gradients"] < 1e-5, some
        assert differences["metrics"] == 0, some
        assert differences["dropped"] > 0
