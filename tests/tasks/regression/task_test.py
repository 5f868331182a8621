"""Regression: loss, metrics and predictions in NumPy's numbers, and checks of the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import given_arrays
import numpy as np
import pytest
import tensorflow as tf
from eager_program import EagerProgram
from given_arrays import Given

from tekso.framework import task_results
from tekso.framework.context import StepContext
from tekso.framework.execution.pipeline import loss_pieces
from tekso.framework.experiment import Experiment, Run
from tekso.framework.input.errors import InputError
from tekso.framework.input.input import ExampleInput
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import Momentum
from tekso.framework.run.session import Session
from tekso.framework.run.weights import load_weights
from tekso.framework.schedules import Constant
from tekso.models.layers.linear import Linear
from tekso.models.mlp import Mlp
from tekso.tasks.regression.task import Regression

RNG = np.random.default_rng(0)
X, Y = RNG.normal(5, 3, (7, 3)), RNG.normal(-200, 40, (7, 2))
TRAIN = {"x": X, "y": Y, "weights": [1, 2, 0.5, 1, 1, 1, 0]}
DEV = {"x": X[:4] + 1, "y": Y[:4] + 9, "weights": np.ones(4)}
LINEAR = Mlp.Params(hidden_dims=[])


def inputs(train: Any = TRAIN, dev: Any = DEV) -> dict[str, Any]:
    return given_arrays.inputs(train, dev)


def task_of(params: Any = None, **given: Any) -> tuple[Any, dict[str, Any]]:
    """The task of some data, as a run makes and checks it, and its inputs."""
    found = inputs(**given)
    params = params or Regression.Params(model=LINEAR)
    task = params.owner.complete(params, found["input"]).instantiate()
    task.check_inputs(found)
    return task, found


def by_hand(theta: Any, x: Any) -> Any:
    """Predictions of a linear model in the units of the targets, and the deviation of these."""
    counted = slice(6)  # the last example has weight 0
    mean, std = X[counted].mean(0), X[counted].std(0)
    w, b = (np.asarray(theta.model.layers["0"][name], np.float64) for name in "wb")
    outputs = (x - mean) / std @ w + b
    return outputs * Y[counted].std(0) + Y[counted].mean(0), Y[counted].std(0)


def test_loss_and_metrics_are_weighted_sums() -> None:
    task, found = task_of(Regression.Params(model=LINEAR, target_names=["price", "rent"]))
    theta, batch = task.init(1), found["eval_inputs.dev"].batch(0)
    batch["weights"] = np.array([1.0, 0.5, 0.0, 2.0], np.float32)
    ctx = StepContext(mode="eval")
    sums = task.loss(theta, batch, ctx)

    y, weights = batch["y"].astype(np.float64), batch["weights"]
    predicted, std = by_hand(theta, batch["x"].astype(np.float64))
    errors = predicted - y
    loss = weights @ (errors / std).__pow__(2).mean(1)
    baseline = weights @ (((y - Y[:6].mean(0)) / std) ** 2).mean(1)
    np.testing.assert_allclose(sums.loss_sum, loss, rtol=1e-4)  # float32, of centred numbers
    assert float(task.loss_weight(batch)) == 3.5
    figures = task_results.summarize(
        task, {name: (float(one), float(weight)) for name, (one, weight) in sums.metrics.items()}
    )
    absolute = weights @ np.abs(errors) / 3.5
    expected = {
        "r2": 1 - loss / baseline,
        "absolute_error": absolute.mean(),
        "absolute_error/price": absolute[0],
        "absolute_error/rent": absolute[1],
    }
    assert list(figures) == list(expected)
    np.testing.assert_allclose(list(figures.values()), list(expected.values()), rtol=1e-4)


def test_predictions_are_in_the_units_of_the_targets() -> None:
    task, _ = task_of()
    theta = task.init(1)
    found = task.predict(theta, {"x": X}, StepContext(mode="decode"))["y"]
    assert found.dtype == tf.float32
    np.testing.assert_allclose(found, by_hand(theta, X)[0], rtol=1e-5)
    with pytest.raises(ValueError, match=r"has no array 'x' .*, but has 'y'"):
        task.predict(theta, {"y": Y}, StepContext())
    with pytest.raises(ValueError, match=r"is \[3\], but must be \[examples, 3\]"):
        task.predict(theta, {"x": X[0]}, StepContext())
    with pytest.raises(ValueError, match=r"is \[7, 2\], but must be \[examples, 3\]"):
        task.predict(theta, {"x": X[:, :2]}, StepContext())


def test_one_target_may_have_no_dim() -> None:
    one = [{**data, "y": data["y"][:, 0]} for data in (TRAIN, DEV)]
    column = [{**data, "y": data["y"][:, :1]} for data in (TRAIN, DEV)]
    found = []
    for train, dev in (one, column):
        task, own = task_of(train=train, dev=dev)
        sums = task.loss(task.init(1), own["input"].batch(0), StepContext(mode="eval"))
        assert list(sums.metrics) == ["r2", "absolute_error"]
        found.append([sums.loss_sum, *sums.metrics["absolute_error"]])
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize(("model", "count"), [(Mlp.Params(hidden_dims=[5]), 4), (LINEAR, 3)])
def test_pieces_are_the_loss(model: Any, count: int) -> None:
    task, found = task_of(Regression.Params(model=model))
    theta, batch, ctx = task.init(1), found["input"].batch(0), StepContext(mode="eval")
    assert len(task.pieces()) == count
    flow: Any = {name: tf.constant(array) for name, array in batch.items()}
    for piece in loss_pieces.pieces_of_loss(task):
        flow = piece.run(piece.theta(flat_of(task, theta)), flow, ctx)
    sums = task_results.sums_of_flow(task, flow)
    np.testing.assert_allclose(sums.loss_sum, task.loss(theta, batch, ctx).loss_sum, rtol=1e-6)


def flat_of(task: Any, theta: Any) -> dict[str, Any]:
    found = {}
    for path in task.specs():
        value: Any = theta
        for name in path.split("/"):
            value = value[name]
        found[path] = value
    return found


def test_decoding_shows_targets_and_predictions_of_held_out_examples() -> None:
    task, found = task_of(Regression.Params(model=LINEAR, target_names=["price", "rent"]))
    theta = task.init(1)
    decoded = task.decode(EagerProgram(theta), found["input"])
    predicted = by_hand(theta, DEV["x"])[0]
    assert len(decoded.records) == 4
    for record, y, own in zip(decoded.records, DEV["y"], predicted, strict=True):
        assert record["split"] == "dev"
        np.testing.assert_allclose([record["y"]["price"], record["y"]["rent"]], y, rtol=1e-6)
        values = [record["predicted"]["price"], record["predicted"]["rent"]]
        np.testing.assert_allclose(values, own, rtol=1e-5)
    assert decoded.text.splitlines()[0].startswith(f"price {DEV['y'][0, 0]:.6g}  predicted -")


def test_the_exported_function_takes_rows_of_training() -> None:
    task, found = task_of()
    function = task.exports(found["input"])["predict"]
    assert {name: one.shape for name, one in function.inputs.items()} == {"x": (3,)}
    theta = task.init(1)
    y = function.function(theta, tf.constant(X, tf.float32), StepContext())["y"]
    np.testing.assert_allclose(y, by_hand(theta, X)[0], rtol=1e-5)


BAD = [
    ({**TRAIN, "labels": Y}, DEV, None),
    ({"x": X}, DEV, "input has no array 'y': Regression requires"),
    ({**TRAIN, "x": X[:, 0]}, DEV, r"input: 'x' is \[examples\], but must be \[examples, feat"),
    ({**TRAIN, "x": X[:, :, None]}, DEV, r"'x' is \[examples, 3, 1\], but .* x.reshape\(len\(x"),
    ({**TRAIN, "y": Y[:, :, None]}, DEV, r"'y' is \[examples, 2, 1\], but must be \[examples, ta"),
    (TRAIN, {**DEV, "x": X[:4, :2]}, "eval_inputs.dev: 'x' has 2 columns, but the task has 3"),
    (TRAIN, {**DEV, "y": Y[:4, 0]}, "eval_inputs.dev: 'y' has 1 columns, but the task has 2"),
]


@pytest.mark.parametrize(("train", "dev", "message"), BAD)
def test_data_that_does_not_fit_is_refused(train: Any, dev: Any, message: str | None) -> None:
    if message is None:
        task_of(train=train, dev=dev)  # further arrays are for a subclass
        return
    with pytest.raises(InputError, match=message):
        task_of(train=train, dev=dev)


def test_a_column_of_one_value_is_a_warning_and_does_not_divide_by_zero() -> None:
    x = np.where(np.arange(3) == 1, 0.1, X)
    x[6, 1] = 7  # which does not count
    task, found = task_of(train={**TRAIN, "x": x, "y": 0 * Y + 3})
    features, targets = task.check_inputs(found)
    assert "1 columns of 'x' have the same value" in features and "(1, counted" in features
    assert "2 columns of 'y'" in targets and "nothing to learn" in targets
    sums = task.loss(task.init(1), found["input"].batch(0), StepContext())
    assert np.isfinite(float(sums.loss_sum))


def test_columns_that_hardly_vary_in_float32_are_reported() -> None:
    """Timestamps of seconds, of which float32 has every 128th."""
    times = 1_700_000_000 + np.arange(7)
    train = {"x": np.stack([times, 2000 + np.arange(7)], 1), "y": Y, "weights": np.ones(7)}
    task, found = task_of(train=train, dev={"x": X[:4, :2], "y": Y[:4], "weights": np.ones(4)})
    (said,) = task.check_inputs(found)
    assert said.startswith("input: 1 columns of 'x' vary too little") and "(0, counted" in said


def test_an_array_that_has_no_effect_is_a_warning() -> None:
    extra = {"train": {**TRAIN, "z": np.ones(7)}, "dev": {**DEV, "z": np.ones(4)}}
    task, found = task_of(**extra)
    message = "input: Regression reads 'x', 'y', 'weights' only: 'z' has no effect"
    assert task.check_inputs(found) == [message]


def test_names_are_those_of_the_input_or_numbers() -> None:
    assert task_of()[0].target_names == ("y0", "y1")
    with pytest.raises(ValueError, match="target_names are price, but there are 2 targets"):
        task_of(Regression.Params(model=LINEAR, target_names=["price"]))


def test_a_model_without_a_number_for_each_target_is_refused() -> None:
    task, found = task_of(Regression.Params(model=Linear.Params(input_dim=3, output_dim=4)))
    with pytest.raises(ValueError, match=r"must return a tensor \[batch, 2\]: a number for each"):
        task.loss(task.init(1), found["input"].batch(0), StepContext())


class Endless(ExampleInput):
    """Has no examples in memory."""

    num_examples = 8

    def examples(self, index: Any, epoch: Any) -> Any:
        """Returns equal examples."""
        ones = np.ones(len(index), np.float32)
        return {"x": np.ones((len(index), 3), np.float32), "y": ones, "weights": ones}


def test_an_input_without_all_examples_at_once_needs_means_and_deviations() -> None:
    input = Endless.Params(batch_size=2).instantiate()
    with pytest.raises(ValueError, match=r"task\.features\.mean and .* are not set"):
        Regression.complete(Regression.Params(), input)
    params = Regression.Params(model=LINEAR)
    params.features.set(mean=[0.0] * 3, scale=[1.0] * 3)
    params.targets.set(mean=[0.0], scale=[2.0])
    task = Regression.complete(params, input).instantiate()
    assert task.check_inputs({"input": input}) == []


class Fitted(Experiment):
    """A linear regression."""

    def task(self) -> Any:
        return Regression.Params(model=LINEAR)

    def input(self) -> Any:
        return Given.Params(batch_size=7, order="sequential")

    def learner(self) -> Any:
        return Learner.Params(optimizer=Momentum.Params(), schedule=Constant.Params(value=0.1))

    def run(self) -> Any:
        return Run.Params(steps=300)


def test_training_fits_a_line_and_a_checkpoint_keeps_means_and_deviations(tmp_path: Path) -> None:
    y = X @ [[3.0, 0.0], [-1.0, 50.0], [2.0, 0.0]] + [4.0, 1000.0]
    Given.made = {"train": {"x": X, "y": y}}
    session = Session(Fitted)
    losses = [figures["loss"] for figures in session.train(300)]
    assert losses[-1] < 1e-3 * losses[0]
    np.testing.assert_allclose(session.predict({"x": X})["y"], y, atol=3)
    theta = session.theta()
    np.testing.assert_allclose(theta.features.mean, X.mean(0), rtol=1e-5)
    np.testing.assert_allclose(theta.targets.scale, y.std(0), rtol=1e-5)
    session.save(str(tmp_path / "run"))

    Given.made = {"train": {"x": 10 * X, "y": y - 77}}  # other means and deviations
    task, _ = task_of(train=Given.made["train"], dev=Given.made["train"])
    theta = load_weights(task, str(tmp_path / "run"))
    np.testing.assert_allclose(task.predict(theta, {"x": X}, StepContext())["y"], y, atol=3)
