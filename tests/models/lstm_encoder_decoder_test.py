"""LstmEncoderDecoder: NumPy, padding, packing, decoding step by step, pieces, a little learning."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from sampling import sample

from tekso.framework import theta as theta_lib
from tekso.framework.context import StepContext
from tekso.framework.theta import Theta
from tekso.models.layers.embedding import Embedding
from tekso.models.layers.recurrent import RecurrentStack
from tekso.models.layers.recurrent_cells import LstmCell
from tekso.models.layers.recurrent_decoder import RecurrentDecoder
from tekso.models.layers.source_attention import AdditiveAttention, DotAttention
from tekso.models.lstm_encoder_decoder import LstmEncoderDecoder

SOURCES, TARGETS, DIM, UNITS, END = 13, 11, 3, 4, 1
PAIRS = [([5, 7, 3, END], [2, 9, END]), ([12, 4, END], [6, 6, 8, 10, END]), ([9, END], [3, END])]

MATRIX = pytest.mark.matrix
Batch = dict[str, tf.Tensor]
VARIANTS: dict[str, dict[str, Any]] = {
    "context additive": {},
    "context general": {"decoder.attention": DotAttention.Params()},
    "attentional additive": {"decoder.input_feeding": "attentional"},
    "attentional general": {
        "decoder.input_feeding": "attentional",
        "decoder.attention": DotAttention.Params(),
        "encoder.direction": "bidirectional",
    },
}

# Both forms of feeding and of attention; the matrix has their other combinations.
SOME_VARIANTS = [
    pytest.param(name, marks=[] if name in ("context additive", "attentional general") else MATRIX)
    for name in VARIANTS
]


def params(variant: str = "context additive", **more: Any) -> LstmEncoderDecoder.Params:
    cell = LstmCell.Params(hidden_dim=UNITS)
    given = LstmEncoderDecoder.Params(
        source_vocab_size=SOURCES,
        target_vocab_size=TARGETS,
        dim=DIM,
        source_embedding=Embedding.Params(),
        encoder=RecurrentStack.Params(
            num_layers=3, cell=cell, direction="bidirectional_first", residual="add"
        ),
        decoder=RecurrentDecoder.Params(
            num_layers=2, cell=cell, attention=AdditiveAttention.Params(), residual="add"
        ),
    )
    return given.set(VARIANTS[variant]).set(more)


def row(pairs: list[Any], source_length: int, target_length: int) -> dict[str, np.ndarray]:
    """One row of a batch: the pairs behind each other, then padding."""
    sides: dict[str, list[int]] = {}
    for number, (source, target) in enumerate(pairs, start=1):
        for name, ids in (
            ("source_ids", source),
            ("target_ids", [END, *target[:-1]]),
            ("target_labels", target),
            ("source_segment_ids", [number] * len(source)),
            ("target_segment_ids", [number] * len(target)),
        ):
            sides.setdefault(name, []).extend(ids)
    padded = {}
    for name, ids in sides.items():
        length = source_length if name.startswith("source") else target_length
        filling = 0 if "segment" in name else END
        padded[name] = np.array(ids + [filling] * (length - len(ids)), np.int32)
    return padded


def batch_of(*rows: dict[str, np.ndarray]) -> Batch:
    return {name: tf.constant(np.stack([r[name] for r in rows])) for name in rows[0]}


def batch(source_length: int = 6, target_length: int = 7) -> Batch:
    return batch_of(*(row([pair], source_length, target_length) for pair in PAIRS))


def built(variant: str = "context additive", **more: Any) -> tuple[LstmEncoderDecoder, Theta]:
    model = params(variant, **more).instantiate()
    rng = np.random.default_rng(1)
    weights = {p: rng.normal(size=s.shape) * 0.7 for p, s in model.specs().items()}
    return model, model.theta({p: tf.constant(w, tf.float32) for p, w in weights.items()})


def lstm(w: Any, xs: list[np.ndarray]) -> list[np.ndarray]:
    h, c, outputs = np.zeros(UNITS), np.zeros(UNITS), []
    for x in xs:
        gates = np.einsum("d,dgh->gh", x, w.w_input) + np.einsum("d,dgh->gh", h, w.w_recurrent)
        i, f, g, o = gates + w.b
        c = c / (1 + np.exp(-f - 1)) + np.tanh(g) / (1 + np.exp(-i))
        h = np.tanh(c) / (1 + np.exp(-o))
        outputs.append(h)
    return outputs


def test_one_pair_equals_numpy() -> None:
    """GNMT's form with additive attention, written out for one pair without padding."""
    model, theta = built()
    source, target = PAIRS[0]
    w = theta_lib.map_leaves(lambda t: t.numpy().astype(np.float64), theta)
    xs = list(w.source_embedding.table[source])
    ahead = lstm(w.encoder.layers["0"].forward.cell, xs)
    back = lstm(w.encoder.layers["0"].backward.cell, xs[::-1])[::-1]
    encoded = [np.concatenate(pair) for pair in zip(ahead, back, strict=True)]
    encoded = lstm(w.encoder.layers["1"].cell, encoded)
    above = lstm(w.encoder.layers["2"].cell, encoded)
    encoded = [x + y for x, y in zip(encoded, above, strict=True)]

    cells = [w.decoder.attentive.cells["0"], w.decoder.layers["0"].cell]
    a = w.decoder.attentive.attention
    h, c, fed = [np.zeros(UNITS)] * 2, [np.zeros(UNITS)] * 2, np.zeros(UNITS)
    expected, shares = [], []
    for token in [END, *target[:-1]]:
        x = w.target_embedding.table[token]
        for layer, cell in enumerate(cells):
            gates = np.einsum("d,dgh->gh", x, cell.w_input) + cell.b
            gates += np.einsum("d,dgh->gh", h[layer], cell.w_recurrent)
            if layer == 0:
                gates += np.einsum("d,dgh->gh", fed, w.decoder.attentive.w_feed)
            i, f, g, o = gates
            c[layer] = c[layer] / (1 + np.exp(-f - 1)) + np.tanh(g) / (1 + np.exp(-i))
            h[layer] = np.tanh(c[layer]) / (1 + np.exp(-o))
            if layer == 0:
                e = [a.w_score @ np.tanh(h[0] @ a.w_query + m @ a.w_key) for m in encoded]
                share = np.exp(e) / np.exp(e).sum()
                fed = share @ np.array(encoded)
                x = np.concatenate([h[0], fed])
        expected.append((h[0] + h[1]) @ w.softmax.w.T + w.softmax.b)
        shares.append(share)

    given = batch_of(row([PAIRS[0]], 4, 3))
    logits = model.logits(theta, given, StepContext())
    np.testing.assert_allclose(logits[0], expected, rtol=1e-4, atol=1e-5)
    found = model.attention(theta, given, StepContext())
    np.testing.assert_allclose(found[0], shares, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(model.fprop(theta, given, StepContext()), logits)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_is_that_of_the_logits(smoothing: float) -> None:
    model, theta = built()
    logits = model.logits(theta, batch(), StepContext()).numpy().astype(np.float64)
    assert logits.shape == (3, 7, TARGETS)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    labels = batch()["target_labels"].numpy()
    wanted = (1 - smoothing) * np.eye(TARGETS)[labels] + smoothing / TARGETS
    found = model.token_cross_entropy(theta, batch(), StepContext(), label_smoothing=smoothing)
    np.testing.assert_allclose(found, -(wanted * log_p).sum(-1), rtol=1e-5)


@pytest.mark.parametrize("variant", SOME_VARIANTS)
def test_padding_changes_nothing(variant: str) -> None:
    model, theta = built(variant)
    ctx = StepContext()
    for lengths in ((4, 5), (9, 8)):
        together = model.logits(theta, batch(*lengths), ctx)
        attention_weights = model.attention(theta, batch(*lengths), ctx)
        for n, (source, target) in enumerate(PAIRS):
            given = batch_of(row([PAIRS[n]], len(source), len(target)))
            alone = model.logits(theta, given, ctx)
            np.testing.assert_allclose(together[n, : len(target)], alone[0], rtol=1e-4, atol=1e-5)
            alone = model.attention(theta, given, ctx)[0]
            found = attention_weights[n, : len(target), : len(source)]
            np.testing.assert_allclose(found, alone, rtol=1e-4, atol=1e-6)
            np.testing.assert_array_equal(attention_weights[n, : len(target), len(source) :], 0)
            np.testing.assert_array_equal(attention_weights[n, len(target) :], 0)


def test_without_segments_all_counts() -> None:
    model, theta = built()
    given = batch_of(row([PAIRS[0]], 4, 3))
    bare = {name: value for name, value in given.items() if "segment" not in name}
    expected = model.logits(theta, given, StepContext())
    np.testing.assert_allclose(model.logits(theta, bare, StepContext()), expected, atol=1e-6)


@pytest.mark.parametrize("variant", SOME_VARIANTS)
def test_packed_pairs_are_read_as_if_alone(variant: str) -> None:
    model, theta = built(variant)
    ctx = StepContext()
    given = batch_of(row(PAIRS, 10, 12), row(PAIRS[1:], 10, 12))
    packed = model.logits(theta, given, ctx)
    for number, pairs in enumerate((PAIRS, PAIRS[1:])):
        start = 0
        for source, target in pairs:
            alone = batch_of(row([(source, target)], len(source), len(target)))
            found = packed[number, start : start + len(target)]
            expected = model.logits(theta, alone, ctx)[0]
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
            start += len(target)


@pytest.mark.parametrize(
    ("variant", "compiled"),
    [
        *((name, False) for name in VARIANTS),
        pytest.param("context additive", True, marks=pytest.mark.slow),
        pytest.param("attentional general", True, marks=pytest.mark.slow),
        pytest.param("context general", True, marks=MATRIX),
        pytest.param("attentional additive", True, marks=MATRIX),  # its loop is compiled below
    ],
)
def test_decoding_step_by_step_gives_the_logits_of_the_whole(variant: str, compiled: bool) -> None:
    model, theta = built(variant, dropout_rate=0.5)
    ctx, given = StepContext(mode="decode"), batch()
    expected = model.logits(theta, given, ctx)
    attention_weights = model.attention(theta, given, ctx)

    def run(ids: tf.Tensor, state: Any, position: tf.Tensor) -> Any:
        found = model.decode_step(theta, ids, state, position, ctx)
        return found.logits, found.attention, found.state

    step = tf.function(run, autograph=False, jit_compile=True) if compiled else run
    source = {name: value for name, value in given.items() if name.startswith("source")}
    state = model.start_decoding(theta, source, 7, ctx)
    structure = tf.nest.map_structure(lambda t: (tuple(t.shape), t.dtype), state)
    for t in range(5):
        logits, attention, state = step(given["target_ids"][:, t], state, tf.constant(t))
        assert structure == tf.nest.map_structure(lambda t: (tuple(t.shape), t.dtype), state)
        assert logits.dtype == attention.dtype == tf.float32
        for n, (_, target) in enumerate(PAIRS):
            if t < len(target):
                np.testing.assert_allclose(logits[n], expected[n, t], rtol=1e-4, atol=1e-5)
                np.testing.assert_allclose(
                    attention[n], attention_weights[n, t], rtol=1e-4, atol=1e-6
                )


@pytest.mark.parametrize(
    "variant", sample(["context additive", "attentional general"], quick=["context additive"])
)
def test_hypotheses_are_expanded_selected_and_share_their_source(variant: str) -> None:
    model, theta = built(variant)
    ctx, given, k = StepContext(mode="decode"), batch(), 2
    single = model.start_decoding(theta, given, 7, ctx)
    state = model.expand(single, k)
    sizes = [t.shape[0] for t in tf.nest.flatten(state["source"])]
    assert sizes == [3] * len(sizes)  # not repeated
    tokens = np.array([[3, 4], [5, 6], [7, 8]])
    rows = np.array([[1, 1], [1, 0], [0, 0]])
    after = model.decode_step(theta, tf.constant(tokens.reshape(-1)), state, tf.constant(0), ctx)
    flat_rows = (rows + 2 * np.arange(3)[:, None]).reshape(-1)
    state = model.select(after.state, tf.constant(flat_rows))
    found = model.decode_step(theta, tf.fill([6], 2), state, tf.constant(1), ctx)
    for n in range(6):
        # The same tokens, teacher forced, with the source alone.
        before = tokens[n // k, rows[n // k, n % k]]
        source = {name: v[n // k : n // k + 1] for name, v in given.items() if "source" in name}
        target = {"target_ids": [[before, 2]], "target_segment_ids": [[1, 1]]}
        pair = {**source, **{name: tf.constant(v) for name, v in target.items()}}
        expected = model.logits(theta, pair, ctx)[0, 1]
        np.testing.assert_allclose(found.logits[n], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_decoding_goes_through_a_compiled_loop() -> None:
    model, theta = built("attentional additive")
    ctx, given = StepContext(mode="decode"), batch()

    def greedy() -> tf.Tensor:
        def body(t: Any, ids: Any, state: Any, written: Any) -> Any:
            found = model.decode_step(theta, ids, state, t, ctx)
            ids = tf.argmax(found.logits, -1, tf.int32)
            written = tf.tensor_scatter_nd_update(written, [[t]], [ids])
            return t + 1, ids, found.state, written

        state = model.start_decoding(theta, given, 4, ctx)
        start = (tf.constant(0), tf.fill([3], END), state, tf.zeros([4, 3], tf.int32))
        return tf.while_loop(lambda t, *_: t < 4, body, start, maximum_iterations=4)[-1]

    found = tf.function(greedy, autograph=False, jit_compile=True)()
    written = np.zeros([3, 0], np.int32)
    for _ in range(4):
        ids = np.concatenate([np.full([3, 1], END, np.int32), written], 1)
        target = {"target_ids": ids, "target_segment_ids": np.ones_like(ids)}
        source = {name: v for name, v in given.items() if "source" in name}
        logits = model.logits(theta, {**source, **target}, ctx)
        written = np.concatenate([written, np.argmax(logits[:, -1:], -1).astype(np.int32)], 1)
    np.testing.assert_array_equal(tf.transpose(found), written)


@pytest.mark.parametrize("variant", VARIANTS)
def test_pieces_one_after_the_other_are_the_model(variant: str) -> None:
    more = {"dropout_rate": 0.25, "encoder.dropout_rate": 0.25, "decoder.dropout_rate": 0.25}
    model, theta = built(variant, **more)
    ctx = StepContext(mode="train", step=3)
    given = batch_of(row(PAIRS, 10, 12), row(PAIRS[1:], 10, 12))
    expected = model.token_cross_entropy(theta, given, ctx, label_smoothing=0.1)
    flat, flow = theta_lib.flatten(theta), dict(given)
    pieces = model.pieces(label_smoothing=0.1)
    for piece in pieces:
        own = {path: tensor for path, tensor in flat.items() if piece.owns(path)}
        flow = piece.run(piece.theta(own), flow, ctx)
    np.testing.assert_allclose(flow["cross_entropy"], expected, rtol=1e-5)
    assert all(sum(piece.owns(path) for piece in pieces) == 1 for path in flat)
    above = ["decoder/layers/0"] if "context" in variant else []
    assert [piece.name for piece in pieces] == [
        "source_embedding",
        *(f"encoder/layers/{i}" for i in range(3)),
        "target_embedding",
        "decoder/attentive",
        *above,
        "softmax",
    ]


def test_parts_of_a_batch_have_the_loss_of_the_whole_with_dropout() -> None:
    more = {"dropout_rate": 0.25, "encoder.dropout_rate": 0.25, "decoder.dropout_rate": 0.25}
    model, theta = built(**more)

    def loss(rows: slice, offset: int) -> tf.Tensor:
        ctx = StepContext(mode="train", seed=3, step=8, example_offset=offset)
        part = {name: value[rows] for name, value in batch().items()}
        return model.token_cross_entropy(theta, part, ctx)

    whole = loss(slice(0, 3), 0)
    np.testing.assert_allclose(loss(slice(1, 3), 1), whole[1:], rtol=1e-4)
    undropped = model.token_cross_entropy(theta, batch(), StepContext())
    assert np.abs(whole - undropped).max() > 1e-2


@pytest.mark.parametrize("shared", [False, True])
def test_tables_are_shared_where_they_are_left_out(shared: bool) -> None:
    changes: dict[str, Any] = {"source_vocab_size": TARGETS, "dim": UNITS}
    if shared:
        changes |= {"source_embedding": None, "softmax": None}
    model = params(**changes).instantiate()
    tables = {path: s.shape for path, s in model.specs().items() if TARGETS in s.shape}
    expected = {"target_embedding/table": (TARGETS, UNITS)}
    if not shared:
        expected |= {
            "source_embedding/table": (TARGETS, UNITS),
            "softmax/w": (TARGETS, UNITS),
            "softmax/b": (TARGETS,),
        }
    assert tables == expected
    theta = model.init()
    given = batch_of(row([([5, 7, END], [2, END])], 4, 3))
    loss = model.token_cross_entropy(theta, given, StepContext())
    flat, flow = theta_lib.flatten(theta), dict(given)
    for piece in model.pieces():
        own = {path: flat[path] for path in piece.weights(sorted(flat))}
        flow = piece.run(piece.theta(own), flow, StepContext())
    np.testing.assert_allclose(flow["cross_entropy"], loss, rtol=1e-5)


@pytest.mark.slow
def test_learns_pairs_by_heart() -> None:
    model = params("attentional general", dim=8).set(
        {"encoder.cell.hidden_dim": 12, "decoder.cell.hidden_dim": 12}
    )
    model = model.instantiate()
    weights = {path: tf.Variable(t) for path, t in theta_lib.flatten(model.init()).items()}
    given = batch()
    counted = tf.cast(given["target_segment_ids"] > 0, tf.float32)

    def mean(theta: Theta, ctx: StepContext) -> tf.Tensor:
        losses = model.token_cross_entropy(theta, given, ctx)
        return tf.reduce_sum(losses * counted) / tf.reduce_sum(counted)

    @tf.function(autograph=False)
    def step() -> None:
        flat = {path: tf.convert_to_tensor(v) for path, v in weights.items()}
        with tf.GradientTape() as tape:
            tape.watch(flat)
            loss = mean(model.theta(flat), StepContext(mode="train"))
        for path, gradient in tape.gradient(loss, flat).items():
            weights[path].assign_sub(tf.sign(tf.convert_to_tensor(gradient)) * 0.01)

    for _ in range(120):
        step()
    theta = model.theta({path: tf.convert_to_tensor(v) for path, v in weights.items()})
    assert float(mean(theta, StepContext())) < 0.2  # from log(11) = 2.4


def test_the_number_of_units_is_dim_where_it_is_left_open() -> None:
    model = LstmEncoderDecoder.Params(source_vocab_size=7, target_vocab_size=7, dim=6).instantiate()
    shapes = {path: s.shape for path, s in model.specs().items()}
    assert shapes["encoder/layers/1/cell/w_input"] == (12, 4, 6)
    assert shapes["decoder/layers/0/cell/w_input"] == (12, 4, 6)
    assert shapes["softmax/w"] == (7, 6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source_embedding": None}, "source_vocab_size 13 and target_vocab_size 11 differ"),
        ({"softmax": None}, "output has 4 elements, but an embedded token has 3"),
        ({"softmax.vocab_size": 12}, "vocab_size is 12"),
        ({"decoder.memory_dim": 9}, "memory_dim is 9"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        params(**changes).instantiate()
