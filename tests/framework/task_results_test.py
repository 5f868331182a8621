"""What a task returns is checked: the message names the method, its line and what it returned."""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework import task_results, task_values
from tekso.framework.context import StepContext
from tekso.framework.exports import ExportedFunction
from tekso.framework.pieces import Piece
from tekso.framework.task import Decoded, LossSums, Task, TaskError
from tekso.framework.theta import Theta
from tekso.models.mlp import Mlp
from tekso.tasks.classification.task import Classification

ONE = tf.constant(1.0)
TWO = tf.constant([1.0, 2.0])


class Given(Task):
    """Returns what the test says."""

    given: Any = None

    def loss_weight(self, batch: Any) -> Any:
        return self.given

    def loss(self, theta: Any, batch: Any, ctx: Any) -> Any:
        return self.given


def task(given: Any) -> Given:
    made: Given = Given.Params().instantiate()
    made.given = given
    return made


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (TWO, r"a float32 tensor of shape \[2\], but must be a scalar"),
        (np.ones([1], np.float32), r"a float32 tensor of shape \[1\], but must be a scalar"),
        ([tf.ones(2), tf.ones(3)], "a list of length 2, but must be a scalar"),
        ("a", r"a string tensor of shape \[\], but must be a number"),
        (tf.constant(1j), "a complex128 tensor of shape .*, but must be a number"),
        (None, "None, but must be a scalar"),
        ({"loss": ONE}, "a dict of length 1, but must be a scalar"),
    ],
)
def test_what_is_no_scalar_is_refused_as_a_loss_a_weight_and_in_a_metric(
    value: Any, shown: str
) -> None:
    with pytest.raises(TaskError, match=f"^the loss sum is {shown}: sum the losses"):
        LossSums(value)
    with pytest.raises(TaskError, match=f"^the sum of the metric 'm' is {shown}: "):
        LossSums(ONE, {"m": (value, ONE)})
    with pytest.raises(TaskError, match=f"^the weight of the metric 'm' is {shown}: "):
        LossSums(ONE, {"m": (ONE, value)})
    with pytest.raises(TaskError, match=rf"^the result of Given.loss_weight \(.*\) is {shown}: "):
        task_results.loss_weight(task(value), {})


@pytest.mark.parametrize("pair", [ONE, (ONE,), (ONE, ONE, ONE), 3.0, None])
def test_a_metric_that_is_no_pair_is_refused(pair: Any) -> None:
    with pytest.raises(TaskError, match=r"^the metric 'm' is .*, not a pair: \{name: \(sum, weig"):
        LossSums(ONE, {"m": pair})


def test_metrics_that_are_no_dict_are_refused() -> None:
    metrics: Any = [("m", (ONE, ONE))]
    with pytest.raises(TaskError, match=r"^metrics of LossSums are a list of length 1, not a dict"):
        LossSums(ONE, metrics)


@pytest.mark.parametrize("value", [2, 2.0, np.float64(2), tf.constant(2, tf.int64)])
def test_numbers_become_tensors_of_a_floating_type(value: Any) -> None:
    sums = LossSums(value, {"m": [value, True]})
    assert isinstance(sums.metrics["m"], tuple)
    for tensor, want in (
        (sums.loss_sum, 2.0),
        (sums.metrics["m"][0], 2),
        (sums.metrics["m"][1], 1),
    ):
        assert tensor.dtype.is_floating and float(tensor) == want
    assert task_results.loss_weight(task(value), {}).dtype == tf.float32


@pytest.mark.parametrize("given", [ONE, (ONE, {}), None, {"loss": ONE}])
def test_a_loss_that_is_no_loss_sums_is_refused_with_its_line(given: Any) -> None:
    line = inspect.getsourcelines(Given.loss)[1]
    with pytest.raises(TaskError) as error:
        task_results.loss(task(given), None, {}, None)  # type: ignore[arg-type]
    message = str(error.value)
    assert message.startswith(f"Given.loss ({__file__}:{line}) returns ")
    assert "must return LossSums(loss_sum, metrics)" in message
    sums = LossSums(ONE)
    assert task_results.loss(task(sums), None, {}, None) is sums  # type: ignore[arg-type]


class Figures(Task):
    """Reports what the test says."""

    given: Any = None

    def summarize(self, sums: Any) -> Any:
        return self.given


@pytest.mark.parametrize("value", [0.5, np.float32(0.5), tf.constant(0.5), np.array(0.5)])
def test_figures_of_any_kind_of_number_become_floats(value: Any) -> None:
    made: Figures = Figures.Params().instantiate()
    made.given = {"a": value}
    figures = task_results.summarize(made, {})
    assert figures == {"a": 0.5} and type(figures["a"]) is float


@pytest.mark.parametrize("given", [None, 0.5, [("a", 1.0)], {"a": "high"}, {"a": (1.0, 2.0)}])
def test_figures_that_are_no_numbers_are_refused_with_the_line(given: Any) -> None:
    made: Figures = Figures.Params().instantiate()
    made.given = given
    line = inspect.getsourcelines(Figures.summarize)[1]
    with pytest.raises(TaskError, match=r"but must return \{name: number\}") as error:
        task_results.summarize(made, {})
    assert str(error.value).startswith(f"Figures.summarize ({__file__}:{line}) returns ")


class Results(Task):
    """Every method returns what the test says."""

    given: Any = None

    def predict(self, theta: Any, batch: Any, ctx: Any) -> Any:
        return self.given

    def count(self, batch: Any) -> Any:
        return self.given

    def decode(self, program: Any, input: Any) -> Any:
        return self.given

    def exports(self, input: Any) -> Any:
        return self.given

    def pieces(self) -> Any:
        return self.given

    def score(self, program: Any, input: Any, **kwargs: Any) -> Any:
        return self.given

    def text_exports(self, input: Any) -> Any:
        return self.given

    def setting_to_try(self, eval_inputs: Any) -> Any:
        return self.given


def results(given: Any) -> Any:
    made: Any = Results.Params().instantiate()
    made.given = given
    return made


@pytest.mark.parametrize(
    "given", [3, ("3", "tokens"), (3, 4), (3.5, "tokens"), None, [3, "tokens"]]
)
def test_a_count_that_is_no_number_with_a_unit_is_refused(given: Any) -> None:
    with pytest.raises(TaskError, match=r"^Results.count \(.*_test.py:\d+\) returns .*pair"):
        task_results.count(results(given), {})


def test_a_count_may_be_of_numpy() -> None:
    assert task_results.count(results((np.int64(7), "tokens")), {}) == (7, "tokens")


@pytest.mark.parametrize("given", ["text", ("text", []), {"text": "a"}])
def test_decoding_to_something_else_is_refused(given: Any) -> None:
    with pytest.raises(TaskError, match=r"^Results.decode \(.* return Decoded\(...\) or None"):
        task_results.decode(results(given), None, None)  # type: ignore[arg-type]


def test_decoding_may_give_nothing() -> None:
    decoded = Decoded("a", [])
    assert task_results.decode(results(decoded), None, None) is decoded  # type: ignore[arg-type]
    assert task_results.decode(results(None), None, None) is None  # type: ignore[arg-type]
    assert re.match(
        r"Results.decode\(\) \(.*task_results_test.py:\d+\) returned None: return Decoded\(text, ",
        results(None).why_nothing_decoded(),
    )
    assert task(None).why_nothing_decoded().startswith("Given has no decode(): define it, and")


@pytest.mark.parametrize("given", [None, [], {"f": len}, len])
def test_exports_that_are_no_dict_of_functions_are_refused(given: Any) -> None:
    with pytest.raises(TaskError, match=r"^Results.exports \(.*\{name: ExportedFunction"):
        task_results.exports(results(given), None)


def test_exports_may_be_none_or_some() -> None:
    function = ExportedFunction("Nothing.", lambda theta, ctx: {}, {}, {}, [8])
    assert task_results.exports(results({"f": function}), None) == {"f": function}
    assert task_results.exports(results({}), None) == {}


@pytest.mark.parametrize("given", [None, [], {"f": len}, len])
def test_text_exports_that_are_no_dict_of_texts_are_refused(given: Any) -> None:
    with pytest.raises(TaskError, match=r"^Results.text_exports \(.*\{name: ExportedTexts\("):
        task_results.text_exports(results(given), None)
    assert task_results.text_exports(results({}), None) == {}


@pytest.mark.parametrize("given", [None, [], {"labels": 3}, 3.0])
def test_predictions_that_are_no_dict_of_tensors_are_refused(given: Any) -> None:
    theta: Any = None
    with pytest.raises(TaskError, match=r"^Results.predict \(.*\{name: Tensor\("):
        task_results.predict(results(given), theta, {}, None)


@pytest.mark.parametrize("given", ["text", {"bleu": 3.0}, 3.0])
def test_a_score_that_is_something_else_is_refused(given: Any) -> None:
    call = functools.partial(task_results.score, is_last=True, stopped=lambda: False)
    with pytest.raises(TaskError, match=r"^Results.score \(.* return Scored\(...\) or None"):
        call(results(given), None, None)  # type: ignore[arg-type]
    assert call(results(None), None, None) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [5, "task.prompt", b"a=b", ("a", "b")])
def test_a_setting_to_try_that_is_no_setting_is_refused(given: Any) -> None:
    with pytest.raises(TaskError, match=r'^Results.setting_to_try \(.* "path=value" or None'):
        task_results.setting_to_try(results(given), {})
    assert task_results.setting_to_try(results("a=b"), {}) == "a=b"
    assert task_results.setting_to_try(results(None), {}) is None


class Forgets(Task):
    """Its methods have no `return`."""

    @classmethod
    def complete(cls, params: Any, input: Any) -> Any:
        params.copy()

    @classmethod
    def decodes_data(cls, params: Any) -> Any:
        del params


def test_methods_of_the_class_without_a_return_are_refused_with_their_line() -> None:
    line = inspect.getsourcelines(Forgets.complete)[1]
    with pytest.raises(TaskError) as error:
        task_results.complete(Forgets.Params(), None)
    message = f"Forgets.complete ({__file__}:{line}) returns None, but must return Forgets.Params"
    assert str(error.value).startswith(message)
    with pytest.raises(TaskError, match=r"^Forgets.decodes_data \(.* must return True or False$"):
        task_results.decodes_data(Forgets.Params())


def test_complete_of_params_that_are_of_no_task_says_so() -> None:
    with pytest.raises(TaskError, match=r"^task is Params of Mlp, but Mlp is not a task: "):
        task_results.complete(Mlp.Params(), None)


class Warns(Task):
    """Returns what the test says of its inputs."""

    given: Any = None

    def check_inputs(self, inputs: Any) -> Any:
        """Returns it."""
        return self.given


def test_warnings_are_a_list_of_texts() -> None:
    warns = Warns.Params().instantiate()
    for given, found in ((None, []), ([], []), (["a"], ["a"])):
        warns.given = given
        assert task_results.check_inputs(warns, {}) == found
    for given in ("a", [1], True):
        warns.given = given
        with pytest.raises(TaskError, match=r"^Warns.check_inputs \(.*\) returns .* list of str"):
            task_results.check_inputs(warns, {})


def test_what_every_method_of_a_task_returns_is_checked() -> None:
    functions = inspect.getmembers(task_results, inspect.isfunction)
    checked = {name for name, one in functions if one.__module__ == task_results.__name__}
    for name, method in vars(Task).items():
        method = getattr(method, "__func__", method)
        if inspect.isfunction(method) and not name.startswith("_"):
            returns = inspect.signature(method).return_annotation
            assert name in checked or returns in ("None", "str"), name  # texts are only printed


@pytest.mark.parametrize("found", [({}, {}), ({}, {}, None), "abc", [{}, {}, 1]])
def test_equal_losses_are_two_batches_and_a_text(found: Any) -> None:
    made = results(None)
    assert task_results.equal_losses(made, {}) is None
    made.equal_losses = lambda batch: found  # type: ignore[method-assign]
    with pytest.raises(
        TaskError, match=r"equal_losses.* must return \(batch, batch, what is wrong\)"
    ):
        task_results.equal_losses(made, {})
    made.equal_losses = lambda batch: (batch, batch, "wrong")  # type: ignore[method-assign]
    assert task_results.equal_losses(made, {}) == ({}, {}, "wrong")


@pytest.mark.parametrize("given", [None, [], [len], len, "ab"])
def test_pieces_that_are_no_list_of_pieces_are_refused(given: Any) -> None:
    made = results(given)
    for call in (
        lambda: task_results.pieces(made),
        lambda: made.loss(Theta(), {}, StepContext(mode="eval")),
    ):
        with pytest.raises(TaskError, match=r"^Results.pieces \(.* a list of at least one Piece"):
            call()


@pytest.mark.parametrize("flow", [None, {"loss_sum": ONE}, {"x": ONE}, ONE])
def test_a_last_piece_without_sums_is_refused(flow: Any) -> None:
    made = results([Piece("all", {}, lambda theta, flow_before, ctx: flow)])
    with pytest.raises(
        TaskError, match=r"last piece of Results.pieces .* 'loss_sum' and 'metrics'"
    ):
        made.loss(Theta(), {}, StepContext(mode="eval"))


@pytest.mark.parametrize(("value", "weight", "what"), [(TWO, ONE, "value"), (ONE, TWO, "weight")])
def test_a_metric_that_is_collected_has_to_be_scalars(value: Any, weight: Any, what: str) -> None:
    message = rf"collect_metric\('size'\): the {what} has the shape \[2\], .* a scalar"
    with pytest.raises(ValueError, match=message):
        StepContext(mode="eval").collect_metric("size", value, weight)


def test_a_loss_that_is_collected_has_to_be_a_scalar() -> None:
    ctx = StepContext(mode="train", num_examples=4)
    with pytest.raises(ValueError, match=r"collect_loss\('size'\): the value has the shape \[2\]"):
        ctx.collect_loss("size", TWO)


class OfOnesOwn(Task):
    """A task whose `loss` and `loss_weight` need tensors."""

    def loss_weight(self, batch: Any) -> tf.Tensor:
        """Sums the weights; `rank` is an attribute of tensors alone."""
        assert batch["x"].shape.rank == 1
        return tf.reduce_sum(batch["weights"])

    def loss(self, theta: Any, batch: Any, ctx: Any) -> LossSums:
        """Sums the squares."""
        assert batch["x"].shape.rank == 1
        return LossSums(tf.reduce_sum(batch["weights"] * batch["x"] ** 2))


class Derived(OfOnesOwn):
    """A subclass that calls its base."""

    def loss(self, theta: Any, batch: Any, ctx: Any) -> LossSums:
        """Doubles the loss of the base."""
        return LossSums(2.0 * super().loss(theta, batch=batch, ctx=ctx).loss_sum)


def test_a_task_of_ones_own_takes_batches_of_numpy() -> None:
    batch = {"x": np.array([1.0, 2.0]), "weights": np.array([1.0, 0.5])}
    for kind, factor in ((OfOnesOwn, 1.0), (Derived, 2.0)):
        task = kind.Params().instantiate()
        assert float(task.loss_weight(batch)) == 1.5
        assert float(task.loss(None, batch, StepContext()).loss_sum) == 3.0 * factor
        assert task_results.method_of(task, "loss").endswith(
            f"({__file__}:{inspect.getsourcelines(vars(kind)['loss'])[1]})"
        )


class OfPieces(Task):
    """A loss of two pieces."""

    def pieces(self) -> Any:
        first = Piece("first", {}, lambda theta, flow, ctx: flow)
        return [first, Piece("last", {}, functools.partial(self.sums, 1)).below("child")]

    def sums(self, number: int, theta: Any, flow: Any, ctx: Any) -> Any:
        return flow


def test_the_source_of_a_loss_is_the_last_piece_or_its_method() -> None:
    task: Any = OfPieces.Params().instantiate()
    line = inspect.getsourcelines(OfPieces.sums)[1]
    assert task_results.source_of_loss(task) == f"OfPieces.sums ({__file__}:{line})"
    own: Any = OfOnesOwn.Params().instantiate()
    assert task_results.source_of_loss(own) == task_results.method_of(own, "loss")


class OwnSums(Classification):
    """A classification with another loss."""

    def sums(self, logits: Any, batch: Any) -> Any:
        return LossSums(tf.reduce_mean(logits))


def test_the_source_of_a_loss_is_the_method_that_a_user_overrides() -> None:
    model = Mlp.Params(input_dim=2, output_dim=3)
    task = OwnSums.Params(num_classes=3, model=model).instantiate()
    line = inspect.getsourcelines(OwnSums.sums)[1]
    assert task_results.source_of_loss(task) == f"OwnSums.sums ({__file__}:{line})"


def test_a_tensor_without_a_rank_is_no_matrix_and_is_told_to_get_a_shape() -> None:
    found: list[str] = []

    @tf.function(autograph=False)
    def run(x: Any) -> Any:
        y = tf.py_function(lambda v: v, [x], tf.float32)
        assert not task_values.is_matrix(y, 3) and task_values.is_matrix(x, 3)
        assert not task_values.is_matrix(x, 2) and not task_values.is_matrix("x", 2)
        found.append(task_values.shown(y))
        return y

    run.get_concrete_function(tf.TensorSpec([None, 3]))
    assert found == ["a float32 tensor of unknown shape (tf.ensure_shape gives it one)"]
