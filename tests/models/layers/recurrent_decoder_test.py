"""Recurrent decoders against NumPy, gate by gate and time by time; gradients, segments, steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from sampling import sample

from tekso.framework.context import StepContext
from tekso.framework.theta import Theta
from tekso.models.layers.recurrent_cells import GruCell, LstmCell
from tekso.models.layers.recurrent_decoder import RecurrentDecoder
from tekso.models.layers.source_attention import AdditiveAttention, DotAttention

B, T, S, D, H, M = 2, 4, 5, 3, 4, 6
RNG = np.random.default_rng(0)
X, ENCODED = RNG.normal(size=(B, T, D)), RNG.normal(size=(B, S, M))
SEEN = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]) > 0
MASK = np.broadcast_to(SEEN[:, None], (B, T, S))
RESET = np.array([[0, 0, 1, 0], [0, 1, 0, 1]]) > 0

FEEDING = ["context", "attentional"]
ATTENTION = {"additive": AdditiveAttention.Params(), "general": DotAttention.Params()}


def params(feeding: Any = "context", attention: str = "additive", **more: Any) -> Any:
    given = {
        "input_dim": D,
        "memory_dim": M,
        "num_layers": 3,
        "cell": LstmCell.Params(hidden_dim=H),
        "attention": ATTENTION[attention],
        "input_feeding": feeding,
        "residual": "add",
    }
    return RecurrentDecoder.Params(**(given | more))


def random_weights(layer: RecurrentDecoder) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {p: rng.normal(size=s.shape) * 0.6 for p, s in layer.specs().items()}


def theta_of(layer: RecurrentDecoder, weights: dict[str, np.ndarray]) -> Theta:
    return layer.theta({path: tf.constant(w) for path, w in weights.items()})


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


class Reference:
    """One example, one time after the other, in float64; knows nothing of the layers but names."""

    def __init__(self, p: Any, weights: dict[str, np.ndarray], encoded: np.ndarray) -> None:
        self.p, self.w, self.encoded = p, weights, encoded
        self.restart()

    def restart(self) -> None:
        layers = self.p.num_layers
        self.h, self.c = np.zeros([layers, H]), np.zeros([layers, H])
        self.fed = np.zeros(M if self.p.input_feeding == "context" else H)

    def lstm(self, layer: int, cell: str, x: np.ndarray, fed: np.ndarray | None) -> np.ndarray:
        w = {n: self.w[f"{cell}/{n}"] for n in ("w_input", "w_recurrent", "b")}
        gates = np.einsum("d,dgh->gh", x, w["w_input"]) + w["b"]
        gates += np.einsum("d,dgh->gh", self.h[layer], w["w_recurrent"])
        if fed is not None:
            gates += np.einsum("d,dgh->gh", fed, self.w["attentive/w_feed"])
        i, f, g, o = gates
        self.c[layer] = sigmoid(f + 1) * self.c[layer] + sigmoid(i) * np.tanh(g)
        self.h[layer] = sigmoid(o) * np.tanh(self.c[layer])
        return self.h[layer].copy()

    def attend(self, query: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        w = {n: self.w.get(f"attentive/attention/{n}") for n in ("w_query", "w_key", "w_score")}
        scores = []
        for item in self.encoded[seen]:
            if w["w_score"] is not None:
                scores.append(w["w_score"] @ np.tanh(query @ w["w_query"] + item @ w["w_key"]))
            else:
                scores.append(query @ (item @ w["w_key"]))
        shares = np.zeros(len(self.encoded))
        shares[seen] = np.exp(scores) / np.exp(scores).sum()
        return shares @ self.encoded, shares

    def turn(self, x: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        y = self.lstm(0, "attentive/cells/0", x, self.fed)
        if self.p.input_feeding == "context":
            context, shares = self.attend(y, seen)
            for i in range(1, self.p.num_layers):
                given = np.concatenate([y, context])
                y = self.lstm(i, f"layers/{i - 1}/cell", given, None) + self.kept(y)
            self.fed = context
        else:
            for i in range(1, self.p.num_layers):
                y = self.lstm(i, f"attentive/cells/{i}", y, None) + self.kept(y)
            context, shares = self.attend(y, seen)
            y = np.tanh(y @ self.w["attentive/w_output"] + context @ self.w["attentive/w_context"])
            self.fed = y
        if self.p.output == "state_and_context":
            y = np.concatenate([y, context])
        return y, shares

    def kept(self, x: np.ndarray) -> Any:
        return x if self.p.residual == "add" else 0.0


def reference(
    p: Any, weights: dict[str, np.ndarray], reset: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    outputs, shares = [], []
    for b in range(B):
        one = Reference(p, weights, ENCODED[b])
        for t in range(T):
            if reset is not None and reset[b, t]:
                one.restart()
            y, share = one.turn(X[b, t], SEEN[b])
            outputs.append(y)
            shares.append(share)
    return np.reshape(outputs, [B, T, -1]), np.reshape(shares, [B, T, S])


@pytest.mark.parametrize("reset", [pytest.param(None, marks=pytest.mark.slow), RESET])
@pytest.mark.parametrize(
    ("feeding", "attention"),
    sample(
        [(feeding, attention) for feeding in FEEDING for attention in ATTENTION],
        quick=[("context", "additive"), ("attentional", "general")],
    ),
)
def test_equals_numpy_example_by_example(feeding: str, attention: str, reset: Any) -> None:
    layer = params(feeding, attention).instantiate()
    weights = random_weights(layer)
    theta = theta_of(layer, weights)
    flags = {} if reset is None else {"reset": tf.constant(reset)}

    def run() -> Any:
        found = layer.decode(
            theta,
            tf.constant(X),
            StepContext(),
            encoded=tf.constant(ENCODED),
            mask=tf.constant(MASK),
            **flags,
        )
        return found.output, found.probabilities

    expected = reference(layer.params, weights, reset)
    compiled = tf.function(run, autograph=False, jit_compile=True)
    for found in (run(), tf.function(run, autograph=False)(), compiled()):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_layers": 1, "output": "state_and_context"},
        {"num_layers": 2, "output": "state_and_context", "residual": "none"},
        {"num_layers": 1, "input_feeding": "attentional"},
        {"num_layers": 2, "input_feeding": "attentional", "output": "state_and_context"},
    ],
)
def test_other_forms_equal_numpy(changes: dict[str, Any]) -> None:
    layer = params(**{"feeding": "context"}).set(changes).instantiate()
    weights = random_weights(layer)
    found = layer.decode(
        theta_of(layer, weights),
        tf.constant(X),
        StepContext(),
        encoded=tf.constant(ENCODED),
        mask=tf.constant(MASK),
    )
    expected, _ = reference(layer.params, weights, None)
    np.testing.assert_allclose(found.output, expected, rtol=1e-8, atol=1e-10)
    assert layer.output_dim == expected.shape[-1]


@pytest.mark.parametrize("attention", sample(ATTENTION, quick=[next(iter(ATTENTION))]))
@pytest.mark.parametrize("feeding", FEEDING)
def test_gradients_equal_differences_of_numpy(feeding: str, attention: str) -> None:
    layer = params(feeding, attention, num_layers=2).instantiate()
    weights = random_weights(layer)
    factors = np.random.default_rng(3).normal(size=(B, T, layer.output_dim))
    flat = {path: tf.constant(w) for path, w in weights.items()}

    @tf.function(autograph=False)
    def gradients() -> Any:
        with tf.GradientTape() as tape:
            tape.watch(flat)
            found = layer.decode(
                layer.theta(flat),
                tf.constant(X),
                StepContext(),
                encoded=tf.constant(ENCODED),
                mask=tf.constant(MASK),
                reset=tf.constant(RESET),
            )
            loss = tf.reduce_sum(found.output * factors)
        return tape.gradient(loss, flat)

    def loss(path: str, place: tuple[int, ...], change: float) -> float:
        moved = {**weights, path: weights[path].copy()}
        moved[path][place] += change
        return float(np.sum(reference(layer.params, moved, RESET)[0] * factors))

    found, rng, step = gradients(), np.random.default_rng(4), 1e-5
    for path, w in weights.items():
        for _ in range(3):
            place = tuple(int(rng.integers(n)) for n in w.shape)
            expected = (loss(path, place, step) - loss(path, place, -step)) / (2 * step)
            assert float(found[path].numpy()[place]) == pytest.approx(expected, rel=2e-5, abs=1e-7)


@pytest.mark.parametrize("hypotheses", [1, 3])
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("feeding", FEEDING)
def test_steps_one_by_one_equal_the_whole(feeding: str, attention: str, hypotheses: int) -> None:
    layer = params(feeding, attention).instantiate()
    theta, ctx = theta_of(layer, random_weights(layer)), StepContext(mode="decode")
    whole = layer.decode(
        theta, tf.constant(X), ctx, encoded=tf.constant(ENCODED), mask=tf.constant(MASK)
    )
    memory = layer.memory(theta, tf.constant(ENCODED), ctx)
    state = layer.zero_state(B * hypotheses, tf.float64)
    for t in range(T):
        x = tf.repeat(tf.constant(X[:, t]), hypotheses, axis=0)
        found, state = layer.step(theta, x, state, ctx, memory=memory, mask=tf.constant(SEEN))
        for name in ("output", "context", "probabilities"):
            expected = np.repeat(getattr(whole, name)[:, t], hypotheses, axis=0)
            np.testing.assert_allclose(getattr(found, name), expected, rtol=1e-9, atol=1e-12)


def test_hypotheses_of_a_source_are_independent() -> None:
    layer = params("attentional").instantiate()
    theta, ctx = theta_of(layer, random_weights(layer)), StepContext(mode="decode")
    rng = np.random.default_rng(5)
    x = rng.normal(size=(3 * B, D))
    encoded = tf.constant(ENCODED)

    def two_steps(x: np.ndarray, encoded: tf.Tensor) -> np.ndarray:
        memory = layer.memory(theta, encoded, ctx)
        state = layer.zero_state(len(x), tf.float64)
        for _ in range(2):
            found, state = layer.step(theta, tf.constant(x), state, ctx, memory=memory)
        return found.output.numpy()

    together = two_steps(x, encoded)
    for n in range(3 * B):
        alone = two_steps(x[n : n + 1], encoded[n // 3 : n // 3 + 1])
        np.testing.assert_allclose(together[n : n + 1], alone, rtol=1e-9)


@pytest.mark.parametrize("feeding", FEEDING)
def test_a_gru_runs_as_well_and_learns(feeding: str) -> None:
    layer = params(feeding, cell=GruCell.Params(hidden_dim=H)).instantiate()
    theta = theta_of(layer, random_weights(layer))
    with tf.GradientTape() as tape:
        tape.watch(theta)
        found = layer.decode(theta, tf.constant(X), StepContext(), encoded=tf.constant(ENCODED))
    gradients = tape.gradient(found.output, theta)
    assert all(np.abs(g).max() > 0 for g in tf.nest.flatten(gradients))


def test_products_of_the_inputs_and_of_the_source_come_before_the_loop() -> None:
    layer = params("context").instantiate()
    theta = layer.init()

    def run(x: tf.Tensor, encoded: tf.Tensor) -> tf.Tensor:
        return layer.decode(theta, x, StepContext(), encoded=encoded).output

    inputs = tf.constant(X, tf.float32), tf.constant(ENCODED, tf.float32)
    graph = tf.function(run, autograph=False).get_concrete_function(*inputs).graph
    outside = [tuple(op.outputs[0].shape) for op in graph.get_operations() if op.type == "MatMul"]
    gates = (T * B, 4 * H)  # of the first layer, and of the two above it
    assert sorted(outside) == sorted([gates, (B * S, H), gates, gates])


@pytest.mark.parametrize("feeding", FEEDING)
def test_dropout_differs_from_time_to_time_and_not_between_parts_of_a_batch(feeding: str) -> None:
    layer = params(feeding, dropout_rate=0.5).instantiate()
    theta = theta_of(layer, random_weights(layer))
    alike = np.repeat(X[:, :1], T, axis=1)

    def run(rows: slice, offset: int, mode: Any = "train") -> np.ndarray:
        ctx = StepContext(mode=mode, seed=3, example_offset=offset)
        found = layer.decode(
            theta, tf.constant(alike[rows]), ctx, encoded=tf.constant(ENCODED[rows])
        )
        return found.output.numpy()

    whole = run(slice(0, 2), 0)
    assert np.abs(whole - run(slice(0, 2), 0, "eval")).max() > 1e-2
    np.testing.assert_allclose(whole[1:], run(slice(1, 2), 1), rtol=1e-9)
    # With states of 0 before every time, only the masks tell one time from another.
    ctx = StepContext(mode="train", seed=3)
    every = tf.ones([B, T], tf.bool)
    found = layer.decode(
        theta, tf.constant(alike), ctx, encoded=tf.constant(ENCODED), reset=every
    ).output
    assert np.abs(found[:, 1] - found[:, 2]).max() > 1e-3


def test_what_cannot_be_built_is_refused() -> None:
    with pytest.raises(ValueError, match="num_layers is 0"):
        params(num_layers=0).instantiate()
    with pytest.raises(ValueError, match="state_and_context"):
        params(num_layers=1).instantiate()
    with pytest.raises(ValueError, match="memory_dim is 9"):
        params().set({"attention.memory_dim": 9}).instantiate()
