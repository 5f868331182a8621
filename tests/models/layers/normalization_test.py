"""LayerNorm, RMSNorm and BatchNorm: values, weights, and BatchNorm's two sets of statistics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework import ops
from tekso.framework import theta as theta_lib
from tekso.framework.context import StepContext
from tekso.framework.theta import Theta
from tekso.models.layers.normalization import BatchNorm, LayerNorm, Norm, RMSNorm

EPSILON = 0.01


class TwoReplicas(StepContext):
    """Two parts of a batch that run together: both get what one of them is given to sum."""

    def __init__(self, others: list[np.ndarray], **kwargs: object) -> None:
        super().__init__(mode="train", **kwargs)
        self.others = iter(others)
        self.given: list[np.ndarray] = []

    def sum_over_replicas(self, x: tf.Tensor, layer: BatchNorm) -> tf.Tensor:
        self.given.append(x.numpy())
        return x + next(self.others)


TwoReplicas.forms = {"sum_over_replicas": TwoReplicas.sum_over_replicas}


def random_theta(layer: Norm) -> Theta:
    rng = np.random.default_rng(0)
    return Theta((n, tf.constant(rng.uniform(0.5, 2, s.shape))) for n, s in layer.specs().items())


def test_layer_norm_and_rms_norm_follow_their_formulas() -> None:
    x = np.random.default_rng(1).normal(size=(2, 3, 5)) + 1
    layer = LayerNorm.Params(dim=5, epsilon=EPSILON).instantiate()
    theta = random_theta(layer)
    centred = x - x.mean(-1, keepdims=True)
    normal = centred / np.sqrt(x.var(-1, keepdims=True) + EPSILON)
    y = layer.fprop(theta, tf.constant(x), StepContext())
    np.testing.assert_allclose(y, normal * theta.scale + theta.bias, rtol=1e-10)

    layer = LayerNorm.Params(dim=5, epsilon=EPSILON, use_bias=False).instantiate()
    y = layer.fprop(Theta(scale=theta.scale), tf.constant(x), StepContext())
    np.testing.assert_allclose(y, normal * theta.scale, rtol=1e-10)

    layer = RMSNorm.Params(dim=5, epsilon=EPSILON).instantiate()
    y = layer.fprop(Theta(scale=theta.scale), tf.constant(x), StepContext())
    rms = np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON)
    np.testing.assert_allclose(y, x / rms * theta.scale, rtol=1e-10)


def test_weights_dims_and_first_values() -> None:
    expected = {
        LayerNorm: {"scale": 1, "bias": 0},
        RMSNorm: {"scale": 1},
        BatchNorm: {"scale": 1, "bias": 0, "moving_mean": 0, "moving_variance": 1},
    }
    for kind, weights in expected.items():
        layer = kind.Params(dim=3).instantiate()
        specs, theta = layer.specs(), layer.init()
        assert list(specs) == list(weights)
        dim = "channels" if kind is BatchNorm else "embed"
        for name, value in weights.items():
            assert (specs[name].shape, specs[name].dims) == ((3,), (dim,))
            assert specs[name].trainable == (not name.startswith("moving"))
            np.testing.assert_array_equal(theta[name], [value] * 3)
        assert kind.couples_examples == (kind is BatchNorm)
    assert LayerNorm.Params(dim=3, dims=("mlp",)).instantiate().specs()["scale"].dims == ("mlp",)


def batch_norm(**kwargs: object) -> tuple[BatchNorm, Theta]:
    layer = BatchNorm.Params(dim=3, epsilon=EPSILON, decay=0.75, **kwargs).instantiate()
    return layer, random_theta(layer)


X = np.random.default_rng(2).normal(size=(4, 5, 3)) * [1, 2, 3] + [0, 5, -1]


def normalised(x: np.ndarray, mean: Any, variance: Any, theta: Theta) -> np.ndarray:
    return (x - mean) / np.sqrt(variance + EPSILON) * theta.scale + theta.bias


def new_statistics(layer: BatchNorm, theta: Theta, *contexts: StepContext) -> dict[str, Any]:
    """What an execution does after the step: sums of all parts, means, the layer's own rule."""
    sums: dict[str, list[Any]] = {}
    for ctx in contexts:
        for name, (value, weight) in ctx.collected.sums["statistic"].items():
            before = sums.get(name, [0, 0])
            sums[name] = [before[0] + value, before[1] + weight]
    means = {name: tf.math.divide_no_nan(*pair) for name, pair in sums.items()}
    return layer.new_statistics(theta_lib.flatten(theta), means)


def test_batch_norm_in_training_uses_the_batch() -> None:
    layer, theta = batch_norm()
    y = layer.fprop(theta, tf.constant(X), StepContext(mode="train"))
    np.testing.assert_allclose(
        y, normalised(X, X.mean((0, 1)), X.var((0, 1)), theta), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("group", [1, 3, 4, 9])
def test_groups_of_examples_have_their_own_statistics(group: int) -> None:
    layer, theta = batch_norm(group=group)
    x = np.concatenate([X, 2 * X[:1] + 1])  # 5 examples
    mask = np.random.default_rng(3).random((5, 5)) < 0.7
    ctx = StepContext(mode="train", num_examples=5)
    y = layer.fprop(theta, tf.constant(x), ctx, mask=tf.constant(mask))
    for begin in range(0, 5, group):
        own, counted = x[begin : begin + group], mask[begin : begin + group]
        wanted = normalised(own, own[counted].mean(0), own[counted].var(0), theta)
        np.testing.assert_allclose(y[begin : begin + group], wanted, rtol=1e-9, atol=1e-12)

    plain, same = batch_norm()[0], StepContext(mode="train", num_examples=5)
    plain.fprop(theta, tf.constant(x), same, mask=tf.constant(mask))
    wanted = new_statistics(plain, theta, same)
    for name, value in new_statistics(layer, theta, ctx).items():
        np.testing.assert_allclose(value, wanted[name], rtol=1e-9)  # of the whole batch


def test_a_group_may_span_replicas() -> None:
    layer, theta = batch_norm(group=3)
    together = StepContext(mode="train", num_examples=4)
    whole = layer.fprop(theta, tf.constant(X), together)
    given: dict[str, list[np.ndarray]] = {"first": [], "second": []}
    for _ in range(3):  # a sum of both parts is known when the other part has been computed
        for name, rows, other in (("first", X[:2], "second"), ("second", X[2:], "first")):
            padded = given[other] + [np.zeros(())] * 3
            offset = 0 if name == "first" else 2
            ctx = TwoReplicas(padded, num_examples=4, example_offset=offset)
            y = layer.fprop(theta, tf.constant(rows), ctx)
            given[name] = ctx.given
            if name == "second":
                second = y
    np.testing.assert_allclose(second, whole[2:], rtol=1e-9, atol=1e-12)
    with pytest.raises(ValueError, match="group 0 must be at least 1"):
        batch_norm(group=0)


@pytest.mark.parametrize("mode", ["eval", "decode"])
def test_batch_norm_else_uses_and_keeps_the_moving_statistics(mode: Any) -> None:
    layer, theta = batch_norm()
    ctx = StepContext(mode=mode)
    y = layer.fprop(theta, tf.constant(X), ctx)
    np.testing.assert_allclose(
        y, normalised(X, theta.moving_mean, theta.moving_variance, theta), rtol=1e-9, atol=1e-12
    )
    assert ctx.collected.sums["statistic"] == {}


def test_batch_norm_moves_its_statistics_towards_those_of_the_batch() -> None:
    layer, theta = batch_norm()
    ctx = StepContext(mode="train")
    layer.fprop(theta, tf.constant(X), ctx)
    new = new_statistics(layer, theta, ctx)
    assert set(new) == {"moving_mean", "moving_variance"}
    # Collected in float32.
    np.testing.assert_allclose(
        new["moving_mean"], 0.75 * theta.moving_mean + 0.25 * X.mean((0, 1)), rtol=1e-6
    )
    np.testing.assert_allclose(
        new["moving_variance"], 0.75 * theta.moving_variance + 0.25 * X.var((0, 1)), rtol=1e-6
    )


def test_batch_norm_of_micro_batches_normalises_each_and_moves_once_by_all() -> None:
    layer, theta = batch_norm()
    parts = X[:1], X[1:]  # unequal, so that a mean of means would show
    contexts = [StepContext(mode="train") for _ in parts]
    for part, ctx in zip(parts, contexts, strict=True):
        y = layer.fprop(theta, tf.constant(part), ctx)
        own = normalised(part, part.mean((0, 1)), part.var((0, 1)), theta)
        np.testing.assert_allclose(y, own, rtol=1e-9, atol=1e-12)
    whole = StepContext(mode="train")
    layer.fprop(theta, tf.constant(X), whole)
    found, expected = new_statistics(layer, theta, *contexts), new_statistics(layer, theta, whole)
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-6)
    assert set(found) == {"moving_mean", "moving_variance"}


def test_batch_norm_of_replicas_uses_the_statistics_of_all() -> None:
    layer, theta = batch_norm()
    here, there = X[:1], X[1:]
    mean, variance = X.mean((0, 1)), X.var((0, 1))
    others = [there[..., 0].size, there.sum((0, 1)), ((there - mean) ** 2).sum((0, 1))]
    ctx = TwoReplicas([np.asarray(o, np.float64) for o in others])
    y = layer.fprop(theta, tf.constant(here), ctx)
    np.testing.assert_allclose(y, normalised(here, mean, variance, theta), rtol=1e-9, atol=1e-12)
    # What is collected is this replica's own part alone: the execution adds the parts up.
    _, weight = ctx.collected.sums["statistic"]["shift"]
    np.testing.assert_array_equal(weight, [5, 5, 5])


@pytest.mark.parametrize("broadcast", [False, True])
def test_batch_norm_does_not_count_padding(broadcast: bool) -> None:
    layer, theta = batch_norm()
    mask = np.array([[1, 1, 0, 1, 0]]) > 0
    if not broadcast:
        mask = np.repeat(mask, 4, 0)
        mask[2] = [1, 0, 0, 0, 0]
    counted = X[np.broadcast_to(mask, (4, 5))]
    ctx = StepContext(mode="train")
    y = layer.fprop(theta, tf.constant(X), ctx, mask=tf.constant(mask))
    np.testing.assert_allclose(
        y, normalised(X, counted.mean(0), counted.var(0), theta), rtol=1e-9, atol=1e-12
    )
    new = new_statistics(layer, theta, ctx)
    np.testing.assert_allclose(
        new["moving_mean"], 0.75 * theta.moving_mean + 0.25 * counted.mean(0), rtol=1e-6
    )


def test_batch_norm_of_padding_alone_stays_finite() -> None:
    layer, theta = batch_norm()
    ctx = StepContext(mode="train")
    y = layer.fprop(theta, tf.constant(X), ctx, mask=tf.zeros([4, 5], tf.bool))
    assert np.isfinite(y).all()
    for parts in ([ctx], [ctx, ctx]):  # a batch, and two micro-batches
        new = new_statistics(layer, theta, *parts)
        for name in ("moving_mean", "moving_variance"):
            np.testing.assert_array_equal(new[name], theta[name])


def test_batch_norm_moves_by_the_parts_that_are_not_padding_alone() -> None:
    layer, theta = batch_norm()
    empty, full = StepContext(mode="train"), StepContext(mode="train")
    layer.fprop(theta, tf.constant(X), empty, mask=tf.zeros([4, 5], tf.bool))
    layer.fprop(theta, tf.constant(X), full)
    expected = new_statistics(layer, theta, full)
    for parts in ([empty, full], [full, empty, empty]):
        found = new_statistics(layer, theta, *parts)
        for name in expected:
            np.testing.assert_array_equal(found[name], expected[name])


def test_batch_norm_stacked_keeps_the_statistics_of_layers_without_positions() -> None:
    layer, _ = batch_norm()
    theta = Theta(moving_mean=tf.ones([2, 3]), moving_variance=2 * tf.ones([2, 3]))
    counted = tf.constant([[0.0] * 3, [1.0] * 3])
    means = {"shift": 3 * counted, "square": 10 * counted, "count": counted}
    new = layer.updated_statistics(theta, means)
    np.testing.assert_allclose(new["moving_mean"], [[1] * 3, [1 + 0.25 * 3] * 3])
    np.testing.assert_allclose(new["moving_variance"], [[2] * 3, [0.75 * 2 + 0.25] * 3])


def test_batch_norm_gradient_is_that_of_the_formula() -> None:
    layer, theta = batch_norm()
    weights = np.random.default_rng(5).normal(size=X.shape)
    x = tf.constant(X)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch((x, theta))
        found = tf.reduce_sum(layer.fprop(theta, x, StepContext(mode="train")) * weights)
        mean, variance = tf.nn.moments(x, [0, 1])
        naive = (x - mean) / tf.sqrt(variance + EPSILON) * theta.scale + theta.bias
        expected = tf.reduce_sum(naive * weights)
    sources = [x, theta.scale, theta.bias]
    for f, e in zip(tape.gradient(found, sources), tape.gradient(expected, sources), strict=True):
        np.testing.assert_allclose(f, e, rtol=1e-9, atol=1e-12)


def test_batch_norm_far_from_zero_keeps_its_variance_in_float32() -> None:
    layer = BatchNorm.Params(dim=3).instantiate()
    x = (X + 1000).astype(np.float32)
    y = layer.fprop(layer.init(), tf.constant(x), StepContext(mode="train")).numpy()
    np.testing.assert_allclose(y.std((0, 1)), X.std((0, 1)) / np.sqrt(X.var((0, 1)) + 1e-3), 1e-2)
    theta = Theta(layer.init(), moving_mean=tf.constant(x.mean((0, 1))))
    ctx = StepContext(mode="train")
    layer.fprop(theta, tf.constant(x), ctx)
    new = new_statistics(layer, theta, ctx)
    np.testing.assert_allclose(new["moving_variance"], 0.99 + 0.01 * X.var((0, 1)), rtol=1e-4)


def test_batch_norm_stacked_over_layers_moves_every_layer() -> None:
    """Statistics of a scan come stacked, as the weights are."""
    layer, _ = batch_norm()
    theta = Theta(
        moving_mean=tf.constant([[0.0, 1, 2], [3, 4, 5]]), moving_variance=tf.ones([2, 3])
    )
    ctx = StepContext(mode="train")

    def body(_: Theta, state: tf.Tensor, weights: Theta, ctx: StepContext) -> Any:
        weights = Theta(weights, scale=tf.ones([3]), bias=tf.zeros([3]))
        return layer.fprop(weights, state, ctx), None

    x = tf.constant(X, tf.float32)
    ops.scan(ctx, body, Theta(), x, theta)
    sums = ctx.collected.sums["statistic"]
    means = {name: value / weight for name, (value, weight) in sums.items()}
    new = layer.updated_statistics(theta, means)
    assert new["moving_mean"].shape == (2, 3)
    np.testing.assert_allclose(
        new["moving_mean"][0], 0.75 * theta.moving_mean[0] + 0.25 * X.mean((0, 1)), rtol=1e-5
    )
    # The second layer sees what the first normalised: mean 0.
    np.testing.assert_allclose(new["moving_mean"][1], 0.75 * theta.moving_mean[1], atol=1e-6)


def test_batch_norm_keeps_bfloat16() -> None:
    layer, theta = batch_norm()
    for mode in ("train", "eval"):
        y = layer.fprop(theta, tf.cast(X, tf.bfloat16), StepContext(mode=mode))
        assert y.dtype == tf.bfloat16


def test_a_decay_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"decay 1.0 is not in \[0, 1\)"):
        BatchNorm.Params(dim=3, decay=1.0).instantiate()
