"""Decoding of a classifier: classes and probabilities of held-out examples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from eager_program import EagerProgram

from tekso.framework.context import StepContext
from tekso.framework.input.arrays import Arrays
from tekso.framework.input.errors import InputError, NoSplitError
from tekso.framework.pieces import Piece
from tekso.models.mlp import Mlp
from tekso.tasks.classification.labelled_texts import LabelledTexts
from tekso.tasks.classification.task import Classification

RNG = np.random.default_rng(0)


def rows_of(count: int, first_label: int) -> dict[str, np.ndarray]:
    labels = (first_label + np.arange(count)) % 3
    return {"x": RNG.normal(size=(count, 2)), "labels": labels}


class WithDev(Arrays):
    """Has held-out examples, fewer than a batch."""

    made = {"train": rows_of(7, 0), "dev": rows_of(5, 1)}  # noqa: RUF012

    def load(self, split: str) -> Any:
        """Returns the split; a KeyError if there is none."""
        return self.made[split]


class TrainOnly(WithDev):
    """Has no held-out examples, and `load` does not know the split."""

    made = {"train": rows_of(7, 0)}  # noqa: RUF012


class Words(LabelledTexts):
    """Texts with named classes."""

    class_names = ("short", "long")

    def texts(self, split: str) -> Any:
        """Returns two texts."""
        return [("café", 0), ("wide\n world", 1)]


def decoded(input: Any, task: Any) -> tuple[Any, Any, Any]:
    built = Classification.complete(task, input).instantiate()
    weights = {path: spec.initial_value(1) for path, spec in built.specs().items()}
    theta = built.theta({path: tf.constant(value) for path, value in weights.items()})
    return built.decode(EagerProgram(theta), input), built, theta


def test_held_out_examples_are_decoded_without_padding() -> None:
    input = WithDev.Params(batch_size=8, order="sequential").instantiate()
    found, task, theta = decoded(input, Classification.Params(model=Mlp.Params(hidden_dims=[3])))
    assert [record["label"] for record in found.records] == [1, 2, 0, 1, 2]
    x = tf.constant(WithDev.made["dev"]["x"], tf.float32)
    logits = np.asarray(task.predict(theta, {"x": x}, StepContext(mode="decode"))["logits"])
    expected = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    assert [r["predicted"] for r in found.records] == expected.argmax(1).tolist()
    np.testing.assert_allclose([r["probability"] for r in found.records], expected.max(1), 1e-5)
    assert found.text.splitlines()[0].startswith("label 1  predicted ")


def test_training_examples_are_decoded_where_nothing_is_held_out() -> None:
    input = TrainOnly.Params(batch_size=4, order="sequential").instantiate()
    found, _, _ = decoded(input, Classification.Params(model=Mlp.Params(hidden_dims=[])))
    assert [record["label"] for record in found.records] == [0, 1, 2, 0]
    assert {record["split"] for record in found.records} == {"train"}
    head, first, *_ = found.text.splitlines()
    assert head == "training examples, because the data has no dev or test split:"
    assert first.startswith("label 0  predicted ")


class Empty(WithDev):
    """Has a dev split without rows, and raises NoSplitError for test."""

    made = {"train": rows_of(7, 0), "dev": rows_of(0, 0)}  # noqa: RUF012

    def load(self, split: str) -> Any:
        """Returns the split."""
        if split == "test":
            raise NoSplitError("the data has no test split")
        return self.made[split]


def test_a_split_without_rows_or_with_its_own_error_is_missing() -> None:
    input = Empty.Params(batch_size=4, order="sequential").instantiate()
    found, _, _ = decoded(input, Classification.Params(model=Mlp.Params(hidden_dims=[])))
    assert {record["split"] for record in found.records} == {"train"}


class Damaged(WithDev):
    """Has a dev split that cannot be read."""

    error: Exception

    def load(self, split: str) -> Any:
        """Returns the training split; raises the error for the others."""
        if split != "train":
            raise self.error
        return self.made[split]


@pytest.mark.parametrize(
    "error",
    [OSError("dev.npz is damaged"), KeyError("label"), ZeroDivisionError("x"), InputError("y")],
)
def test_held_out_examples_that_cannot_be_loaded_are_named_beside_training_examples(
    error: Exception,
) -> None:
    Damaged.error = error
    input = Damaged.Params(batch_size=4, order="sequential").instantiate()
    found, _, _ = decoded(input, Classification.Params(model=Mlp.Params(hidden_dims=[])))
    assert {record["split"] for record in found.records} == {"train"}
    why = f"the dev split cannot be loaded ({type(error).__name__}: {error})"
    assert found.text.splitlines()[0] == f"training examples, because {why}:"


class DamagedDev(WithDev):
    """Has a dev split that cannot be read, and a test split."""

    def load(self, split: str) -> Any:
        """Returns the split."""
        if split == "dev":
            raise OSError("dev.npz is damaged")
        return self.made["dev" if split == "test" else split]


def test_test_examples_are_decoded_below_the_reason_why_those_of_dev_are_not() -> None:
    input = DamagedDev.Params(batch_size=8, order="sequential").instantiate()
    found, _, _ = decoded(input, Classification.Params(model=Mlp.Params(hidden_dims=[])))
    assert {record["split"] for record in found.records} == {"test"}
    head, first, *_ = found.text.splitlines()
    why = "the dev split cannot be loaded (OSError: dev.npz is damaged)"
    assert head == f"test examples, because {why}:" and first.startswith("label 1  predicted ")


class Named(WithDev):
    """Arrays, not texts, with named classes."""

    class_names = ("cat", "dog", "cow")


def test_arrays_with_the_names_of_their_classes_are_not_shown_as_texts() -> None:
    input = Named.Params(batch_size=8, order="sequential").instantiate()
    found, _, _ = decoded(input, Classification.Params(model=Mlp.Params(hidden_dims=[])))
    assert [record["label"] for record in found.records] == ["dog", "cow", "cat", "dog", "cow"]
    assert not any("text" in record for record in found.records)
    assert found.text.splitlines()[0].startswith("label dog  predicted ")


class Sorted(Arrays):
    """Held-out examples in the order of their classes, whose names `load` finds."""

    def load(self, split: str) -> Any:
        """Returns 20 examples of each of three classes."""
        self.class_names = ("cat", "dog", "cow")
        return {"x": np.arange(60.0)[:, None], "labels": np.repeat([0, 1, 2], 20)}


def test_examples_are_spread_over_all_that_are_held_out() -> None:
    input = Sorted.Params(batch_size=16).instantiate()
    found, _, _ = decoded(input, Classification.Params(model=Mlp.Params(hidden_dims=[])))
    assert [r["label"] for r in found.records] == ["cat"] * 4 + ["dog"] * 3 + ["cow"] * 3
    del input.class_names  # of an input whose `load` has not run
    again, _, _ = decoded(input, Classification.Params(model=Mlp.Params(hidden_dims=[])))
    assert again.records[0]["label"] == "cat"


class OwnPieces(Classification):
    """Computes its scores in its own way, which `predict` of the base class does not know."""

    def pieces(self) -> list[Piece]:
        """Doubles what the model gets."""

        def double(theta: Any, flow: Any, ctx: StepContext) -> Any:
            return {**flow, "x": 2.0 * flow["x"]}

        return [Piece("double", {}, double), *super().pieces()]


class OwnPredict(OwnPieces):
    """Predicts as it is trained."""

    def predict(self, theta: Any, batch: Any, ctx: StepContext) -> Any:
        """See Classification."""
        return super().predict(theta, {"x": 2.0 * batch["x"]}, ctx)


def test_a_task_with_its_own_scores_is_decoded_only_by_its_own_predict() -> None:
    input = WithDev.Params(batch_size=8, order="sequential").instantiate()
    params = {"model": Mlp.Params(hidden_dims=[3]), "num_classes": 3}
    nothing, task, _ = decoded(input, OwnPieces.Params(**params))
    assert nothing is None
    assert task.why_nothing_decoded().startswith(
        "OwnPieces has its own pieces(), but no predict(): define predict(theta, batch, ctx), "
    )
    found, _, _ = decoded(input, OwnPredict.Params(**params))
    base, _, _ = decoded(input, Classification.Params(**params))
    likeliest = [[r["probability"] for r in one.records] for one in (found, base)]
    assert len(found.records) == 5 and not np.allclose(*likeliest)


class Counts(Mlp):
    """An Mlp on bytes."""

    def fprop(self, theta: Any, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """See Mlp."""
        return super().fprop(theta, tf.cast(x, tf.float32) / 256, ctx)


def test_texts_are_shown_with_the_names_of_their_classes() -> None:
    input = Words.Params(batch_size=2, length=12, order="sequential").instantiate()
    task = Classification.Params(model=Counts.Params(hidden_dims=[]), num_classes=2)
    found, _, _ = decoded(input, task)
    assert [(r["text"], r["label"]) for r in found.records] == [
        ("café", "short"),
        ("wide\n world", "long"),
    ]
    assert {r["predicted"] for r in found.records} <= {"short", "long"}
    assert found.text.splitlines()[1].endswith("  wide world")


class Scores(Mlp):
    """Returns its input as scores."""

    def fprop(self, theta: Any, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """See Mlp."""
        del theta, ctx
        return x


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float32, tf.float64])
def test_the_predicted_class_has_the_largest_score(dtype: tf.DType) -> None:
    model = Scores.Params(input_dim=2, output_dim=2)
    task = Classification.Params(model=model, num_classes=2).instantiate()
    small = 2e-7 if dtype == tf.float16 else 1e-8  # exp(1e-8) is 1 in float32
    x = tf.constant([[0.0, small], [6e4, -6e4], [-np.inf, 1.0], [6e4, 6e4]], dtype)
    ctx = StepContext(mode="decode")
    theta = task.init()
    found = task.class_probabilities(theta, x, ctx)
    assert found["labels"].numpy().tolist() == [1, 0, 1, 0]
    assert task.predict(theta, {"x": x}, ctx)["labels"].numpy().tolist() == [1, 0, 1, 0]
    expected = [[0.5, 0.5], [1, 0], [0, 1], [0.5, 0.5]]
    np.testing.assert_allclose(found["probabilities"], expected, atol=1e-6)
