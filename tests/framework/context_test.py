"""The plain step context: modes, randomness by position, what is collected, and its primitives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework import ops
from tekso.framework.context import StepContext, collecting_attention, isolated
from tekso.framework.execution.replica_context import ReplicaContext
from tekso.framework.layer import Layer


class Leaf(Layer):
    pass


class Tree(Layer):
    def __init__(self, params: Layer.Params) -> None:
        super().__init__(params)
        self.child("a", Leaf.Params())
        self.child("b", Leaf.Params())


class Unrolled(Layer):
    def __init__(self, params: Layer.Params) -> None:
        super().__init__(params)
        self.child_list("layers", [Leaf.Params()] * 3)


class Stacked(Layer):
    def __init__(self, params: Layer.Params) -> None:
        super().__init__(params)
        self.child_stack("layers", Leaf.Params(), 3)


@pytest.fixture
def tree() -> Tree:
    return Tree.Params().instantiate()


def train(**kwargs: object) -> StepContext:
    return StepContext(mode="train", **kwargs)


def test_only_train_is_training() -> None:
    assert [StepContext(mode=m).is_training for m in ("train", "eval", "decode")] == [1, 0, 0]
    assert not StepContext().is_training


@pytest.mark.parametrize("mode", ["training", "evaluate", "", None])
def test_an_unknown_mode_is_refused(mode: Any) -> None:
    message = f"^StepContext: mode is {mode!r}, but must be 'train', 'eval' or 'decode'$"
    with pytest.raises(ValueError, match=message):
        StepContext(mode=mode)


def test_constrain_is_the_identity() -> None:
    x = tf.ones([2, 3])
    assert StepContext().constrain(x, ("batch", "embed")) is x


def test_dropout_acts_in_training_only(tree: Tree) -> None:
    x = tf.ones([40, 50])
    assert ops.dropout(StepContext(mode="eval"), x, 0.5, tree.a) is x
    assert ops.dropout(train(), x, 0.0, tree.a) is x
    y = ops.dropout(train(), x, 0.25, tree.a).numpy()
    assert set(np.unique(y)) == {np.float32(0), np.float32(1 / 0.75)}
    assert abs((y == 0).mean() - 0.25) < 5 * np.sqrt(0.25 * 0.75 / 2000)


def test_dropout_differs_by_seed_step_layer_and_name(tree: Tree) -> None:
    x = tf.ones([20, 30])
    masks = [
        ops.dropout(train(seed=1, step=1), x, 0.5, tree.a),
        ops.dropout(train(seed=2, step=1), x, 0.5, tree.a),
        ops.dropout(train(seed=1, step=2), x, 0.5, tree.a),
        ops.dropout(train(seed=1, step=1), x, 0.5, tree.b),
        ops.dropout(train(seed=1, step=1), x, 0.5, tree.a, "second"),
        ops.dropout(train(seed=1, step=1).fold(0), x, 0.5, tree.a),
        ops.dropout(train(seed=1, step=1).fold(1), x, 0.5, tree.a),
    ]
    for i, a in enumerate(masks):
        for b in masks[:i]:
            assert 0.4 < float(tf.reduce_mean(tf.cast(a == b, tf.float32))) < 0.6
    np.testing.assert_array_equal(masks[0], ops.dropout(train(seed=1, step=1), x, 0.5, tree.a))


def test_layers_of_a_list_and_of_a_stack_draw_from_one_stream() -> None:
    """What tells them apart is the turn: `fold(i)`, by the loop over the layers."""
    layers = [*Unrolled.Params().instantiate().layers, Stacked.Params().instantiate().layers]
    assert len({int(train().random_key(layer)) for layer in layers}) == 1


@pytest.mark.parametrize("offset", [3, tf.constant(3), tf.constant(3, tf.int64)])
def test_a_part_of_the_batch_draws_by_its_global_position(tree: Tree, offset: object) -> None:
    whole = train(seed=5, step=2)
    part = train(seed=5, step=2, example_offset=offset)
    np.testing.assert_array_equal(part.uniform(tree.a, [2, 4]), whole.uniform(tree.a, [5, 4])[3:])
    shared = [ctx.uniform(tree.a, [2, 4], shared=True) for ctx in (part, whole)]
    np.testing.assert_array_equal(*shared)
    np.testing.assert_array_equal(shared[0], whole.uniform(tree.a, [2, 4]))
    np.testing.assert_array_equal(part.normal(tree.a, [2, 4]), whole.normal(tree.a, [5, 4])[3:])
    shared = [ctx.normal(tree.a, [2, 4], shared=True) for ctx in (part, whole)]
    np.testing.assert_array_equal(*shared)
    np.testing.assert_array_equal(shared[0], whole.normal(tree.a, [2, 4]))
    assert not np.array_equal(shared[0], whole.normal(tree.a, [2, 4], "other"))
    x = tf.reshape(tf.range(20.0), [5, 4])
    np.testing.assert_array_equal(
        ops.dropout(part, x[3:], 0.5, tree.a), ops.dropout(whole, x, 0.5, tree.a)[3:]
    )
    q = tf.random.stateless_normal([5, 3, 2, 4], [1, 2])
    attended = ops.attend(whole, q, q, q, scale=0.5, dropout_rate=0.5, layer=tree.a)
    again = ops.attend(part, q[3:], q[3:], q[3:], scale=0.5, dropout_rate=0.5, layer=tree.a)
    np.testing.assert_allclose(again, attended[3:], rtol=1e-6)


def test_attend_with_dropout_needs_the_layer() -> None:
    q = tf.ones([2, 3, 2, 4])
    with pytest.raises(ValueError, match="requires the argument layer"):
        ops.attend(train(), q, q, q, scale=1.0, dropout_rate=0.5)
    ops.attend(StepContext(), q, q, q, scale=1.0, dropout_rate=0.5)  # outside training it does not


def test_losses_are_means_over_the_global_batch() -> None:
    parts = [train(num_examples=8), train(num_examples=8)]
    for ctx in parts:
        ctx.collect_loss("balance", tf.constant(4.0))
        ctx.collect_loss("balance", tf.constant(2.0))
        ctx.collect_loss("z", tf.constant(1.0))
    assert float(parts[0].collected.total("loss")) == (4 + 2 + 1) / 8
    assert float(StepContext().collected.total("loss")) == 0


def test_loss_without_the_size_of_the_batch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'balance'.*num_examples"):
        train().collect_loss("balance", tf.constant(1.0))


@pytest.mark.parametrize("mode", ["eval", "decode"])
def test_decoding_and_predictions_need_no_losses(mode: Any) -> None:
    ctx = StepContext(mode=mode)
    ctx.collect_loss("balance", tf.constant(1.0))
    assert float(ctx.collected.total("loss")) == 0


def test_metrics_and_statistics_are_sums_with_weights(tree: Tree) -> None:
    ctx = train()
    ctx.collect_metric("accuracy", tf.constant(3), 4)
    ctx.fold(1).collect_metric("accuracy", tf.constant(1), tf.constant(2))
    ctx.collect_statistic(tree.a, "mean", tf.constant([1.0, 2.0]), 5)
    value, weight = ctx.collected.sums["metric"]["accuracy"]
    assert (float(value), float(weight), value.dtype) == (4.0, 6.0, tf.float32)
    assert list(ctx.collected.sums["statistic"]) == ["a/mean"]
    np.testing.assert_array_equal(ctx.collected.sums["statistic"]["a/mean"], [[1, 2], [5, 5]])


def test_attention_weights_are_those_of_the_last_layer_and_computed_on_request_alone() -> None:
    def never() -> tf.Tensor:
        raise AssertionError("not requested")

    ctx = train(num_examples=2)
    ctx.collected.add_attention(never)
    requesting = collecting_attention(ctx)
    requesting.collected.add_attention(never)
    requesting.fold(1).collected.add_attention(lambda: tf.ones([2, 3, 5]) / 5)
    isolated(requesting).collected.add_attention(never)
    requesting.collect_loss("balance", tf.constant(4.0))

    np.testing.assert_allclose(requesting.collected.attention_weights(), np.full([2, 3, 5], 0.2))
    assert float(ctx.collected.total("loss")) == 2.0
    for other in (ctx, collecting_attention(requesting)):
        with pytest.raises(ValueError, match=r"no layer has added .*collected\.add_attention"):
            other.collected.attention_weights()


def test_metrics_of_one_name_of_the_task_and_its_layers_are_added() -> None:
    ctx = train()
    ctx.collect_metric("accuracy", tf.constant(3), 4)
    ctx.collect_metric("own", tf.constant(1), 2)
    of_task = {"accuracy": (tf.constant(2.0, tf.float64), 6)}
    reported = ctx.collected.reported(of_task)
    assert {n: tuple(map(float, p)) for n, p in reported.items()} == {
        "accuracy": (5.0, 10.0),
        "own": (1.0, 2.0),
    }
    assert reported["accuracy"][0].dtype == tf.float64


@pytest.mark.parametrize("name", ["loss", "total_loss"])
def test_a_metric_named_as_a_loss_is_refused(name: str) -> None:
    ctx = train()
    with pytest.raises(ValueError, match=f"'{name}'.*another name"):
        ctx.collected.reported({name: (tf.constant(1.0), 1.0)})
    ctx.collect_metric(name, tf.constant(1), 2)
    with pytest.raises(ValueError, match=f"'{name}'.*another name"):
        ctx.collected.reported({})


def test_an_isolated_context_collects_for_itself(tree: Tree) -> None:
    ctx = train(seed=3, num_examples=2)
    inner = isolated(ctx)
    inner.collect_loss("l", tf.constant(1.0))
    assert ctx.collected.sums["loss"] == {}
    assert int(inner.random_key(tree.a)) == int(ctx.random_key(tree.a))
    ctx.collected.merge(inner.collected.sums)
    ctx.collected.merge(inner.collected.sums)
    assert float(ctx.collected.total("loss")) == 1.0


def test_a_part_that_is_not_trained_is_evaluated_and_collects_nothing(tree: Tree) -> None:
    ctx = train(seed=3, num_examples=2)
    frozen = ctx.evaluating()
    assert (frozen.mode, frozen.num_examples, ctx.mode) == ("eval", 2, "train")
    assert ops.dropout(frozen, x := tf.ones([2, 3]), 0.5, tree.a) is x
    assert int(frozen.random_key(tree.a)) == int(ctx.random_key(tree.a))
    frozen.collect_loss("l", tf.constant(1.0))
    frozen.collect_metric("m", tf.constant(1.0), 1.0)
    frozen.collect_statistic(tree.a, "s", tf.ones([2]), tf.ones([2]))
    assert not any(ctx.collected.sums.values())


def test_sum_over_replicas_is_the_identity_on_one_device(tree: Tree) -> None:
    x = tf.ones([2])
    assert ops.sum_over_replicas(StepContext(), x, tree.a) is x


def test_a_sum_over_replicas_notes_its_layer(tree: Tree) -> None:
    ctx = ReplicaContext(all_reduce=lambda x: 2 * x)
    assert ops.sum_over_replicas(ctx, tf.ones([2]), tree.a).numpy().tolist() == [2.0, 2.0]
    assert ctx.summed == {tree.a.path}


def test_primitives_compute_what_they_say() -> None:
    rng = np.random.default_rng(0)
    x, w, b = (rng.normal(size=shape) for shape in ((2, 3, 4), (4, 5), 5))
    table, scale = rng.normal(size=(7, 4)), rng.normal(size=4)
    labels = np.array([[1, 0, 6], [3, 3, 2]])
    ctx = StepContext()
    np.testing.assert_allclose(
        ops.project(ctx, *map(tf.constant, (x, w, b))), x @ w + b, rtol=1e-12
    )
    np.testing.assert_allclose(ops.activate(ctx, "relu", tf.constant(x)), np.maximum(x, 0))
    np.testing.assert_array_equal(ops.lookup(ctx, table, labels), table[labels])
    rms = x / np.sqrt((x**2).mean(-1, keepdims=True) + 0.1) * scale
    np.testing.assert_allclose(
        ops.rms_norm(ctx, tf.constant(x), tf.constant(scale), epsilon=0.1), rms, rtol=1e-12
    )
    centred = x - x.mean(-1, keepdims=True)
    norm = centred / np.sqrt(x.var(-1, keepdims=True) + 0.1) * scale + w[:, 0]
    np.testing.assert_allclose(
        ops.layer_norm(ctx, tf.constant(x), tf.constant(scale), tf.constant(w[:, 0]), epsilon=0.1),
        norm,
        rtol=1e-12,
    )
    logits = x @ table.T
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -np.take_along_axis(log_p, labels[..., None], -1)[..., 0]
    np.testing.assert_allclose(
        ops.cross_entropy(ctx, tf.constant(x), tf.constant(table), labels), expected, rtol=1e-12
    )
