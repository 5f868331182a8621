"""Classification: loss and accuracy in NumPy's numbers, sizes from the data, checks of the data."""

from __future__ import annotations

import re
from typing import Any

import given_arrays
import numpy as np
import pytest
import tensorflow as tf
from given_arrays import Given

from tekso.framework import task_results
from tekso.framework.context import StepContext
from tekso.framework.draws import DrawError
from tekso.framework.execution.pipeline import loss_pieces
from tekso.framework.input.bucketing import BucketedInput
from tekso.framework.input.errors import InputError
from tekso.framework.input.held_out import HeldOut
from tekso.framework.input.input import ExampleInput
from tekso.framework.pieces import Piece
from tekso.framework.run import input_checks
from tekso.framework.task import LossSums
from tekso.framework.task_values import TaskError
from tekso.models.layers.feed_forward import FeedForward
from tekso.models.layers.linear import Linear
from tekso.models.layers.stack import RepeatedStack, Stack
from tekso.models.mlp import Mlp
from tekso.tasks.classification.task import Classification

RNG = np.random.default_rng(0)
TRAIN = {"x": RNG.normal(size=(7, 2, 3)), "labels": np.array([0, 1, 2, 3, 0, 1, 2])}
DEV = {"x": RNG.normal(size=(5, 2, 3)), "labels": np.array([3, 2, 1, 0, 3])}


def inputs(train: Any = TRAIN, dev: Any = DEV) -> dict[str, Any]:
    return given_arrays.inputs(train, dev)


def checked(params: Any = None, **given: Any) -> Any:
    """The task of some data, as a run makes and checks it."""
    found = inputs(**given)
    input_checks.check_alike(found)
    params = params or Classification.Params()
    task = params.owner.complete(params, found["input"]).instantiate()
    task.check_inputs(found)
    return task


def tensors(batch: Any) -> dict[str, tf.Tensor]:
    return {name: tf.constant(array) for name, array in batch.items()}


def test_loss_and_accuracy_are_weighted_sums() -> None:
    task = checked(Classification.Params(model=Mlp.Params(hidden_dims=[])))
    theta = task.init(1)
    batch = inputs()["eval_inputs.dev"].batch(1)
    batch["labels"][1:] = [0, 1, 2]
    batch["weights"] = np.array([1.0, 0.5, 0.0, 2.0], np.float32)
    sums = task.loss(theta, tensors(batch), StepContext(mode="eval"))

    w, b = (np.asarray(theta.model.layers["0"][name], np.float64) for name in "wb")
    logits = batch["x"].reshape(4, 6) @ w + b
    probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    nats = -np.log(probs[np.arange(4), batch["labels"]])
    hits = logits.argmax(1) == batch["labels"]
    np.testing.assert_allclose(sums.loss_sum, batch["weights"] @ nats, rtol=1e-5)
    np.testing.assert_allclose(sums.metrics["accuracy"], [batch["weights"] @ hits, 3.5], rtol=1e-6)
    assert float(task.loss_weight(tensors(batch))) == 3.5


def test_predictions_are_scores_and_the_class_of_the_largest() -> None:
    task = checked(Classification.Params(model=Mlp.Params(hidden_dims=[])))
    theta = task.init(1)
    x = tensors(inputs()["input"].batch(0))["x"][:3]
    found = task.predict(theta, {"x": x}, StepContext(mode="decode"))
    w, b = (np.asarray(theta.model.layers["0"][name]) for name in "wb")
    logits = np.asarray(x).reshape(3, 6) @ w + b
    np.testing.assert_allclose(found["logits"], logits, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found["labels"], logits.argmax(1))
    with pytest.raises(ValueError, match=r"has no array 'x' .*, but has 'labels'"):
        task.predict(theta, {"labels": x}, StepContext(mode="decode"))


def test_sizes_come_from_the_data_unless_they_are_given() -> None:
    task = checked()
    assert {path: spec.shape for path, spec in task.specs().items()} == {
        "model/layers/0/w": (6, 128),
        "model/layers/0/b": (128,),
        "model/layers/1/w": (128, 4),
        "model/layers/1/b": (4,),
    }
    given = Classification.Params(num_classes=9)
    assert checked(given).specs()["model/layers/1/b"].shape == (9,)
    # Without data in memory, as for the table of weights: it is read.
    inputs()
    unread = type("Unread", (), {"params": Given.Params(batch_size=4)})()
    assert Classification.complete(Classification.Params(), unread).num_classes == 4


def test_a_model_of_equal_scores_hits_one_class_alone() -> None:
    task = checked()
    theta = tf.nest.map_structure(tf.zeros_like, task.init(1))
    sums = task.loss(theta, tensors(inputs()["input"].batch(0)), StepContext())
    assert float(sums.metrics["accuracy"][0]) == 1.0
    np.testing.assert_allclose(sums.loss_sum, 4 * np.log(4), rtol=1e-6)


BLOCK = FeedForward.Params(input_dim=6, hidden_dim=2)


def linear(size: int, to: int) -> Any:
    return Linear.Params(input_dim=size, output_dim=to)


@pytest.mark.parametrize(
    ("model", "pieces"),
    [
        (Mlp.Params(hidden_dims=[5, 7], dropout_rate=0.5), 4),
        (Stack.Params(num_layers=2, layers=[linear(6, 5), linear(5, 4)]), 3),
        (RepeatedStack.Params(num_layers=3, layer=BLOCK), 4),
        (linear(6, 4), 2),
    ],
)  # fmt: skip
def test_pieces_of_any_model_are_its_fprop(model: Any, pieces: int) -> None:
    flat = {name: {**one, "x": one["x"].reshape(-1, 6)} for name, one in
            {"train": TRAIN, "dev": DEV}.items()}  # fmt: skip
    classes = 6 if isinstance(model, RepeatedStack.Params) else 4
    task = checked(Classification.Params(model=model, num_classes=classes), **flat)
    assert len(task.pieces()) == pieces
    theta, batch = task.init(1), tensors(inputs(**flat)["input"].batch(0))
    ctx = StepContext(mode="train", seed=2, step=3)
    logits = task.model.fprop(theta.model, batch["x"], ctx)
    nats = tf.nn.sparse_softmax_cross_entropy_with_logits(batch["labels"], logits)
    np.testing.assert_allclose(
        task.loss(theta, batch, ctx).loss_sum, tf.reduce_sum(nats), rtol=1e-6
    )


def test_scores_of_another_shape_are_refused() -> None:
    task = checked(Classification.Params(model=Linear.Params(input_dim=3, output_dim=4)))
    batch = tensors(inputs()["input"].batch(0))
    with pytest.raises(
        ValueError, match=r"Linear.fprop returns a float32 tensor of shape \[4, 2, 4\], "
    ):
        task.loss(task.init(1), batch, StepContext())
    for given, kind in ((None, "None"), ((batch["x"], 1), "a tuple of length 2")):
        task = checked()
        task.model.pieces = lambda given=given: [Piece("p", {}, lambda *_: {**batch, "x": given})]
        with pytest.raises(ValueError, match=rf"Mlp.fprop returns {kind}, but must return"):
            task.loss(task.init(1), batch, StepContext())


class WithoutReturn(Classification):
    """Forgets to return the sums."""

    def sums(self, logits: tf.Tensor, batch: Any) -> Any:
        """Returns nothing."""


def test_sums_that_are_not_returned_name_the_method() -> None:
    task = checked(WithoutReturn.Params(model=Mlp.Params(hidden_dims=[])))
    batch = tensors(inputs()["input"].batch(0))
    what = r"WithoutReturn\.sums \(.*:\d+\) returns None, but must return LossSums\("
    with pytest.raises(TaskError, match=what):
        task.loss(task.init(1), batch, StepContext())


class Doubled(Classification):
    """Twice the loss, and a metric more."""

    def sums(self, logits: tf.Tensor, batch: Any) -> LossSums:
        """See the class."""
        sums = super().sums(logits, batch)
        largest = tf.reduce_sum(batch["weights"] * tf.reduce_max(logits, 1))
        weight = tf.reduce_sum(batch["weights"])
        return LossSums(2.0 * sums.loss_sum, {**sums.metrics, "largest": (largest, weight)})


def test_another_loss_and_metric_are_those_of_all_executions() -> None:
    task, base = checked(Doubled.Params()), checked()
    batch, ctx = tensors(inputs()["input"].batch(0)), StepContext()
    theta = task.init(1)
    sums = task.loss(theta, batch, ctx)
    np.testing.assert_allclose(sums.loss_sum, 2.0 * base.loss(theta, batch, ctx).loss_sum)
    logits = task.model.fprop(theta.model, batch["x"], ctx)
    np.testing.assert_allclose(sums.metrics["largest"][0], np.max(logits, 1).sum(), rtol=1e-6)
    pieces = loss_pieces.pieces_of_loss(task)  # what a pipeline runs
    flow: Any = batch
    for piece in pieces:
        flow = piece.run(theta, flow, ctx)
    np.testing.assert_allclose(task_results.sums_of_flow(task, flow).loss_sum, sums.loss_sum)


def test_mlp_is_its_formula_and_drops_hidden_units_in_training_alone() -> None:
    x = RNG.normal(size=(4, 6)).astype(np.float32)
    params = Mlp.Params(input_dim=6, hidden_dims=[50, 40], output_dim=3, activation="tanh")
    layer = params.set(dropout_rate=0.5).instantiate()
    theta = layer.init(1)
    w, b = ([np.asarray(theta.layers[str(i)][name]) for i in range(3)] for name in ("w", "b"))
    expected = np.tanh(np.tanh(x @ w[0] + b[0]) @ w[1] + b[1]) @ w[2] + b[2]
    outputs = {mode: layer.fprop(theta, x, StepContext(mode=mode)) for mode in ("eval", "train")}
    np.testing.assert_allclose(outputs["eval"], expected, rtol=2e-5, atol=2e-6)
    assert np.abs(outputs["train"] - expected).min() > 1e-4
    layer = params.set(dropout_rate=0.0).instantiate()
    np.testing.assert_allclose(
        layer.fprop(theta, x, StepContext(mode="train")), expected, rtol=2e-5, atol=2e-6
    )


def test_mlp_refuses_other_features_and_sizes() -> None:
    layer = Mlp.Params(input_dim=6, output_dim=2).instantiate()
    with pytest.raises(ValueError, match=r"an example has 5 features, but input_dim is 6"):
        layer.fprop(layer.init(1), tf.ones([4, 5]), StepContext())
    with pytest.raises(ValueError, match=r"sizes \[6, 0, 2\]"):
        Mlp.Params(input_dim=6, output_dim=2, hidden_dims=[0]).instantiate()
    pixels = tf.constant([[[0, 255, 3], [1, 2, 3]]], tf.uint8)
    assert layer.fprop(layer.init(1), pixels, StepContext()).dtype == tf.float32


def changed(data: Any, **arrays: Any) -> Any:
    return {name: a for name, a in {**data, **arrays}.items() if a is not None}


X5, FIVE = DEV["x"], np.array([0, 1, 2, 3, 1])


@pytest.mark.parametrize(
    ("train", "dev", "message"),
    [
        (
            changed(TRAIN, labels=None, y=TRAIN["labels"]),
            DEV,
            "arrays of .* differ from",
        ),
        (changed(TRAIN, labels=None), changed(DEV, labels=None), "input has no array 'labels'"),
        (TRAIN, changed(DEV, x=X5[:, :1]), r"of eval_inputs.dev differ .*'x' \[1, 3\] flo"),
        (
            TRAIN,
            changed(DEV, labels=FIVE + 1),
            "dev: 1 labels are not in 0 to 3: example 3 of the array 'labels' has 4, but "
            r"task.num_classes is 4\. Number .* from 0; if there are more",
        ),
        (
            TRAIN,
            changed(DEV, labels=FIVE - 1),
            "dev: 1 labels are not in 0 to 3: example 0 of the array 'labels' has -1",
        ),
        (changed(TRAIN, labels=TRAIN["labels"] - 1), DEV, "^input: 2 labels are not in 0 to 2"),
        (changed(TRAIN, labels=np.eye(7)), changed(DEV, labels=np.eye(5, 7)), "argmax"),
        (
            changed(TRAIN, labels=TRAIN["labels"] * 1.0),
            changed(DEV, labels=DEV["labels"] * 1.0),
            "'labels' has type float32, but must be integers",
        ),
        (
            changed(TRAIN, weights=np.ones([7, 2])),
            changed(DEV, weights=np.ones([5, 2])),
            r"'weights' is \[examples, 2\]",
        ),
        (changed(TRAIN, labels=np.zeros(7, int)), DEV, "^input: all labels are 0"),
    ],
)
def test_data_that_does_not_fit_is_refused(train: Any, dev: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checked(train=train, dev=dev)


class Made(ExampleInput):
    """An input that makes its examples."""

    num_examples = 6

    def examples(self, index: Any, epoch: Any) -> Any:
        ones = np.ones(len(index), np.float32)
        return {"x": np.stack([ones] * 2, 1), "labels": index % 3, "weights": ones}


def test_an_input_without_all_labels_at_once_needs_the_number_of_classes() -> None:
    input = Made.Params(batch_size=4).instantiate()
    with pytest.raises(ValueError, match=r"num_classes is not set, and Made does not .* set task"):
        Classification.complete(Classification.Params(), input)
    params = Classification.complete(Classification.Params(num_classes=3), input)
    task: Any = params.instantiate()
    task.check_inputs({"input": input})
    assert (params.model.input_dim, params.model.output_dim) == (2, 3)


class Rows(BucketedInput):
    """Rows of 1 to 3 numbers."""

    def __init__(self, params: Any, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)
        self.assign([1, 2, 3], [2, 3], [2, 2])

    def bucket_rows(self, examples: Any, bound: int) -> Any:
        weights = np.ones(len(examples), np.float32)
        return {"x": np.ones([len(examples), bound], np.int32), "weights": weights}


class RowsOfVectors(Rows):
    def bucket_rows(self, examples: Any, bound: int) -> Any:
        found = super().bucket_rows(examples, bound)
        return {**found, "x": np.ones([len(examples), bound, 5], np.float32)}


class RowsOfNothing(Rows):
    def bucket_rows(self, examples: Any, bound: int) -> Any:
        return {**super().bucket_rows(examples, bound), "x": np.ones(len(examples), np.float32)}


def test_inputs_of_a_user_are_exported_with_their_shapes() -> None:
    task = Classification.Params(num_classes=3, model=Mlp.Params(input_dim=2, output_dim=3))
    exports = task.instantiate().exports
    of_made = exports(Made.Params(batch_size=4).instantiate())["classify"]
    assert of_made.inputs["x"].shape == (2,) and of_made.lengths == [1]
    of_rows = exports(Rows.Params(batch_size=4).instantiate())["classify"]
    assert of_rows.inputs["x"].has_length and of_rows.inputs["x"].dtype == tf.int32
    assert of_rows.lengths == [2, 3] and of_rows.inputs["x"].dims(3) == (3,)
    of_vectors = exports(RowsOfVectors.Params(batch_size=4).instantiate())["classify"]
    assert of_vectors.inputs["x"].has_length and of_vectors.inputs["x"].dims(3) == (3, 5)
    with pytest.raises(InputError, match=r"RowsOfNothing: 'x' is \[examples\], but a function of"):
        exports(RowsOfNothing.Params(batch_size=4).instantiate())


class Wide(Made):
    """Its held-out examples have another number of features."""

    def examples(self, index: Any, epoch: Any) -> Any:
        width = 4 if self.params.split == "train" else 7
        return {**super().examples(index, epoch), "x": np.ones((len(index), width), np.float32)}


def test_held_out_features_that_the_model_cannot_compute_are_refused() -> None:
    input = Wide.Params(batch_size=4).instantiate()
    dev = HeldOut.Params(batch_size=3).instantiate(train=input.params)
    assert input.form() is None and dev.form() is None and dev.arrays is None
    params = Classification.complete(Classification.Params(num_classes=3), input)
    message = r"eval_inputs.dev: 'x' \[7\] float32 .* in training 'x' \[4\] .* input_dim is 4"
    with pytest.raises(InputError, match=message):
        params.instantiate().check_inputs({"input": input, "eval_inputs.dev": dev})


class DrawsTwice(Linear):
    """Has a mistake that no shape of its inputs explains."""

    def fprop(self, theta: Any, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        first = ctx.uniform(self, [x.shape[0], 3])
        return first + ctx.uniform(self, [x.shape[0], 3])


def test_a_mistake_of_the_model_is_not_taken_for_features_that_it_cannot_compute() -> None:
    input = Wide.Params(batch_size=4).instantiate()
    dev = HeldOut.Params(batch_size=3).instantiate(train=input.params)
    own = Classification.Params(num_classes=3, model=DrawsTwice.Params(output_dim=3))
    task = Classification.complete(own, input).instantiate()
    with pytest.raises(DrawError, match=r"^DrawsTwice \(model\) draws the same random numbers tw"):
        task.check_inputs({"input": input, "eval_inputs.dev": dev})


def test_held_out_features_of_another_shape_that_the_model_can_compute_pass() -> None:
    flat = changed(DEV, x=X5.reshape(5, 6))
    found = inputs(dev=flat)
    task = Classification.complete(Classification.Params(), found["input"]).instantiate()
    task.check_inputs(found)


def test_weights_for_one_split_alone_are_enough() -> None:
    checked(train=changed(TRAIN, weights=np.arange(7)))
    checked(dev=changed(DEV, weights=np.arange(5)))


def labelled(*labels: int) -> Any:
    given = {"x": np.ones((len(labels), 2)), "labels": np.array(labels)}
    return inputs(train=given, dev=given)


@pytest.mark.parametrize("labels", [(0, 10**9, 2 * 10**9), (0, 20), (5, 1_000)])
def test_labels_that_are_ids_are_refused_unless_the_number_of_classes_is_given(labels: Any) -> None:
    train = labelled(*labels)["input"]
    with pytest.raises(InputError, match=r"largest label .* np.unique\(labels, return_inverse=T"):
        Classification.complete(Classification.Params(), train)
    given = Classification.Params(num_classes=max(labels) + 1)
    assert Classification.complete(given, train).num_classes == max(labels) + 1


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ((-1, 0, -1), "^input: 2 labels are below 0, and none is above 0. Number the classes from"),
        ((0, 0), "^input: all labels are 0, so there is one class"),
    ],
)
def test_labels_of_which_none_is_above_0_are_refused(labels: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Classification.complete(Classification.Params(), labelled(*labels)["input"])
    with pytest.raises(ValueError, match=r"^task.num_classes is 1: classification"):
        Classification.Params(num_classes=1).instantiate()


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ((1, 2, 3), r"1 of the classes 0 to 3 have no .* \(0\).* count from 1, subtract 1"),
        ((0, 1, 9), r"7 of the classes 0 to 9 have no training example \(2, 3, 4, 5, 6, …\)"),
        ((0, 2, 1, 2), None),
    ],
)
def test_classes_without_a_training_example_are_a_warning(labels: Any, message: str | None) -> None:
    found = labelled(*labels)
    task = Classification.complete(Classification.Params(), found["input"]).instantiate()
    warnings = task.check_inputs(found)
    if message is None:
        assert warnings == []
    else:
        assert len(warnings) == 1 and re.search(message, warnings[0])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sample_weight", "'sample_weight' has no effect; did you mean 'weights'?"),
        ("label", "'label' has no effect; did you mean 'labels'?"),
        ("seen", "'seen' has no effect"),
    ],
)
def test_an_array_that_has_no_effect_is_a_warning(name: str, message: str) -> None:
    extra = {name: np.ones(7)}, {name: np.ones(5)}
    found = inputs(train={**TRAIN, **extra[0]}, dev={**DEV, **extra[1]})
    params = Classification.complete(Classification.Params(), found["input"])
    (warning,) = params.instantiate().check_inputs(found)
    assert warning == f"input: Classification reads 'x', 'labels', 'weights' only: {message}"
    own = type("Own", (Classification,), {})  # which may read it
    assert own.complete(own.Params(), found["input"]).instantiate().check_inputs(found) == []


def test_labels_of_every_batch_are_checked_before_a_device_gets_it() -> None:
    task = checked()
    task.check_batch("input.batch(7)", {"labels": np.array([0, 3])})
    message = r"^input.batch\(7\): 2 labels are not in 0 to 3: .* 'labels' has 4294967297, but"
    with pytest.raises(InputError, match=message):
        task.check_batch("input.batch(7)", {"labels": np.array([0, 2**32 + 1, -1])})


def test_a_label_beyond_32_bits_is_no_other_class() -> None:
    task = checked()
    batch = inputs()["input"].batch(0)
    batch["labels"] = batch["labels"] + 2**32
    with pytest.raises(tf.errors.InvalidArgumentError, match="outside the valid range"):
        task.loss(task.init(1), tensors(batch), StepContext())


class Empty(Made):
    """Has no held-out examples."""

    @property
    def num_examples(self) -> int:  # type: ignore[override]
        return 6 if self.params.split == "train" else 0


def test_an_evaluation_input_without_examples_is_said_to_have_none() -> None:
    input = Empty.Params(batch_size=4).instantiate()
    dev = HeldOut.Params().instantiate(train=input.params)
    params = Classification.complete(Classification.Params(num_classes=3), input)
    with pytest.raises(InputError, match=r"^eval_inputs.dev \(Empty, dev: 0 examples\) has no ex"):
        params.instantiate().check_inputs({"input": input, "eval_inputs.dev": dev})
