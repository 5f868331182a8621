"""Repeated equals unrolled, rematerialised equals plain, with dropout and what is collected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from sampling import sample

from tekso.framework import theta as theta_lib
from tekso.framework.context import StepContext, collecting_attention
from tekso.framework.layer import Layer
from tekso.framework.theta import Theta
from tekso.models.layers.attention import MultiHeadAttention
from tekso.models.layers.feed_forward import FeedForward
from tekso.models.layers.linear import Linear
from tekso.models.layers.rematerialize import Rematerialize
from tekso.models.layers.stack import RepeatedStack, SharedStack, Stack, StackBase
from tekso.models.layers.transformer import TransformerLayer

B, T, S, D, L = 3, 5, 4, 6, 2


class Collecting(FeedForward):
    """A feed-forward layer that hands over one value of each kind."""

    class Params(FeedForward.Params):
        """Params of Collecting."""

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """See FeedForward."""
        y = super().fprop(theta, x, ctx)
        ctx.collect_loss("size", tf.reduce_sum(tf.square(y)))
        ctx.collect_metric("mean", tf.reduce_sum(y), tf.size(y))
        ctx.collect_statistic(self, "sum", tf.reduce_sum(y, [0, 1]), tf.ones([D]))
        return y


def layer_params(with_memory: bool = False) -> TransformerLayer.Params:
    p = TransformerLayer.Params(dim=D, dropout_rate=0.2, feed_forward=Collecting.Params())
    p.set({"attention.num_heads": 3, "attention.mask": "causal", "feed_forward.hidden_dim": 4})
    p.set({"attention.dropout_rate": 0.1, "feed_forward.dropout_rate": 0.3})
    if with_memory:
        p.memory_attention = MultiHeadAttention.Params(num_heads=3)
    return p


class Root(Layer):
    """Gives a stack a path, as a model does."""

    class Params(Layer.Params):
        """Params of Root."""

    def __init__(self, params: Any, stack: StackBase.Params) -> None:
        super().__init__(params)
        self.child("stack", stack)


def build(kind: type[StackBase], layer: Layer.Params) -> StackBase:
    return Root.Params().instantiate(stack=kind.Params(num_layers=L, layer=layer)).stack


def random(*shape: int, seed: int = 0) -> tf.Tensor:
    return tf.constant(np.random.default_rng([seed, *shape]).standard_normal(shape), tf.float32)


def stacked(flat: dict[str, Any]) -> dict[str, np.ndarray]:
    """Weights of an unrolled stack in the form of a repeated one."""
    out: dict[str, list[Any]] = {}
    for i in range(L):
        for path, value in flat.items():
            if path.startswith(f"layers/{i}/"):
                out.setdefault(path.replace(f"layers/{i}/", "layers/", 1), []).append(value)
    return {path: np.stack(values) for path, values in out.items()}


def run(
    stack: StackBase, mode: str = "train", *, as_graph: bool = True, **side: Any
) -> dict[str, Any]:
    """Output, gradients and what was collected of one step."""

    def step(theta: Theta, x: tf.Tensor, **side: Any) -> Any:
        ctx = StepContext(mode=mode, seed=5, step=7, num_examples=B)
        leaves = theta_lib.flatten(theta)
        with tf.GradientTape() as tape:
            tape.watch([x, *leaves.values()])
            y = stack.fprop(theta, x, ctx, **side)
            loss = tf.reduce_sum(y * random(B, T, D, seed=9)) + ctx.collected.total("loss")
        return y, tape.gradient(loss, [x, leaves]), ctx.collected.sums

    step = tf.function(step, autograph=False) if as_graph else step
    y, (dx, gradients), sums = step(stack.init(seed=3), random(B, T, D), **side)
    return {"y": y, "dx": dx, "gradients": gradients, "sums": sums}


def assert_same(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got.keys() == want.keys()
    for name in got:
        np.testing.assert_allclose(got[name], want[name], rtol=2e-4, atol=2e-5, err_msg=name)


def assert_same_run(got: dict[str, Any], want: dict[str, Any]) -> None:
    for name in ("y", "dx"):
        np.testing.assert_allclose(got[name], want[name], rtol=1e-4, atol=1e-5)
    assert_same(got["gradients"], want["gradients"])
    for kind in ("loss", "metric"):
        sums = [{k: np.stack(v) for k, v in r["sums"][kind].items()} for r in (got, want)]
        assert sums[0]
        assert_same(*sums)


def test_both_stacks_start_bit_equal() -> None:
    unrolled, repeated = (build(kind, layer_params()) for kind in (Stack, RepeatedStack))

    one, other = (theta_lib.flatten(s.init(seed=3)) for s in (unrolled, repeated))

    assert_values = stacked(one)
    assert assert_values.keys() == other.keys()
    for path, value in other.items():
        np.testing.assert_array_equal(value, assert_values[path])


@pytest.mark.parametrize("as_graph", sample([True, False], quick=[False]))
def test_repeated_equals_unrolled_with_dropout(as_graph: bool) -> None:
    unrolled, repeated = (
        run(build(kind, layer_params()), as_graph=as_graph) for kind in (Stack, RepeatedStack)
    )
    evaluated = run(build(Stack, layer_params()), mode="eval")

    statistics = [
        {k: v[0] for k, v in r["sums"]["statistic"].items()} for r in (unrolled, repeated)
    ]
    unrolled["gradients"] = stacked(unrolled["gradients"])
    assert_same_run(repeated, unrolled)
    assert np.abs(unrolled["y"] - evaluated["y"]).max() > 0.1
    for i in range(L):  # statistics of a repeated layer are stacked, as its weights are
        np.testing.assert_allclose(
            statistics[1]["stack/layers/feed_forward/sum"][i],
            statistics[0][f"stack/layers/{i}/feed_forward/sum"],
            rtol=1e-4,
            atol=1e-5,
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Stack, RepeatedStack])
def test_rematerialised_equals_plain_with_dropout_and_collections(kind: type[StackBase]) -> None:
    mask = tf.constant(np.random.default_rng(0).random([B, 1, T, T]) < 0.7)
    side = {"memory": random(B, S, D, seed=4), "mask": mask}
    layer = layer_params(with_memory=True)
    plain, wrapped = build(kind, layer), build(kind, Rematerialize.Params(layer=layer))

    got, want = run(wrapped, **side), run(plain, **side)

    assert wrapped.specs().keys() == plain.specs().keys()
    assert_same_run(got, want)
    assert got["sums"]["statistic"].keys() == want["sums"]["statistic"].keys()
    for name, (value, _) in want["sums"]["statistic"].items():
        np.testing.assert_allclose(got["sums"]["statistic"][name][0], value, rtol=1e-5, atol=1e-5)


def test_a_shared_stack_is_a_stack_of_equal_layers() -> None:
    shared, stack = (build(kind, layer_params()) for kind in (SharedStack, Stack))
    one = theta_lib.flatten(shared.init(seed=3))
    assert {path.split("/")[0] for path in one} == {"layer"}
    copies = {
        path.replace("layer/", f"layers/{i}/", 1): tf.identity(value)
        for path, value in one.items()
        for i in range(L)
    }
    found = []
    for layer, weights in ((shared, one), (stack, copies)):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            ctx = StepContext(mode="eval", num_examples=B)
            y = layer.fprop(layer.theta(weights), random(B, T, D), ctx)
            size = tf.reduce_sum(tf.square(y))
        found.append((y, tape.gradient(size, weights)))
    (y, slopes), (want, each) = found
    np.testing.assert_allclose(y, want, rtol=1e-5)
    for path, slope in slopes.items():
        parts = [each[path.replace("layer/", f"layers/{i}/", 1)] for i in range(L)]
        scale = np.abs(tf.add_n(parts)).max() + 1e-3
        np.testing.assert_allclose(slope, tf.add_n(parts), rtol=1e-4, atol=1e-5 * scale)


class Noise(Linear):
    """Adds random numbers."""

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        return x + ctx.uniform(self, x.shape)


def test_layers_of_a_shared_stack_draw_different_numbers() -> None:
    stack = build(SharedStack, Noise.Params(input_dim=D, output_dim=D))
    theta, ctx = stack.init(), StepContext(mode="train", seed=1, num_examples=B)
    first = stack.fprop_layer(0, theta, tf.zeros([B, D]), ctx)
    both = stack.fprop(theta, tf.zeros([B, D]), ctx)
    assert np.abs(both - 2 * first).min() > 1e-6


STACKS = [Stack, RepeatedStack, SharedStack]


@pytest.mark.parametrize(
    ("kind", "wrap", "with_memory"),
    [
        *((kind, False, False) for kind in STACKS),
        *sample([(kind, True, False) for kind in STACKS], quick=[(RepeatedStack, True, False)]),
        *(pytest.param(kind, True, True, marks=pytest.mark.slow) for kind in STACKS),
        # less than those above
        *(pytest.param(kind, False, True, marks=pytest.mark.matrix) for kind in STACKS),
    ],
)
def test_cache_gives_what_the_full_pass_gives(
    kind: type[StackBase], wrap: bool, with_memory: bool
) -> None:
    p = layer_params(with_memory)
    stack = build(kind, Rematerialize.Params(layer=p) if wrap else p)
    theta, x, ctx = stack.init(seed=3), random(B, T, D), StepContext(num_examples=B)
    memory = random(B, S, D, seed=4)
    want = stack.fprop(theta, x, ctx, **({"memory": memory} if with_memory else {}))

    @tf.function(autograph=False)
    def decode(x: tf.Tensor, memory: tf.Tensor) -> tf.Tensor:
        ctx = StepContext(mode="decode", num_examples=B)
        cache = stack.init_cache(B, T)
        if with_memory:
            cache = stack.cache_memory(theta, cache, memory, ctx)
        first, cache = stack.extend_step(theta, x[:, :3], cache, tf.constant(0), ctx)
        second, cache = stack.extend_step(theta, x[:, 3:], cache, tf.constant(3), ctx)
        return tf.concat([first, second], 1)

    np.testing.assert_allclose(decode(x, memory), want, rtol=1e-4, atol=1e-5)


def full_attention_weights(
    layer: Any, theta: Theta, x: tf.Tensor, memory: tf.Tensor | None
) -> np.ndarray:
    """Attention weights of a TransformerLayer in NumPy: of its memory attention if it has one."""
    name, attention = "attention", layer.attention
    if memory is not None:
        normed = layer.attention_norm.fprop(theta.attention_norm, x, StepContext())
        x = x + layer.attention.fprop(theta.attention, normed, StepContext())
        name, attention = "memory_attention", layer.memory_attention
    x = getattr(layer, f"{name}_norm").fprop(theta[f"{name}_norm"], x, StepContext())
    w, keys = theta[name], x if memory is None else memory
    q = np.einsum("btd,dnh->bnth", x, w.q) + w.q_bias.numpy()[:, None]
    k = np.einsum("bsd,dnh->bnsh", keys, w.k) + w.k_bias.numpy()[:, None]
    scores = np.einsum("bnth,bnsh->bnts", q, k) / np.sqrt(q.shape[-1])
    if attention.params.mask == "causal":
        scores = np.where(np.tri(T, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True)).mean(1)


@pytest.mark.parametrize(
    ("kind", "with_memory"),
    [
        (Stack, False),
        (RepeatedStack, True),
        pytest.param(Stack, True, marks=pytest.mark.matrix),  # each is in one of those above
        pytest.param(RepeatedStack, False, marks=pytest.mark.matrix),
    ],
)
@pytest.mark.parametrize("wrap", sample([False, True], quick=[True]))
def test_collected_attention_weights_are_those_of_the_last_layer(
    kind: type[StackBase], wrap: bool, with_memory: bool
) -> None:
    p = layer_params(with_memory)
    stack = build(kind, Rematerialize.Params(layer=p) if wrap else p)
    plain = build(Stack, p)
    theta, own = stack.init(seed=3), plain.init(seed=3)
    x, memory = random(B, T, D), random(B, S, D, seed=4) if with_memory else None
    side = {} if memory is None else {"memory": memory}
    between = plain.fprop_layer(0, own, x, StepContext(num_examples=B), **side)
    want = full_attention_weights(plain.layers[1], own.layers["1"], between, memory)

    @tf.function(autograph=False)
    def all_at_once(x: tf.Tensor, **side: tf.Tensor) -> Any:
        ctx = StepContext(num_examples=B)
        requesting = collecting_attention(ctx)
        y = stack.fprop(theta, x, requesting, **side)
        return y, requesting.collected.attention_weights(), ctx.collected.sums["metric"]

    @tf.function(autograph=False)
    def in_steps(x: tf.Tensor, **side: tf.Tensor) -> Any:
        ctx, cache, steps = StepContext(mode="decode", num_examples=B), stack.init_cache(B, T), []
        if with_memory:
            cache = stack.cache_memory(theta, cache, side["memory"], ctx)
        for first, end in ((0, 3), (3, T)):
            step = collecting_attention(ctx)
            _, cache = stack.extend_step(theta, x[:, first:end], cache, tf.constant(first), step)
            steps.append(step.collected.attention_weights())
        return tf.concat(steps, 1)

    y, attention_weights, metrics = all_at_once(x, **side)
    ctx = StepContext(num_examples=B)
    np.testing.assert_allclose(attention_weights, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(in_steps(x, **side), want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(y, stack.fprop(theta, x, ctx, **side), rtol=1e-4, atol=1e-5)
    # The last layer of a repeated stack runs twice, but its metrics count once.
    for name, pair in ctx.collected.sums["metric"].items():
        np.testing.assert_allclose(metrics[name], pair, rtol=1e-4, err_msg=name)


def test_a_stack_without_attention_has_no_attention_weights() -> None:
    layer = Linear.Params(input_dim=D, output_dim=D, dims=("embed", None))
    for kind in (Stack, RepeatedStack):
        stack, ctx = build(kind, layer), collecting_attention(StepContext())
        stack.fprop(stack.init(seed=1), random(B, D), ctx)
        with pytest.raises(ValueError, match="no layer has added attention weights"):
            ctx.collected.attention_weights()


def test_trace_of_a_repeated_stack_does_not_grow_with_depth() -> None:
    def nodes(kind: type[StackBase], num_layers: int) -> int:
        layer = FeedForward.Params(input_dim=D, hidden_dim=4, dropout_rate=0.1)
        stack = kind.Params(num_layers=num_layers, layer=layer).instantiate()
        theta = stack.init()

        @tf.function(autograph=False)
        def step(theta: Theta, x: tf.Tensor) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(theta_lib.flatten(theta))
                y = stack.fprop(theta, x, StepContext(mode="train", num_examples=B))
            return tape.gradient(y, theta_lib.flatten(theta))

        graph = step.get_concrete_function(theta, random(B, T, D)).graph
        functions = graph.as_graph_def().library.function
        return len(graph.as_graph_def().node) + sum(len(f.node_def) for f in functions)

    assert nodes(RepeatedStack, 2) == nodes(RepeatedStack, 9)
    assert nodes(Stack, 3) > 1.3 * nodes(Stack, 2)


def test_layers_of_a_stack_may_differ() -> None:
    widths = [3, 7]
    layers = [FeedForward.Params(input_dim=D, hidden_dim=n) for n in widths]
    stack = Stack.Params(num_layers=2, layers=layers).instantiate()

    specs = stack.specs()

    assert [specs[f"layers/{i}/hidden/w"].shape for i in (0, 1)] == [(D, n) for n in widths]
    assert stack.fprop(stack.init(), random(B, T, D), StepContext()).shape == (B, T, D)


def test_a_stack_without_layers_is_refused() -> None:
    layer = FeedForward.Params(input_dim=D, hidden_dim=2)
    with pytest.raises(ValueError, match="num_layers is 2, `layers` is a list of 1, `layer` is"):
        Stack.Params(num_layers=2, layers=[layer]).instantiate()
    with pytest.raises(ValueError, match="num_layers is 0"):
        Stack.Params(num_layers=0, layer=layer).instantiate()
    with pytest.raises(ValueError, match="`layers` is not set, `layer` is not set"):
        Stack.Params(num_layers=2).instantiate()
    with pytest.raises(ValueError, match="layer is REQUIRED"):
        RepeatedStack.Params(num_layers=2).instantiate()


def test_any_layer_that_keeps_the_shape_can_be_stacked() -> None:
    layer = Linear.Params(input_dim=D, output_dim=D, dims=("embed", None), activation="tanh")
    stack = RepeatedStack.Params(num_layers=2, layer=layer).instantiate()
    theta, x = stack.init(seed=1), random(B, D)

    got = stack.fprop(theta, x, StepContext())

    w, b = theta.layers.w.numpy(), theta.layers.b.numpy()
    want = np.tanh(np.tanh(x @ w[0] + b[0]) @ w[1] + b[1])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert stack.specs()["layers/w"].dims == ("layers", "embed", None)


def test_base_says_what_it_lacks() -> None:
    stack = StackBase.Params(num_layers=1).instantiate()
    for call in (
        lambda: stack.fprop(Theta(), None, StepContext()),
        lambda: stack.init_cache(1, 1),
        lambda: stack.cache_memory(Theta(), None, None, StepContext()),
        lambda: stack.extend_step(Theta(), None, None, 0, StepContext()),
        lambda: stack.move_rows(None, None),
    ):
        with pytest.raises(NotImplementedError, match="StackBase has no"):
            call()
