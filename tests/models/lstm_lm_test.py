"""LstmLm: counts, loss, packing, decoding from a cache, and a little learning."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework import ops
from tekso.framework import theta as theta_lib
from tekso.framework.context import StepContext
from tekso.framework.primitives.fusion import Fuse, XlaFusion, no_fusion
from tekso.models import lstm_lm
from tekso.models.layers.embedding import Embedding
from tekso.models.layers.recurrent import RecurrentStack
from tekso.models.layers.recurrent_cells import GruCell, LstmCell, RecurrentCell
from tekso.models.layers.softmax import SampledSoftmax, Softmax
from tekso.models.lstm_lm import LstmLm

VOCAB = 11
RESIDUAL = RecurrentStack.Params(num_layers=1, cell=LstmCell.Params(hidden_dim=4), residual="add")
IDS = np.array([[1, 7, 3, 0, 10], [4, 4, 9, 2, 5]])
LABELS = np.array([[7, 3, 0, 10, 2], [4, 9, 2, 5, 8]])


def params(**kwargs: Any) -> LstmLm.Params:
    given = {
        "vocab_size": VOCAB,
        "embedding_dim": 3,
        "stack": RecurrentStack.Params(
            num_layers=2, cell=LstmCell.Params(hidden_dim=5, projection_dim=4)
        ),
    }
    return LstmLm.Params(**(given | kwargs))


def big() -> LstmLm.Params:
    return LstmLm.Params(
        vocab_size=793_472,
        embedding_dim=1024,
        stack=RecurrentStack.Params(
            num_layers=2, cell=LstmCell.Params(hidden_dim=8192, projection_dim=1024)
        ),
        softmax=SampledSoftmax.Params(num_samples=8192, use_bias=True),
    )


def test_weights_of_the_big_one_are_counted_from_specs() -> None:
    """LSTM-8192-1024 over 793,472 words; the paper prints 1.8 B (1.04 B without the embedding)."""
    specs = big().instantiate().specs()
    v, d, h = 793_472, 1024, 8192
    layer = 4 * h * (d + d) + 4 * h + h * d
    assert sum(s.size for s in specs.values()) == v * d + 2 * layer + v * d + v
    assert all(len(s.dims) == len(s.shape) for s in specs.values())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_is_that_of_the_logits(smoothing: float) -> None:
    model = params().instantiate()
    theta, ctx = model.init(), StepContext()
    logits = model.logits(theta, tf.constant(IDS), ctx).numpy().astype(np.float64)
    assert logits.shape == (2, 5, VOCAB)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    target = (1 - smoothing) * np.eye(VOCAB)[LABELS] + smoothing / VOCAB
    found = model.token_cross_entropy(
        theta, tf.constant(IDS), tf.constant(LABELS), ctx, label_smoothing=smoothing
    )
    np.testing.assert_allclose(found, -(target * log_p).sum(-1), rtol=1e-5)
    np.testing.assert_array_equal(model.fprop(theta, tf.constant(IDS), ctx), logits)


def test_logits_are_those_of_embedding_stack_and_softmax() -> None:
    model = params().instantiate()
    theta, ctx = model.init(), StepContext()
    x = model.embedding.fprop(theta.embedding, tf.constant(IDS), ctx)
    y = model.stack.fprop(theta.stack, x, ctx)
    expected = np.asarray(y) @ np.asarray(theta.softmax.w).T + theta.softmax.b
    np.testing.assert_allclose(model.logits(theta, tf.constant(IDS), ctx), expected, atol=1e-6)


class Doubled(RecurrentStack):
    def fprop(self, theta: Any, x: tf.Tensor, ctx: StepContext, **flags: Any) -> tf.Tensor:
        return 2 * super().fprop(theta, x, ctx, **flags)


class OwnCell(LstmCell):
    """Input products that differ from position to position."""

    def project_inputs(self, theta: Any, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        return super().project_inputs(theta, x, ctx) + 1.0


OWN_CELL = OwnCell.Params(hidden_dim=4)


class Shifted(Embedding):
    def fprop(self, theta: Any, ids: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        return super().fprop(theta, ids, ctx) + 1.0


SHORT = np.array([[1, 2, 1, 0, 0], [2, 2, 1, 2, 0]])  # 10 tokens, of 3 different ones


def projected(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Records the shapes of the inputs of which cells compute input products."""
    shapes: list[list[int]] = []
    original = RecurrentCell.project_inputs

    def recording(self: Any, theta: Any, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        shapes.append(x.shape.as_list())
        return original(self, theta, x, ctx)

    monkeypatch.setattr(RecurrentCell, "project_inputs", recording)
    return shapes


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("cell", [LstmCell, GruCell])
def test_input_products_of_few_different_tokens_are_of_the_table(
    monkeypatch: pytest.MonkeyPatch, cell: Any, packed: bool
) -> None:
    stack = RecurrentStack.Params(num_layers=2, cell=cell.Params(hidden_dim=4))
    model = params(vocab_size=3, stack=stack).instantiate()
    weights, shapes = theta_lib.flatten(model.init()), projected(monkeypatch)
    segments = tf.constant([[1, 1, 2, 2, 0], [1, 2, 2, 2, 2]]) if packed else None
    found, ctx = [], StepContext(fuse=XlaFusion())
    for min_dim in (3, 4):
        monkeypatch.setattr(lstm_lm, "_MIN_DIM", min_dim)
        with tf.GradientTape() as tape:
            tape.watch(weights)
            theta = theta_lib.unflatten(weights)
            y = model.logits(theta, tf.constant(SHORT), ctx, segment_ids=segments)
            loss = tf.reduce_sum(tf.sin(3 * y))
        gradients = tape.gradient(loss, weights)
        found.append([y, *(tf.convert_to_tensor(gradients[path]) for path in sorted(weights))])
    for mine, expected in zip(*found, strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-6)
    assert shapes == [[3, 3], [5, 2, 4], [5, 2, 3], [5, 2, 4]]


@pytest.mark.parametrize(
    ("kwargs", "mode", "fuse"),
    [
        ({"dropout_rate": 0.5}, "train", XlaFusion()),  # each position drops other units
        ({"vocab_size": 6}, "eval", XlaFusion()),  # more rows than half of the tokens
        ({}, "decode", XlaFusion()),
        ({}, "eval", no_fusion),
        ({"embedding_dim": 2}, "eval", XlaFusion()),
        ({"stack": RESIDUAL}, "eval", XlaFusion()),
        (
            {"stack": Doubled.Params(num_layers=1, cell=LstmCell.Params(hidden_dim=4))},
            "eval",
            XlaFusion(),
        ),
        ({"stack": RecurrentStack.Params(num_layers=1, cell=OWN_CELL)}, "eval", XlaFusion()),
        ({"embedding": Shifted.Params()}, "eval", XlaFusion()),
    ],
)
def test_other_input_products_are_of_the_tokens(
    monkeypatch: pytest.MonkeyPatch, kwargs: Any, mode: Any, fuse: Fuse
) -> None:
    monkeypatch.setattr(lstm_lm, "_MIN_DIM", 3)
    model = params(**({"vocab_size": 3} | kwargs)).instantiate()
    shapes = projected(monkeypatch)
    model.logits(model.init(), tf.constant(SHORT), StepContext(mode=mode, fuse=fuse))
    assert shapes[0] == [5, 2, model.params.embedding_dim]


def test_a_token_does_not_see_what_follows() -> None:
    model = params().instantiate()
    theta, ctx = model.init(), StepContext()
    other = IDS.copy()
    other[:, 3:] = 6
    first, second = (model.logits(theta, tf.constant(ids), ctx) for ids in (IDS, other))
    np.testing.assert_array_equal(first[:, :3], second[:, :3])
    assert np.abs(first[:, 3:] - second[:, 3:]).max() > 1e-3


@pytest.mark.parametrize("blocks", [[1, 1, 1, 1, 1], [3, 2], [5]])
@pytest.mark.parametrize("cell", [LstmCell.Params(hidden_dim=5), GruCell.Params(hidden_dim=5)])
def test_extending_from_a_cache_gives_the_logits_of_the_whole(blocks: list[int], cell: Any) -> None:
    stack = RecurrentStack.Params(num_layers=2, cell=cell, residual="add")
    model = params(stack=stack, dropout_rate=0.5).instantiate()
    theta, ctx = model.init(), StepContext(mode="decode")
    expected = model.logits(theta, tf.constant(IDS), ctx)
    cache, start = model.init_cache(2, 5), 0
    for size in blocks:
        ids = tf.constant(IDS[:, start : start + size])
        last, _ = model.extend_step(theta, ids, cache, start, ctx, logits_of="last")
        logits, cache = model.extend_step(theta, ids, cache, start, ctx)
        np.testing.assert_allclose(logits, expected[:, start : start + size], atol=1e-6)
        np.testing.assert_allclose(last, logits[:, -1:], atol=1e-6)
        start += size


def test_packed_texts_are_read_as_if_alone() -> None:
    model = params().instantiate()
    theta, ctx = model.init(), StepContext()
    segments = tf.constant([[1, 1, 2, 2, 2], [1, 1, 1, 1, 0]])
    packed = model.logits(theta, tf.constant(IDS), ctx, segment_ids=segments)
    for row, part in ((0, slice(0, 2)), (0, slice(2, 5)), (1, slice(0, 4))):
        alone = model.logits(theta, tf.constant(IDS[row : row + 1, part]), ctx)
        np.testing.assert_allclose(packed[row : row + 1, part], alone, atol=1e-6)


def test_dropout_acts_after_the_embedding_between_layers_and_before_the_softmax() -> None:
    model = params(dropout_rate=0.5).instantiate()
    theta = model.init()
    ctx = StepContext(mode="train", seed=2)
    x = model.embedding.fprop(theta.embedding, tf.constant(IDS), ctx)
    x = ops.dropout(ctx.fold(0), x, 0.5, model.dropout)
    y = model.stack.fprop(theta.stack, x, ctx)
    y = ops.dropout(ctx.fold(1), y, 0.5, model.dropout)
    expected = model.softmax.logits(theta.softmax, y, ctx)
    np.testing.assert_allclose(model.logits(theta, tf.constant(IDS), ctx), expected, atol=1e-6)


def test_parts_of_a_batch_have_the_loss_of_the_whole_with_dropout_and_sampling() -> None:
    softmax = SampledSoftmax.Params(num_samples=6, use_bias=True)
    model = params(dropout_rate=0.25, softmax=softmax).instantiate()
    theta = model.init()

    def loss(rows: slice, offset: int) -> tf.Tensor:
        ctx = StepContext(mode="train", seed=3, step=8, example_offset=offset)
        ids, labels = tf.constant(IDS[rows]), tf.constant(LABELS[rows])
        return model.token_cross_entropy(theta, ids, labels, ctx)

    whole = loss(slice(0, 2), 0)
    np.testing.assert_allclose(loss(slice(1, 2), 1), whole[1:], rtol=1e-5)


@pytest.mark.parametrize(
    "softmax", [Softmax.Params(use_bias=True), SampledSoftmax.Params(num_samples=8, use_bias=True)]
)
def test_learns_a_text_by_heart(softmax: Softmax.Params) -> None:
    model = (
        params(softmax=softmax, embedding_dim=8).set({"stack.cell.hidden_dim": 16}).instantiate()
    )
    weights = {path: tf.Variable(t) for path, t in theta_lib.flatten(model.init()).items()}
    ids, labels = tf.constant(IDS), tf.constant(LABELS)

    @tf.function(autograph=False)
    def step(number: tf.Tensor) -> None:
        flat = {path: tf.convert_to_tensor(v) for path, v in weights.items()}
        ctx = StepContext(mode="train", step=number)
        with tf.GradientTape() as tape:
            tape.watch(flat)
            losses = model.token_cross_entropy(model.theta(flat), ids, labels, ctx)
            loss = tf.reduce_mean(losses)
        for path, gradient in tape.gradient(loss, flat).items():
            weights[path].assign_sub(tf.sign(tf.convert_to_tensor(gradient)) * 0.01)

    for number in range(150):
        step(tf.constant(number, tf.int64))
    theta = model.theta({path: tf.convert_to_tensor(v) for path, v in weights.items()})
    final = model.token_cross_entropy(theta, ids, labels, StepContext())
    assert float(tf.reduce_mean(final)) < 0.4  # from log(11) = 2.4


@pytest.mark.parametrize("packed", [False, True])
def test_pieces_one_after_the_other_are_the_model(packed: bool) -> None:
    model = params(dropout_rate=0.25).set({"stack.dropout_rate": 0.25}).instantiate()
    theta, ctx = model.init(), StepContext(mode="train", step=3)
    flow = {"ids": tf.constant(IDS), "labels": tf.constant(LABELS)}
    if packed:
        flow["segment_ids"] = tf.constant([[1, 1, 2, 2, 2], [1, 1, 1, 1, 0]])
    expected = model.token_cross_entropy(
        theta,
        flow["ids"],
        flow["labels"],
        ctx,
        segment_ids=flow.get("segment_ids"),
        label_smoothing=0.1,
    )
    flat, pieces = theta_lib.flatten(theta), model.pieces(label_smoothing=0.1)
    for piece in pieces:
        own = {path: tensor for path, tensor in flat.items() if piece.owns(path)}
        flow = piece.run(piece.theta(own), flow, ctx)
    np.testing.assert_allclose(flow["cross_entropy"], expected, rtol=1e-5)
    assert all(sum(piece.owns(path) for piece in pieces) == 1 for path in flat)


def test_a_stack_that_sees_what_follows_is_refused() -> None:
    with pytest.raises(ValueError, match="predicted from itself"):
        params().set({"stack.direction": "bidirectional"}).instantiate()


def test_sizes_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size is 12"):
        params(softmax=Softmax.Params(vocab_size=12)).instantiate()
    with pytest.raises(ValueError, match="input_dim is 9"):
        params(softmax=Softmax.Params(input_dim=9)).instantiate()
