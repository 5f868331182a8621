"""SavedModels of functions of any size: filled up, computed some at a time, cut again."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.exports import (
    ExportedFunction,
    ExportedInput,
    ExportedOutput,
    ExportedTexts,
    lengths_up_to,
)
from tekso.framework.initializers import Normal
from tekso.framework.layer import Layer
from tekso.framework.run import export, litert, saved_model
from tekso.framework.run.checkpoint_files import (
    CheckpointError,
    Description,
    open_verified,
    write,
)
from tekso.framework.run.litert import LiteRtError
from tekso.framework.run.weights import weights_of
from tekso.models.layers.normalization import BatchNorm
from tekso.models.layers.stack import RepeatedStack

TABLE = np.arange(12, dtype=np.float32) ** 2


class Table(Layer):
    """A table; a row of ids is answered by its entries, and their sum over what is no padding."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.weight("table", [12], dims=("vocab",), init=Normal.Params())
        self.lengths_traced: list[tuple[int, int]] = []

    def look_up(self, theta: Any, ids: Any, offsets: Any, ctx: Any) -> dict[str, Any]:
        self.lengths_traced.append(tuple(ids.shape))
        entries = tf.gather(theta.table, ids)
        drawn = ctx.uniform(self, [ids.shape[0]], "draw")
        total = tf.reduce_sum(entries, 1) + tf.cast(offsets, tf.float32)
        return {"entries": entries, "doubled": 2 * entries, "total": total, "drawn": drawn}

    def exported(self, **settings: Any) -> ExportedFunction:
        return ExportedFunction(
            doc="Looks up.",
            function=self.look_up,
            inputs={
                "ids": ExportedInput("ids", has_length=True),
                "offsets": ExportedInput("added"),
            },
            outputs={
                "entries": ExportedOutput("entries", padding=-1),
                "doubled": ExportedOutput("twice the entries", length_of="ids"),
                "total": ExportedOutput("sums"),
                "drawn": ExportedOutput("random"),
            },
            lengths=[3, 5, 8],
            **settings,
        )


@pytest.fixture
def layer() -> Table:
    return Table.Params().instantiate()


def module_of(layer: Table, seed: int = 3) -> saved_model.ExportModule:
    return saved_model.ExportModule(layer, {"table": TABLE}, seed=seed)


def ids(count: int, length: int) -> np.ndarray:
    return np.random.default_rng(count + length).integers(1, 12, [count, length], np.int32)


def test_any_number_of_rows_of_any_length_up_to_the_longest(layer: Table) -> None:
    signature = module_of(layer).signature(layer.exported(), batch_size=4)
    assert set(layer.lengths_traced) == {(b, n) for b in (1, 4) for n in (3, 5, 8)}
    for count, length in itertools.product((0, 1, 2, 4, 7), (1, 3, 4, 8)):
        rows, offsets = ids(count, length), np.arange(count, dtype=np.int32)
        found = signature(ids=tf.constant(rows), offsets=tf.constant(offsets))
        np.testing.assert_array_equal(found["total"], TABLE[rows].sum(1) + offsets)
        assert found["entries"].shape == (count, 8)
        np.testing.assert_array_equal(found["entries"][:, :length], TABLE[rows])
        np.testing.assert_array_equal(found["doubled"], 2 * TABLE[rows])
        bucket = next(n for n in (3, 5, 8) if n >= length)
        assert (found["entries"].numpy()[:, length:bucket] == 0).all()  # id 0, which fills up
        assert (found["entries"].numpy()[:, bucket:] == -1).all()
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="rows of ids are longer than the exported maximum, 8"
    ):
        signature(ids=tf.constant(ids(2, 9)), offsets=tf.constant([0, 0]))


class Words(Layer):
    """Weighs the characters of words by their place in the word, and adds them up."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.weight("table", [12], dims=("vocab",), init=Normal.Params())

    def read(self, theta: Any, words: Any, numbers: Any, ctx: Any) -> dict[str, Any]:
        ids = tf.reshape(words, [words.shape[0], words.shape[1], 3])  # fails for other shapes
        vectors = tf.gather(theta.table, ids) * tf.constant([1.0, 2.0, 3.0])
        return {"sums": tf.reduce_sum(vectors, 2) + numbers[:, :, 1]}

    def exported(self) -> ExportedFunction:
        return ExportedFunction(
            doc="Reads words.",
            function=self.read,
            inputs={
                "words": ExportedInput("characters", has_length=True, shape=(3,)),
                "numbers": ExportedInput(
                    "of each word", tf.float32, has_length=True, shape=(2,), padding=7
                ),
            },
            outputs={"sums": ExportedOutput("sums")},
            lengths=[2, 5],
        )


def test_rows_of_vectors_are_padded_in_their_length_only() -> None:
    layer = Words.Params().instantiate()
    signature = module_of(layer).signature(layer.exported(), batch_size=4)
    for count, length in itertools.product((0, 1, 5), (1, 2, 4)):
        words = np.random.default_rng(count).integers(1, 12, [count, length, 3], np.int32)
        numbers = np.random.default_rng(length).normal(size=(count, length, 2)).astype("float32")
        found = signature(words=tf.constant(words), numbers=tf.constant(numbers))["sums"]
        wanted = (TABLE[words] * [1, 2, 3]).sum(2) + numbers[:, :, 1]
        np.testing.assert_allclose(found[:, :length], wanted, rtol=1e-6)
        bucket = next(n for n in (2, 5) if n >= length)
        assert (found.numpy()[:, length:bucket] == 7).all()  # table[0] is 0, padding of numbers 7


@pytest.mark.slow
def test_what_is_drawn_depends_on_seed_and_row_and_not_on_how_many_are_computed_together(
    layer: Table,
) -> None:
    def drawn(batch_size: int, seed: int) -> np.ndarray:
        exported = layer.exported(is_random=True)
        signature = module_of(layer).signature(exported, batch_size=batch_size)
        inputs = {"ids": tf.constant(ids(7, 4)), "offsets": tf.zeros([7], tf.int32)}
        return np.asarray(signature(**inputs, seed=tf.constant(seed, tf.int64))["drawn"])

    ctx = StepContext(mode="decode", seed=3)
    np.testing.assert_array_equal(drawn(4, 0), ctx.uniform(layer, [7], "draw"))
    np.testing.assert_array_equal(drawn(4, 0), drawn(3, 0))
    assert (drawn(4, 0) != drawn(4, 1)).all()
    assert len(set(drawn(4, 0))) == 7


def test_the_file_says_what_it_takes_and_returns(layer: Table, tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("abc")
    path = str(tmp_path / "out")
    saved_model.write(
        path,
        module_of(layer),
        {"look_up": layer.exported(is_random=True)},
        batch_size=4,
        about={"model": "a.B"},
        assets={"words.txt": str(tmp_path / "vocab.txt")},
        texts={},
    )
    description = json.loads((tmp_path / "out" / "assets" / "export.json").read_text())
    assert description["model"] == "a.B"
    look_up = description["functions"]["look_up"]
    assert look_up["inputs"]["ids"]["shape"] == ["examples", "length"]
    assert set(look_up["inputs"]) == {"ids", "offsets", "seed"}
    assert set(look_up["outputs"]) == {"entries", "doubled", "total", "drawn"}
    assert look_up["longest"] == 8
    assert (tmp_path / "out" / "assets" / "words.txt").read_text() == "abc"
    loaded = tf.saved_model.load(path)
    found = loaded.signatures["look_up"](
        ids=tf.constant(ids(2, 2)), offsets=tf.constant([0, 0]), seed=tf.constant(0, tf.int64)
    )
    np.testing.assert_array_equal(found["total"], TABLE[ids(2, 2)].sum(1))


def test_a_function_of_texts_calls_the_one_of_tokens_which_is_traced_once(
    layer: Table, tmp_path: Path
) -> None:
    def read(given: Any) -> dict[str, Any]:
        numbers = tf.strings.to_number(tf.strings.split(given["texts"]), tf.int32)
        return {"ids": numbers.to_tensor(0), "offsets": tf.fill([tf.shape(numbers)[0]], 100)}

    texts = ExportedTexts(
        read=read,
        write=lambda found, given: {"totals": tf.strings.as_string(found["total"], precision=0)},
        inputs={"texts": "ids"},
        outputs={"totals": "sums"},
        resources=[],
        package="",
    )
    path = str(tmp_path / "out")
    functions = {"look_up": dataclasses.replace(layer.exported(), lengths=[3])}
    saved_model.write(
        path,
        module_of(layer),
        functions,
        batch_size=4,
        about={},
        assets={},
        texts={"look_up": texts},
    )
    assert sorted(layer.lengths_traced) == [(1, 3), (4, 3)]
    whole, of_texts = (tf.saved_model.load(one) for one in (path, f"{path}/texts"))
    assert whole.signatures["look_up"](ids=[[1, 2]], offsets=[0])["total"] == 1 + 4
    found = of_texts.signatures["look_up"](texts=tf.constant(["1 2", "3"]))
    assert found["totals"].numpy().tolist() == [b"105", b"109"]


def test_a_repeated_layer_is_normalised_by_its_moving_statistics_as_in_decoding() -> None:
    norm = BatchNorm.Params(dim=3, epsilon=0.1)
    stack = RepeatedStack.Params(num_layers=2, layer=norm).instantiate()
    rng = np.random.default_rng(0)
    names = ("scale", "bias", "moving_mean", "moving_variance")
    weights = {f"layers/{n}": rng.uniform(1, 3, [2, 3]).astype(np.float32) for n in names}
    modes = set()

    def normalised(theta: Any, x: Any, ctx: Any) -> dict[str, Any]:
        modes.add(ctx.mode)
        return {"y": stack.fprop(theta, x, ctx)}

    exported = ExportedFunction(
        doc="Normalises.",
        function=normalised,
        inputs={"x": ExportedInput("x", dtype="float32", shape=(3,))},
        outputs={"y": ExportedOutput("y")},
        lengths=[1],
    )
    module = saved_model.ExportModule(stack, weights, seed=0)
    x = rng.normal(size=[5, 3]).astype(np.float32)
    found = module.signature(exported, batch_size=2)(x=tf.constant(x))["y"]
    for scale, bias, mean, variance in zip(*(weights[f"layers/{n}"] for n in names), strict=True):
        x = (x - mean) / np.sqrt(variance + 0.1) * scale + bias
    np.testing.assert_allclose(found, x, rtol=1e-5, atol=1e-5)
    assert modes == {"decode"}


def test_weights_are_those_of_evaluation(layer: Table, tmp_path: Path) -> None:
    def weights(name: str, **tensors: Any) -> Any:
        about = Description(step=1, model="a.B", params="")
        write(str(tmp_path / name), {k.replace("__", "/"): v for k, v in tensors.items()}, about)
        return weights_of(layer, open_verified(str(tmp_path / name)))

    kept = {"weights__table": TABLE, "learner__table__ema": TABLE + 1}
    found = weights("applied", **kept, learner__updates__applied=np.int64(5))
    np.testing.assert_array_equal(found["table"], TABLE + 1)
    found = weights("first", **kept, learner__updates__applied=np.int64(0))
    np.testing.assert_array_equal(found["table"], TABLE)
    found = weights("none", weights__table=TABLE, learner__updates__applied=np.int64(5))
    np.testing.assert_array_equal(found["table"], TABLE)
    with pytest.raises(CheckpointError, match=r"table has the shape \[3\], in the layer \[12\]"):
        weights("small", weights__table=TABLE[:3], learner__updates__applied=np.int64(5))
    with pytest.raises(CheckpointError, match="missing table"):
        weights("absent", learner__updates__applied=np.int64(5))


def test_litert_gives_the_same_numbers(layer: Table) -> None:
    data = litert.convert(module_of(layer), layer.exported(), batch_size=2, length=4)
    runner = interpreter(data).get_signature_runner()
    rows = ids(2, 4)
    found = runner(ids=rows, offsets=np.array([1, 2], np.int32))
    np.testing.assert_array_equal(found["entries"], TABLE[rows])
    np.testing.assert_array_equal(found["total"], TABLE[rows].sum(1) + np.array([1, 2]))


def test_what_litert_does_not_know_is_named(layer: Table) -> None:
    def unknown(theta: Any, ids: Any, offsets: Any, ctx: Any) -> dict[str, Any]:
        entries = tf.gather(theta.table, ids) + 1.0
        return {"x": tf.math.betainc(entries, entries, entries / 200)}

    exported = dataclasses.replace(
        layer.exported(), function=unknown, outputs={"x": ExportedOutput("x")}
    )
    with pytest.raises(LiteRtError, match="Betainc"):
        litert.convert(module_of(layer), exported)


def interpreter(data: bytes) -> Any:
    try:
        from ai_edge_litert import interpreter as litert_runtime
    except ModuleNotFoundError:  # the one that TensorFlow still has
        return tf.lite.Interpreter(model_content=data)
    return litert_runtime.Interpreter(model_content=data)


def test_functions_that_are_not_exported_as_litert_are_named(layer: Table) -> None:
    functions = {"both": layer.exported(for_litert=True), "one": layer.exported()}
    assert export.not_for_litert("lm.Key", functions) == ["one"]
    del functions["both"]
    with pytest.raises(export.ExportError, match=r"no function of lm.Key is .* LiteRT \(one\)"):
        export.not_for_litert("lm.Key", functions)


@pytest.mark.parametrize(
    ("longest", "lengths"), [(5, [5]), (16, [16]), (17, [16, 17]), (200, [16, 64, 200])]
)
def test_lengths(longest: int, lengths: list[int]) -> None:
    assert lengths_up_to(longest) == lengths
