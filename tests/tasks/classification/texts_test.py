"""Texts and classes: bytes in batches, wrong texts, answers line by line, exported classifiers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import processes
import pytest
import tensorflow as tf
from eager_program import EagerProgram

from tekso.framework.context import StepContext
from tekso.framework.execution.base import signature_of
from tekso.framework.input.arrays import Arrays
from tekso.framework.input.errors import InputError
from tekso.framework.run import litert, saved_model
from tekso.models.layers.attention import MultiHeadAttention
from tekso.models.layers.feed_forward import FeedForward
from tekso.models.layers.stack import Stack
from tekso.models.layers.transformer import TransformerLayer
from tekso.models.mlp import Mlp
from tekso.models.text_classifier import TextClassifier
from tekso.tasks.classification.labelled_texts import LabelledTexts
from tekso.tasks.classification.task import Classification
from tekso.tasks.classification.text_answers import classified

TEXTS = ["café", "a", "", "a longer text than twelve bytes"]


class Given(LabelledTexts):
    """Returns what the test says."""

    class_names = ("short", "long")
    made: ClassVar[Any] = [(text, int(len(text) > 3)) for text in TEXTS]

    def texts(self, split: str) -> Any:
        """Returns it."""
        return self.made


def input_of(**changes: Any) -> Any:
    return Given.Params(batch_size=4, length=12, order="sequential", **changes)


def classifier() -> tuple[Any, dict[str, np.ndarray]]:
    """Returns a small task of three classes, two of which have names, and its weights."""
    layer = TransformerLayer.Params(
        attention=MultiHeadAttention.Params(num_heads=2),
        feed_forward=FeedForward.Params(hidden_dim=6),
    )
    model = TextClassifier.Params(dim=8, encoder=Stack.Params(num_layers=1, layer=layer))
    task = Classification.complete(Classification.Params(model=model, num_classes=3), None)
    built = task.instantiate()
    return built, {path: 3 * spec.initial_value(1) for path, spec in built.specs().items()}


def probabilities(task: Any, weights: Any, texts: list[str]) -> np.ndarray:
    theta = task.theta({path: tf.constant(value) for path, value in weights.items()})
    rows = []
    for text in texts:
        ids = np.frombuffer(text.encode()[:12] or b"\0", np.uint8).astype(np.int32)
        found = task.class_probabilities(theta, tf.constant(ids[None]), StepContext(mode="decode"))
        rows.append(np.asarray(found["probabilities"])[0])
    return np.stack(rows)


def test_texts_are_bytes_that_are_cut_or_padded() -> None:
    batch = input_of().instantiate().batch(0)
    assert batch["x"].shape == (4, 12) and batch["x"].dtype == np.int32
    assert bytes(batch["x"][0].astype(np.uint8)).rstrip(b"\0").decode() == "café"
    assert bytes(batch["x"][3].astype(np.uint8)) == b"a longer tex"
    assert batch["labels"].tolist() == [1, 0, 0, 1]
    assert Given.signature(input_of()) == signature_of(batch)  # so decoding reads no data


@pytest.mark.parametrize(
    ("made", "length", "message"),
    [
        ([("a", 1)], 0, r"length is 0, must be at least 1"),
        ([], 12, r"Given.texts\('train'\) returns no texts: the split train is empty"),
        (None, 12, r"Given.texts\('train'\) must return pairs of .*; it returns None"),
        (["ab", "abc"], 12, r"pairs of a text and the number of its class"),
        ([(b"a", 1)], 12, r"pairs of a text and the number of its class"),
        ([("a", "ham")], 12, r"pairs of a text and the number of its class"),
        ([("a", 0.9)], 12, r"pairs .*; 'float' object cannot be interpreted as an integer"),
        ([("a", 2**40)], 12, r"pairs of a text and the number of its class"),
    ],
)
def test_wrong_texts_are_named(
    made: Any, length: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Given, "made", made)
    with pytest.raises(InputError, match=message):
        input_of().set(length=length).instantiate()


def test_an_error_of_the_method_keeps_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def texts(self: Given, split: str) -> Any:
        raise InputError("there is no folder /a")
        yield

    monkeypatch.setattr(Given, "texts", texts)
    with pytest.raises(InputError, match=r"^there is no folder /a"):
        input_of().instantiate()


def test_every_text_gets_its_likeliest_classes() -> None:
    task, weights = classifier()
    theta = task.theta({path: tf.constant(value) for path, value in weights.items()})
    known = Given.known(input_of(), assets_dir=None)
    found = classified(task, EagerProgram(theta), known, TEXTS)
    for classes, wanted in zip(found, probabilities(task, weights, TEXTS), strict=True):
        assert [one["number"] for one in classes] == np.argsort(-wanted).tolist()
        assert {one["class"] for one in classes} == {"short", "long", "2"}
        own = [one["probability"] for one in sorted(classes, key=lambda one: one["number"])]
        np.testing.assert_allclose(own, wanted, atol=1e-5)
    assert classified(task, EagerProgram(theta), known, []) == []


LOADER = """
import json, sys
sys.modules["tekso"] = None  # an import of it is an error
import tensorflow as tf
model = tf.saved_model.load(sys.argv[1] + "/texts").signatures["classify"]
found = model(texts=tf.constant(sys.argv[2:]))
names = [text.decode() for text in found["classes"].numpy()]
print(json.dumps([names, found["probabilities"].numpy().tolist()]))
"""


@pytest.mark.slow
def test_an_exported_classifier_takes_texts_and_litert_bytes(tmp_path: Path) -> None:
    task, weights = classifier()
    known: Any = Given.known(input_of(), assets_dir=None)
    module = saved_model.ExportModule(task, weights, seed=0)
    exports, texts = task.exports(known), task.text_exports(known)
    path = str(tmp_path / "out")
    saved_model.write(path, module, exports, batch_size=2, about={}, assets={}, texts=texts)
    # export_mode_test.py loads an export in a process that has never imported Tekso.
    done = processes.run(["-c", LOADER, path, *TEXTS], optimized=False)
    assert done.returncode == 0, done.stderr
    names, numbers = json.loads(done.stdout)
    wanted = probabilities(task, weights, TEXTS)
    np.testing.assert_allclose(numbers, wanted, atol=1e-5)
    assert names == [("short", "long", "2")[row.argmax()] for row in wanted]

    runner = tf.lite.Interpreter(
        model_content=litert.convert(module, exports["classify"])
    ).get_signature_runner()
    ids = np.zeros([1, 12], np.int32)
    ids[0, :5] = list("café".encode())
    found = runner(ids=ids)
    np.testing.assert_allclose(found["probabilities"], wanted[:1], atol=1e-5)
    assert found["labels"] == [wanted[0].argmax()]


class Points(Arrays):
    """Four points."""

    def load(self, split: str) -> Any:
        """Returns them."""
        return {"x": np.arange(12.0).reshape(4, 3), "labels": np.array([0, 1, 0, 1])}


def test_a_classifier_of_arrays_exports_their_shape() -> None:
    input = Points.Params(batch_size=2).instantiate()
    params = Classification.Params(model=Mlp.Params(hidden_dims=[]))
    task = Classification.complete(params, input).instantiate()
    (one,) = task.exports(input).values()
    assert one.inputs["x"].shape == (3,) and one.inputs["x"].dtype == tf.float32
    assert task.text_exports(input) == {}
    theta, x = task.init(0), input.batch(0)["x"]
    found = one.function(theta, tf.constant(x), StepContext(mode="decode"))
    logits = x @ np.asarray(theta.model.layers["0"].w)
    wanted = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.testing.assert_allclose(found["probabilities"], wanted, rtol=1e-4)
    unread: Any = type("Unread", (), {"params": Points.Params()})()
    with pytest.raises(InputError, match="the shape of 'x' is in the data"):
        task.exports(unread)
