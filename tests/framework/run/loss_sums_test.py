"""Before the first step: losses and metrics that are no sums over the examples of a batch."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import wrong_losses
from wrong_losses import Points, Squares, check

from tekso.framework.context import StepContext
from tekso.framework.foreign_variables import ForeignVariableError
from tekso.framework.initializers import Zeros
from tekso.framework.layer import Layer
from tekso.framework.run import loss_couplings
from tekso.framework.run.loss_causes import LossError, changed_attributes
from tekso.framework.run.loss_sums import check_is_sum
from tekso.framework.run.loss_trial import Trial, TrialSums
from tekso.framework.task import LossSums, Task
from tekso.framework.theta import flatten


@pytest.mark.parametrize(("way", "what"), [("mean", "loss"), ("mean weight", "loss_weight")])
def test_means_are_refused_with_the_figures_that_show_it(way: str, what: str) -> None:
    with pytest.raises(LossError) as error:
        check(way)
    message = str(error.value)
    assert message.startswith(f"Squares.{what} ({wrong_losses.__file__}:")
    assert "is not a sum over the examples of a batch: for 3 examples together it is" in message
    assert ". It is a mean. Return the sum (tf.reduce_sum, not tf.reduce_mean): " in message
    assert not any(word in message for word in ("penalty", "couple", "Keras", "squeeze"))


def test_a_penalty_in_the_sum_is_refused_though_it_is_small() -> None:
    with pytest.raises(LossError) as error:
        check("penalty")
    what = r"It contains a number that does not depend on the examples\. Multiply a penalty .*"
    assert re.fullmatch(rf"Squares.loss .* and \S+\. {what} \* penalty", str(error.value))


class Wrong(Squares):
    """Has the mistake that the way of the test names."""

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> LossSums:
        y, given = tf.linalg.matvec(batch["x"], theta.w), batch["x"][:, :1]
        error = y - tf.squeeze(given, 1)
        if self.params.way == "column":
            error = y - given
        if self.params.way == "mean of a column":
            return LossSums(tf.reduce_mean((given - y) ** 2))
        if self.params.way == "Keras":
            return LossSums(tf.keras.losses.MeanSquaredError()(given, y))
        if self.params.way == "layer of Keras":
            y = tf.squeeze(tf.keras.layers.Dense(1)(batch["x"]), 1)
            return LossSums(tf.reduce_sum(batch["weights"] * y**2))
        if self.params.way == "stateless noise":
            error += tf.random.stateless_uniform(tf.shape(error), [1, 2])
        if self.params.way == "centered, by size":
            is_two = error.shape[0] == 2
            error -= tf.reduce_mean(error)
            error = tf.multiply(error, 1.0, "same") if is_two else tf.identity(error, "same")
        if self.params.way == "centered":
            error -= tf.reduce_mean(error)
        if self.params.way == "vectorized":
            error = tf.vectorized_map(lambda one: 2.0 * one, error)
            error -= tf.reduce_mean(error)
        if self.params.way == "traced":
            error = tf.function(lambda x: x - tf.reduce_mean(x), autograph=False)(error)
        if self.params.way == "sorted":
            error += tf.sort(error, 0)
        if self.params.way == "shared noise":
            error = tf.reduce_sum(batch["x"] * ctx.uniform(self, [3]), 1)
        if self.params.way == "product":
            return LossSums(tf.reduce_sum(error) ** 2)
        if self.params.way == "if" and tf.reduce_sum(y) > 0:
            error = error + 1.0
        return LossSums(tf.reduce_sum(batch["weights"] * error**2))


@pytest.mark.parametrize(
    ("way", "shapes", "line"),
    [
        ("column", r"\[batch\] and \[batch, 1\]", "error = y - given"),
        (
            "mean of a column",
            r"\[batch, 1\] and \[batch\]",
            r"return LossSums\(tf.reduce_mean\(\(given - y\) \*\* 2\)\)",
        ),
    ],
)
def test_the_difference_of_a_column_and_a_row_is_named_with_its_line(
    way: str, shapes: str, line: str
) -> None:
    with pytest.raises(LossError) as error:
        check(way, Wrong)
    assert re.fullmatch(
        r"Wrong.loss \(.*:\d+\) combines every example with every other one: tensors of shapes "
        rf"{shapes} give \[batch, batch\]\. .*\n  \(at {__file__}:\d+, in loss\)\n    {line}",
        str(error.value),
    )


def test_the_mean_of_a_keras_loss_is_said_to_be_one() -> None:
    with pytest.raises(LossError, match=r"\d\. A Keras loss returns a mean\. Compute .* losses\)$"):
        check("Keras", Wrong)


def test_a_keras_layer_made_in_a_call_is_not_taken_for_random_numbers() -> None:
    what = rf"^Wrong calls a Keras layer \({__file__}:\d+\), which creates the variable 'kernel'"
    with pytest.raises(ForeignVariableError, match=what):
        check("layer of Keras", Wrong)


def test_a_loss_that_couples_examples_is_told_how_to_say_so() -> None:
    causes = r"random numbers that are not from ctx, and for batch statistics, .* BatchNorm "
    what = rf"\d\. What one .* {causes}.* set couples_examples = True in Wrong, or in the layer"
    with pytest.raises(LossError, match=what):
        check("product", Wrong)


@pytest.mark.parametrize(
    ("way", "line"),
    [
        ("centered", "error -= tf.reduce_mean(error)"),
        ("sorted", "error += tf.sort(error, 0)"),
        ("vectorized", "error -= tf.reduce_mean(error)"),
        (
            "traced",
            "error = tf.function(lambda x: x - tf.reduce_mean(x), autograph=False)(error)",
        ),
    ],
)
def test_the_line_that_combines_examples_is_named(way: str, line: str) -> None:
    with pytest.raises(LossError) as error:
        check(way, Wrong)
    what = (
        r"The examples are first combined at the line below\. If .* couples_examples = True in "
        "Wrong, or in the layer that couples them"
    )
    place = rf"\n  \(at {__file__}:\d+, in loss\)\n    {re.escape(line)}"
    assert re.search(rf"{what}{place}$", str(error.value))


def test_a_wrong_loss_may_have_other_ops_for_other_numbers_of_examples() -> None:
    with pytest.raises(LossError, match="What one example adds depends on the other examples"):
        check("centered, by size", Wrong)


def test_an_error_of_the_search_for_this_line_does_not_replace_the_error_of_the_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("no line")

    monkeypatch.setattr(loss_couplings, "_recorded", failing)
    with pytest.raises(LossError, match="What one example adds depends on the other examples"):
        check("centered", Wrong)


def test_random_numbers_without_a_batch_dimension_are_told_to_be_shared() -> None:
    with pytest.raises(LossError) as error:
        check("shared noise", Wrong)
    what = (
        r"Draw them with shared=True, as in ctx\.uniform\(self, shape, shared=True\), or for each"
    )
    place = rf" example\n  \(at {__file__}:\d+, in loss\)\n    error = .*ctx.uniform\(self, \[3\]\)"
    assert re.search(what + place, str(error.value))


def test_stateless_noise_is_named_with_its_line() -> None:
    with pytest.raises(LossError, match=r"^Wrong draws random numbers of examples .*\n.*, in loss"):
        check("stateless noise", Wrong)


def test_an_if_on_a_tensor_is_not_taken_for_a_mistake_of_the_loss() -> None:
    """The first step reports it, with its line."""
    task = Wrong.Params(way="if").instantiate()
    trial = Trial(task, flatten(task.init(seed=1)))
    batch = Points.Params(batch_size=4).instantiate().batch(0)
    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError, match="as a Python `bool`"):
        check_is_sum(trial, batch, "eval")


def test_a_metric_that_is_a_mean_is_refused() -> None:
    what = r"^the metric 'size' of Squares.loss \(.*\) depends on how a batch is divided: for 3"
    advice = "a weight of 0 needs no guard. Task.summarize computes a root .* maximum cannot be"
    with pytest.raises(LossError, match=rf"{what}.* {advice}"):
        check("metric is a mean")


def test_a_sum_that_overflows_is_no_mean() -> None:
    unused = "the loss does not depend on"
    (not_finite, other) = check("overflows")
    assert "is inf" in not_finite and other.startswith(unused)


def test_a_sum_over_examples_with_random_numbers_is_no_mean() -> None:
    assert len(check("noise")) == 1  # the weight that is not used


def test_only_an_error_makes_it_compute_the_same_again(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[tuple[Any, ...]] = []
    sums = Trial.sums

    def counted(trial: Trial, batch: Any, **settings: Any) -> TrialSums:
        contents = [(name, array.tobytes()) for name, array in sorted(batch.items())]
        computed.append((*contents, *sorted(settings.items())))
        return sums(trial, batch, **settings)

    monkeypatch.setattr(Trial, "sums", counted)
    check("used in training")
    assert computed and len(computed) == len(set(computed))
    computed.clear()
    with pytest.raises(LossError):
        check("mean")
    assert len(computed) == len(set(computed)) + 3


@pytest.mark.parametrize(
    ("way", "cause"),
    [
        ("noise of NumPy", r"tf.random, .*ctx.uniform"),
        ("counts its calls", r"each call changes Squares.calls\. .*trainable=False"),
    ],
)
def test_a_loss_that_differs_each_time_is_refused(way: str, cause: str) -> None:
    with pytest.raises(LossError, match=rf"^Squares computes a different loss each time .*{cause}"):
        check(way)


class Changing(Layer):
    """Has attributes, some of which `fprop` changes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.seen: list[float] = []
        self.total, self.fixed = np.zeros(2), (1.0,)

    def fprop(self, theta: Any, x: Any, ctx: Any) -> Any:
        self.seen.append(x)
        self.total += x
        return self.fixed


class HasChanging(Task):
    """Has a layer that changes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child("one", Changing.Params())


def test_changed_attributes_are_named_with_their_layer() -> None:
    task: Any = HasChanging.Params().instantiate()
    found = changed_attributes(task, lambda: task.one.fprop(None, 2.0, None))
    assert found == ["Changing.seen (one)", "Changing.total (one)"]
    assert changed_attributes(task, lambda: None) == []


def test_random_numbers_of_tensorflow_are_refused_with_their_line() -> None:
    what = rf"^Squares draws random numbers \({wrong_losses.__file__}:\d+\) that do not depend on"
    with pytest.raises(ForeignVariableError, match=what):
        check("noise without a seed")


@pytest.mark.parametrize(
    ("way", "what"),
    [("metric of NumPy", "metric 'size'"), ("penalty of NumPy", "auxiliary loss 'l2'")],
)
def test_a_metric_or_an_auxiliary_loss_that_differs_each_time_is_called_so(
    way: str, what: str
) -> None:
    with pytest.raises(LossError, match=rf"^Squares computes a different {what} each time"):
        check(way)


def test_a_mean_that_only_training_uses_is_refused() -> None:
    with pytest.raises(LossError, match=r"is not a sum over the examples of a batch in training"):
        check("mean in training")


def test_a_mean_of_small_losses_is_refused() -> None:
    with pytest.raises(LossError, match=r"is not a sum over the examples of a batch: for 3"):
        check("mean of 1e-9")


class Signed(Squares):
    """The first example has a loss of 1, and each other one of -1, as a log density may have."""

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> LossSums:
        first = Points.Params(batch_size=4).instantiate().batch(0)["x"][0, 0]
        sign = tf.where(batch["x"][:, 0] == first, 1.0, -1.0)
        return LossSums(tf.reduce_sum(sign * batch["weights"]) * tf.reduce_sum(theta.w) ** 2)


class Nil(Squares):
    """The loss of all examples is 0."""

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> LossSums:
        return LossSums(tf.reduce_sum(0.0 * batch["weights"]))


def test_a_sum_of_losses_of_both_signs_that_equals_the_mean_of_its_parts_is_a_sum() -> None:
    """1 and -2 are together -1, which is also a third of the first and two thirds of the second."""
    assert len(check("nothing", Signed)) == 1  # the weight that is not used


def test_losses_of_0_are_a_sum() -> None:
    assert len(check("nothing", Nil)) == 1  # the weights, which are not used


def test_an_auxiliary_loss_has_to_be_a_sum_over_examples() -> None:
    assert len(check("penalty times examples")) == 1  # the weight that is not used
    what = r"^the auxiliary loss 'l2' of ctx.collect_loss is not a sum over the examples: for 3"
    with pytest.raises(LossError, match=what):
        check("penalty collected")


def test_a_weight_of_a_metric_that_does_not_add_up_is_a_warning_where_the_metric_is_0() -> None:
    assert any("weight of the metric 'size' does not add up" in x for x in check("metric of 16"))


def counted(x: tf.Tensor) -> tf.Tensor:
    """Returns how many rows of each column are above 0, which is 0 for some parts."""
    return tf.reduce_sum(tf.cast(x > 0.0, tf.float32), 0)


STATISTICS = {  # {way: (whether its mean is that of the global batch, sum and weight)}
    "mean": (True, lambda x, n, N, theta: (tf.reduce_sum(x, 0), n)),
    "sum": (True, lambda x, n, N, theta: (tf.reduce_sum(x, 0) * N, n)),
    "shared": (True, lambda x, n, N, theta: (theta.sizes + 1.0, 1.0)),
    "shared times examples": (True, lambda x, n, N, theta: ((theta.sizes + 1.0) * n, n)),
    "per class": (True, lambda x, n, N, theta: (tf.reduce_sum(tf.nn.relu(x), 0), counted(x))),
    "none": (True, lambda x, n, N, theta: (0.0 * tf.reduce_sum(x, 0), 0.0)),
    "sum of the part": (False, lambda x, n, N, theta: (tf.reduce_sum(x, 0), 1.0)),
    "mean of the part": (False, lambda x, n, N, theta: (tf.reduce_mean(x, 0), n)),
    "largest": (False, lambda x, n, N, theta: (n * tf.reduce_max(x, 0), n)),
    "guarded": (
        False,
        lambda x, n, N, theta: (tf.reduce_sum(tf.nn.relu(x), 0), tf.maximum(counted(x), 1.0)),
    ),
}


class Collecting(Squares):
    """Collects a statistic for a weight that steps change."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.weight("sizes", [2], dims=(None,), init=Zeros.Params(), trainable=False)

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> LossSums:
        if ctx.is_training:
            x = batch["x"][:, :2]
            if self.params.way == "of NumPy":
                x *= np.random.default_rng().uniform(1.0, 9.0)
            _, pair = STATISTICS.get(self.params.way, STATISTICS["mean"])
            total, weight = pair(x, float(x.shape[0]), float(ctx.num_examples), theta)
            ctx.collect_statistic(self, "sizes", total, weight * tf.ones_like(total))
        return LossSums(tf.reduce_sum(theta.w) ** 2 * tf.reduce_sum(batch["weights"]))

    def updated_statistics(self, theta: Any, statistics: Any) -> Any:
        return {"sizes": theta.sizes + statistics["sizes"]}


@pytest.mark.parametrize("way", STATISTICS)
def test_the_mean_of_a_statistic_is_that_of_the_global_batch(way: str) -> None:
    if STATISTICS[way][0]:
        check(way, Collecting)
        return
    what = r"^the statistic 'sizes' of ctx.collect_statistic .* for 3 examples together, and .*"
    with pytest.raises(LossError, match=f"{what} as the weight, which needs no guard: 0 / 0 is 0"):
        check(way, Collecting)


def test_a_statistic_that_differs_each_time_is_called_so() -> None:
    with pytest.raises(LossError, match=r"^Collecting computes a different statistic 'sizes' each"):
        check("of NumPy", Collecting)


class Measuring(Squares):
    """Collects a sum over the examples, divided by their number or by one."""

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> LossSums:
        examples = tf.cast(tf.shape(batch["x"])[0], tf.float32)
        weight = examples if self.params.way == "sums" else 1.0
        ctx.collect_metric("norm", tf.reduce_sum(batch["x"] ** 2), weight)
        ctx.collect_metric("scale", 3.0, 1.0)  # the same in every part
        return super().loss(theta, batch, ctx)


def test_a_metric_of_a_layer_has_to_be_sums_over_examples() -> None:
    check("sums", Measuring)
    what = r"^the metric 'norm' of ctx.collect_metric depends on how a batch is divided: for 3"
    with pytest.raises(LossError, match=what):
        check("one", Measuring)
