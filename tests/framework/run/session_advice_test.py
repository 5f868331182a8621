"""Errors in the code of users have advice as a note, which a notebook shows below them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.batch_part import BatchPart
from tekso.framework.context import StepContext
from tekso.framework.error_advice import IdError, naming_ids
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.pipeline.workers import StageError
from tekso.framework.experiment import Experiment
from tekso.framework.initializers import Zeros
from tekso.framework.input.arrays import Arrays
from tekso.framework.layer import Layer
from tekso.framework.learner import Learner
from tekso.framework.optimizers.adam import Adam
from tekso.framework.params import param
from tekso.framework.run.label_limits import BatchCheck
from tekso.framework.run.session import Session
from tekso.framework.run.session_batches import SessionError
from tekso.framework.schedules import Constant, Schedule
from tekso.framework.task import LossSums, Task
from tekso.models.layers.dropout import Dropout
from tekso.models.layers.embedding import Embedding
from tekso.tasks.classification.task import Classification


class Ids(Arrays):
    def load(self, split: str) -> dict[str, Any]:
        return {"x": np.arange(8) % 4, "labels": np.arange(8) % 3}


class Scores(Layer):
    class Params(Layer.Params):
        """Params of Scores."""

        output_dim: int = param("Classes.", default=3)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child("table", Embedding.Params(vocab_size=4, dim=self.params.output_dim))
        self.child("dropout", Dropout.Params())

    def fprop(self, theta: Any, x: tf.Tensor, ctx: Any) -> tf.Tensor:
        return self.table.fprop(theta.table, tf.cast(x, tf.int32), ctx)


class Stepwise(Schedule):
    def after_warmup(self, step: tf.Tensor) -> Any:
        return 0.1 if step < 3 else 0.01


class Classes(Experiment):
    def task(self) -> Any:
        return Classification.Params(model=Scores.Params())

    def input(self) -> Any:
        return Ids.Params(batch_size=4)

    def learner(self) -> Any:
        return Learner.Params(optimizer=Adam.Params(), schedule=Constant.Params(value=0.1))


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", ()))


def test_a_schedule_with_a_branch_is_told_to_use_where() -> None:
    class Branching(Classes):
        def learner(self) -> Any:
            return super().learner().set(schedule=Stepwise.Params())

    with pytest.raises(Exception, match="as a Python") as caught:
        Session(Branching).train(1)
    assert notes(caught.value).count("write tf.where(condition, a, b)") == 1


def test_an_id_without_a_row_is_an_error_of_the_batch_and_of_the_line_that_looks_up() -> None:
    session = Session(Classes)
    said = (
        r"^'x' \(example 1\) has the id 9, but the table, .* has the rows 0 to 3: set its size "
        r".*\n  \(at .*:\d+, in \w+\)\n    return "
    )
    batch = {"x": np.array([1, 9])}
    with pytest.raises(IdError, match=said) as caught:
        session.predict(batch)
    assert caught.value.__suppress_context__ and not notes(caught.value)
    with pytest.raises(IdError, match=r"^model/table \(Embedding\): the data has the id 9, but"):
        session.task.predict(session.theta(), batch, StepContext(mode="eval"))


def test_strict_assignment_names_the_weights_that_are_missing() -> None:
    session = Session(Classes)
    table = "model/table/table"
    value = np.ones(session.task.specs()[table].shape, np.float32)
    for path, given in (("", {}), ("model", {}), ("model", {"other": value})):
        session.assign({} if "other" in given else given, path=path)  # a part of the weights
        with pytest.raises(SessionError, match=f"do not fit the task: .*{table} is missing"):
            session.assign(given, path=path, strict=True)
    session.assign({table: value}, strict=True)
    session.assign({"table/table": value}, path="model", strict=True)
    session.assign({}, path="model/dropout", strict=True)  # a layer without weights
    for path in ("mod", "model/table/table", "model/"):
        session.assign({}, path=path)
        with pytest.raises(SessionError, match=f"do not fit the task: it has no layer '{path}'"):
            session.assign({}, path=path, strict=True)
    assert (np.asarray(session.theta().model.table.table) == 1).all()


class Noisy(Classification):
    """Adds noise three times."""

    def predict(self, theta: Any, batch: Any, ctx: Any) -> Any:
        x = tf.cast(batch["x"], tf.float32)
        for _ in range(3):
            x += ctx.normal(self, x.shape)
        return {"x": x}


def test_a_prediction_with_the_same_random_numbers_in_each_iteration_warns_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Sampled(Classes):
        def task(self) -> Any:
            return Noisy.Params(model=Scores.Params())

    session = Session(Sampled)
    for _ in range(2):
        session.predict({"x": np.array([1, 2])})
    (line,) = [one for one in caplog.messages if "random numbers" in one]
    assert line.startswith("Noisy draws the same random numbers several times in predict: in a lo")
    assert "session_advice_test.py" in line and "ctx.fold(i)" in line


class Unknown(Ids):
    def load(self, split: str) -> dict[str, Any]:
        return {"x": np.arange(8) + 1, "labels": np.arange(8) % 3}


class Shifted(Scores):
    def fprop(self, theta: Any, x: tf.Tensor, ctx: Any) -> tf.Tensor:
        return super().fprop(theta, x + 40, ctx)


def test_an_id_that_no_array_of_the_batch_has_is_said_to_be_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Computed(Classes):
        def task(self) -> Any:
            return Classification.Params(model=Shifted.Params())

    session = Session(Computed)
    monkeypatch.setattr(session, "_check_task", lambda: BatchCheck(session.task))
    said = (
        r"^the task computes the id 4[0-3], which no array of whole numbers in the batch has, but "
        r"the table, .* has the rows 0 to 3: correct the computation"
    )
    with pytest.raises(IdError, match=said):
        session.train(1)


class Unchecked(Classes):
    def input(self) -> Any:
        return Unknown.Params(batch_size=8)


def test_training_names_the_batch_and_the_example_of_an_id_without_a_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = Session(Unchecked)
    monkeypatch.setattr(session, "_check_task", lambda: BatchCheck(session.task))
    x = session.input.batch(0)["x"]
    wrong = int(np.flatnonzero(x > 3)[0])
    said = (
        r"^'x' \(example \d of input\.batch\(0\)\) has the id [4-8], but the table, .* 0 to 3: .*\n"
        r"  \(at .*lookup.py:\d+, in lookup\)\n    return tf\.gather"
    )
    with pytest.raises(IdError, match=said) as caught:
        session.train(1)
    number, found = re.findall(r"example (\d) .* the id (\d)", str(caught.value))[0]
    assert x[int(number)] == int(found) and wrong <= int(number)


def test_an_id_in_a_stage_of_a_pipeline_is_named_with_the_stage() -> None:
    stage = "forward of micro-batch 5 at stage 0 (model/table) on /device:CPU:0"
    reason = "indices[0,3] = 9 is not in [0, 4)"
    error = StageError(f"{stage} failed: InvalidArgumentError: {reason}")
    error.__cause__ = tf.errors.InvalidArgumentError(
        None,
        None,
        f"Graph execution error:\n\n<stack traces unavailable>\n{reason}\n\t [[{{{{node a}}}}]]",
    )
    part = BatchPart({"x": np.array([[1, 9]]), "y": np.array([2.0])}, ((6, 7),), 8)
    first = {"x": np.array([[0, 1]])}
    with (
        pytest.raises(IdError) as caught,
        naming_ids({"input.batch(0)": first, "input.batch(1)": part}),
    ):
        raise error
    text = str(caught.value)
    assert text.startswith("'x' (example 6 of input.batch(1)) has the id 9, but the table")
    assert text.endswith(f"\n  ({stage})")
    with pytest.raises(StageError), naming_ids({"input.batch(0)": first}):
        raise StageError("forward failed: InvalidArgumentError: something else")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([[1], [1, 2]], "has rows of different lengths: pad them to one length"),
        ([{"a": 1}, {"b": 2}], "contains dicts with the keys 'a', 'b': make an array of each key"),
        (["a", None], "contains texts and other values"),
    ],
)
def test_values_that_are_no_arrays_are_named(value: Any, message: str) -> None:
    session = Session(Classes)
    batch = dict(session.input.batch(0))
    name = next(iter(batch))
    with pytest.raises(SessionError, match=f"^wrong arrays: {name!r} {message}"):
        session.predict({**batch, name: value})
    plain = f"^wrong arrays: {name!r} is a list; np.asarray"
    with pytest.raises(SessionError, match=plain):
        session.loss(session.theta(), {**batch, name: value})
    with pytest.raises(SessionError, match=r"a dict of arrays by name, as session.input.batch"):
        session.loss(session.theta(), [value])  # type: ignore[arg-type]


THETA = "wrong arrays: expected a dict of arrays by name, as session.theta() returns, given "
BATCH = "wrong arrays: expected a dict of arrays by name, as session.input.batch(0) returns, given "
TABLE = "model/table/table"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s, batch: s.loss(None, batch), THETA + "None"),
        (lambda s, batch: s.gradients(None, batch), THETA + "None"),
        (lambda s, batch: s.loss(s.theta(), None), BATCH + "None"),
        (lambda s, batch: s.gradients(s.theta(), None), BATCH + "None"),
        (lambda s, batch: s.loss({}, batch), f"wrong arrays: {TABLE} is missing"),
        (
            lambda s, batch: s.loss({TABLE: None}, batch),
            f"an array for {TABLE}, given None",
        ),
        (
            lambda s, batch: s.gradients({TABLE: np.zeros([3, 4])}, batch),
            f"wrong arrays: {TABLE} has the shape [3, 4], expected [4, 3]",
        ),
        (
            lambda s, batch: s.loss(s.theta(), batch, mode="test"),
            "mode is 'test', but must be 'train' or 'eval'",
        ),
        (lambda s, batch: s.predict({1: [2]}), BATCH + "the key 1"),
        (lambda s, batch: s.assign(None), THETA + "None"),
        (lambda s, batch: s.assign({1: [2]}), THETA + "the key 1"),
        (lambda s, batch: s.assign({TABLE: [[1], [1, 2]]}), f"{TABLE} has rows of different"),
        (lambda s, batch: s.assign({TABLE: "one"}), f"{TABLE} has the dtype <U3, expected float32"),
        (lambda s, batch: s.save(None), "logdir is None, but must be the path of a folder"),
        (lambda s, batch: s.save(""), "logdir is empty: give a new folder"),
        (lambda s, batch: Session(Classes, s.step), "settings are {path: value}, as in"),
    ],
)
def test_arguments_of_a_wrong_type_are_named(call: Any, message: str) -> None:
    session = Session(Classes)
    with pytest.raises(SessionError, match=re.escape(message)):
        call(session, session.input.batch(0))


def test_a_loss_takes_weights_as_nested_dicts_of_arrays() -> None:
    session = Session(Classes)
    batch, theta = session.input.batch(0), session.theta()
    table = theta.model.table.table.numpy()
    for weights in ({"model": {"table": {"table": table}}}, {TABLE: table.astype(np.float64)}):
        assert float(session.loss(weights, batch)) == float(session.loss(theta, batch))
        found = session.gradients(weights, batch).model.table.table
        np.testing.assert_array_equal(found, session.gradients(theta, batch).model.table.table)


@pytest.mark.parametrize("number", [0, -1, 1.5, "2", 10**9])
def test_a_number_of_devices_that_cannot_be_is_named(number: Any) -> None:
    message = f"devices is {number!r}, but must be a whole number from 1 to 4,096$"
    with pytest.raises(ExecutionError, match=message):
        Session(Classes, cpu_devices=number)


def test_an_execution_by_name_is_answered_with_its_params() -> None:
    with pytest.raises(SessionError, match=r"'pipelined', but must be Params, as in \{'execution'"):
        Session(Classes, {"execution": "pipelined"})


class Few(Arrays):
    """Has a label that is no class in its first batch, and the same number in another array."""

    def load(self, split: str) -> dict[str, Any]:
        return {"x": np.array([2, 3, 1, 0]), "labels": np.array([3, 0, 2, 1])}


class SparseTask(Task):
    """Uses a sparse cross-entropy."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.weight("table", [4, 3], dims=(None, None), init=Zeros.Params())

    def loss_weight(self, batch: Any) -> tf.Tensor:
        return tf.reduce_sum(batch["weights"])

    def loss(self, theta: Any, batch: Any, ctx: Any) -> LossSums:
        scores = tf.gather(theta.table, batch["x"])
        nats = tf.nn.sparse_softmax_cross_entropy_with_logits(batch["labels"], scores)
        return LossSums(tf.reduce_sum(batch["weights"] * nats))


class Sparse(Classes):
    def task(self) -> Any:
        return SparseTask.Params()

    def input(self) -> Any:
        return Few.Params(batch_size=4, order="sequential")


@pytest.mark.parametrize("is_checked", [True, False])
def test_a_label_that_is_no_class_in_the_first_examples_is_named(
    is_checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(Sparse)
    if not is_checked:
        monkeypatch.setattr(session, "_check_task", lambda: BatchCheck(session.task))
    said = (
        r"^'labels' \(example 0 of input\.batch\(0\)\) has the label 3, but the loss has 3 "
        r"classes: labels are 0 to 2\. Correct .*\n  \(at .*, in loss\)\n    nats = "
    )
    with pytest.raises(IdError, match=said) as caught:
        session.train(1)
    assert "Label values" not in str(caught.value)
    assert str(caught.value).count("\n") == 2
