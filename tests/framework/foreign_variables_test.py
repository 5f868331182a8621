"""A variable that no layer declared is refused, however it comes in, in every execution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework import foreign_variables
from tekso.framework.context import ContextError, StepContext
from tekso.framework.costs.piece_traces import trace_all
from tekso.framework.execution import DataParallel
from tekso.framework.execution.mesh import activations
from tekso.framework.foreign_variables import ForeignVariableError
from tekso.framework.initializers import Ones
from tekso.framework.layer import Layer
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import Momentum
from tekso.framework.params import param
from tekso.framework.schedules import Constant
from tekso.framework.task import LossSums, Task

BATCH = {"x": np.ones((4, 3), np.float32), "weights": np.ones(4, np.float32)}
SIGNATURE: Any = {name: (array.shape, array.dtype) for name, array in BATCH.items()}
GLOBAL: dict[str, Any] = {}


class Scaled(Layer):
    """Multiplies by a weight, and by what the way of the test brings in."""

    class Params(Layer.Params):
        """Params of Scaled."""

        way: str = param("How a variable comes in.", default="none")

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.weight("scale", [3], dims=("embed",), init=Ones.Params())
        if self.params.way == "attribute":
            self.extra = tf.Variable([1.0, 2.0, 3.0], name="extra")
        elif self.params.way == "nest":
            self.extra = {"all": [(tf.Variable(1.0),)]}
        elif self.params.way == "keras":
            self.extra = tf.keras.layers.Dense(3)
            self.extra.build((4, 3))
        elif self.params.way == "keras_later":
            self.extra = tf.keras.layers.Dense(3)
        elif self.params.way == "module":
            self.extra = tf.Module()
            self.extra.inner = tf.Variable(2.0)
        elif self.params.way == "random array":
            self.extra = [np.random.rand(3)]
        elif self.params.way == "random tensor":
            self.extra = tf.random.normal([3])
        elif self.params.way == "random with a seed":
            self.extra = (np.random.default_rng(0).random(3), np.full(2, np.nan))
        elif self.params.way == "layer":
            self.extra = Scaled.Params().instantiate()
        elif self.params.way == "layers":
            self.extra = [Scaled.Params().instantiate()]

    def fprop(self, theta: Any, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        way = self.params.way
        if way == "global":
            x = x * GLOBAL["variable"]
        elif way == "made":
            x = x * tf.Variable(2.0, name="made")
        elif way in ("keras_later", "module"):
            x = self.extra(x) if way == "keras_later" else x * self.extra.inner
        elif way == "in_a_loop":
            x = tf.while_loop(
                lambda i, y: i < 2, lambda i, y: (i + 1, y * GLOBAL["variable"]), (0, x)
            )[1]
        elif way == "in_a_function":
            x = GLOBAL["function"](x)
        elif way == "random":
            x = x + tf.random.normal([3])
        elif way == "context":
            x = StepContext(mode="train").uniform(self, x.shape)
        elif way == "random in a loop":
            x = tf.while_loop(
                lambda i, y: i < 2, lambda i, y: (i + 1, y + tf.random.uniform([3])), (0, x)
            )[1]
        return x * theta.scale


class Squares(Task):
    """The sum of squares of what its layer makes."""

    class Params(Task.Params):
        """Params of Squares."""

        way: str = param("Of the layer.", default="none")

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child_list("layers", [Scaled.Params(), Scaled.Params(way=self.params.way)])
        self.table = tf.lookup.StaticHashTable(
            tf.lookup.KeyValueTensorInitializer(["a"], [1]), default_value=0
        )

    def loss_weight(self, batch: Any) -> tf.Tensor:
        return tf.reduce_sum(batch["weights"])

    def loss(self, theta: Any, batch: Any, ctx: Any) -> LossSums:
        x = batch["x"]
        for layer, own in zip(self.layers, theta.layers.values(), strict=True):
            x = layer.fprop(own, x, ctx)
        return LossSums(tf.reduce_sum(batch["weights"] * tf.reduce_sum(tf.square(x), -1)))


def task(way: str) -> Squares:
    GLOBAL["variable"] = tf.Variable(2.0, name="outside")
    GLOBAL["function"] = tf.function(lambda x: x * GLOBAL["variable"], autograph=False)
    made: Squares = Squares.Params(way=way).instantiate()
    return made


@pytest.mark.parametrize(
    ("way", "what"),
    [
        ("attribute", r"an attribute 'extra' of type ResourceVariable"),
        ("nest", r"an attribute 'extra' of type dict with the variable"),
        ("keras", r"an attribute 'extra' of type Dense with the variable .* and 1 more"),
        ("module", r"an attribute 'extra' of type Module with the variable"),
    ],
)
def test_variables_in_attributes_are_refused_when_built_naming_layer_and_cure(
    way: str, what: str
) -> None:
    with pytest.raises(ForeignVariableError, match=what) as error:
        foreign_variables.check(task(way))
    assert str(error.value).startswith("layers/1 (Scaled) has an attribute 'extra'")
    assert "self.weight(name, shape" in str(error.value)


@pytest.mark.parametrize(
    ("way", "call"),
    [("layer", r"self.child\('extra', "), ("layers", r"self.child_list\('extra', ")],
)
def test_layers_in_attributes_that_are_no_children_are_refused(way: str, call: str) -> None:
    what = (
        r"^layers/1 \(Scaled\) has an attribute 'extra' with a layer of type Scaled that is not one"
    )
    with pytest.raises(ForeignVariableError, match=f"{what}.*{call}"):
        foreign_variables.check(task(way))


class MadeInFprop(Layer):
    """Computes by a layer that it builds in every call."""

    def fprop(self, theta: Any, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        made = Scaled.Params().instantiate()
        return made.fprop(made.init(seed=0), x, ctx)


@pytest.mark.parametrize("autograph", [False, True])
def test_weights_that_are_drawn_in_a_step_are_refused(autograph: bool) -> None:
    layer = MadeInFprop.Params().instantiate()
    step = tf.function(lambda x: layer.fprop(None, x, StepContext()), autograph=autograph)
    message = r"^Scaled\.init\(\) runs while a step is traced: .* self\.child\(name, Scaled\.Par"
    with pytest.raises(RuntimeError, match=message) as error:
        step.get_concrete_function(tf.TensorSpec([4, 3]))
    assert "\n" not in str(error.value)


def doubled(x: tf.Tensor) -> tf.Tensor:
    layer = Scaled.Params().instantiate()
    return 2 * layer.fprop(layer.init(), x, StepContext())


@pytest.mark.parametrize("way", ["function", "map"])
def test_weights_that_are_drawn_in_a_function_of_the_user_are_refused(way: str) -> None:
    with pytest.raises(RuntimeError) as error:
        if way == "map":
            tf.data.Dataset.from_tensors(tf.ones([4, 3])).map(doubled)
        else:
            tf.function(doubled)(tf.ones([4, 3]))
    assert str(error.value) == (
        "Scaled.init() runs while a function is traced, such as a tf.function or that of "
        "Dataset.map: its weights would be constants, which are neither trained nor saved. Call "
        "theta = layer.init() before, and use theta in the function"
    )


def test_layers_without_variables_pass() -> None:
    made = task("none")
    made.layers[1].other = made.layers[0]  # a layer of the tree may be known to another
    foreign_variables.check(made)


def train(made: Task, *, towers: int = 1, xla: str = "none") -> Any:
    learner = Learner.Params(optimizer=Momentum.Params(), schedule=Constant.Params(value=0.1))
    program: Any = (
        DataParallel.Params(towers=towers, xla=xla)
        .instantiate()
        .build(made, learner.instantiate(), seed=0, batch=SIGNATURE)
    )
    program.initialize()
    return program.train_step(BATCH, 0), program.eval_step(BATCH)


def train_in_compiled_towers(made: Task) -> Any:
    return train(made, towers=2, xla="step")


def lay_over_a_mesh(made: Task) -> Any:
    return activations.of_task(made, SIGNATURE)


def cut_into_pieces(made: Task) -> Any:
    return trace_all(made.pieces(), made.specs(), SIGNATURE)


EXECUTIONS = [train, train_in_compiled_towers, lay_over_a_mesh, cut_into_pieces]
WAYS = ["module", "global", "made", "keras_later", "in_a_loop", "in_a_function"]


@pytest.mark.parametrize("execute", EXECUTIONS)
@pytest.mark.parametrize("way", WAYS)
def test_variables_that_a_step_makes_or_reads_are_refused_naming_the_layer(
    execute: Callable[[Task], Any], way: str
) -> None:
    with pytest.raises(ForeignVariableError) as error:
        execute(task(way))
    message = str(error.value)
    assert "layers/1 (Scaled)" in message or "layers/0 (Scaled)" in message, message
    assert "foreign_variables_test.py:" in message
    said = "calls a Keras layer (" if way == "keras_later" else "self.weight"
    assert said in message


@pytest.mark.parametrize("execute", EXECUTIONS)
@pytest.mark.parametrize("way", ["random", "random in a loop"])
def test_random_numbers_that_are_not_of_the_context_are_refused(
    execute: Callable[[Task], Any], way: str
) -> None:
    with pytest.raises(ForeignVariableError, match=r"\(Scaled\) draws random numbers \(") as error:
        execute(task(way))
    assert "foreign_variables_test.py:" in str(error.value)
    assert "ctx.uniform(self, shape)" in str(error.value)


@pytest.mark.parametrize("execute", EXECUTIONS)
def test_a_context_that_a_layer_builds_is_refused(execute: Callable[[Task], Any]) -> None:
    what = r"^a StepContext is built while a step is traced: .* Pass .* ctx\.evaluating\(\)"
    with pytest.raises(ContextError, match=what):
        execute(task("context"))


@pytest.mark.parametrize("way", ["random array", "random tensor"])
def test_constants_that_differ_whenever_a_model_is_built_are_refused(way: str) -> None:
    what = r"^layers/1 \(Scaled\) has an attribute 'extra' with different numbers each time"
    with pytest.raises(ForeignVariableError, match=what):
        foreign_variables.check_constants(task(way), task(way))


@pytest.mark.parametrize("way", ["none", "random with a seed"])
def test_constants_that_are_the_same_pass(way: str) -> None:
    foreign_variables.check_constants(task(way), task(way))


class Untouched:
    """An object that may take long to say that it has no attribute of a name."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"asked for {name}")


def test_objects_that_are_no_numbers_are_not_asked_for_attributes() -> None:
    one, other = task("none"), task("none")
    one.layers[0].extra, other.layers[0].extra = Untouched(), Untouched()
    foreign_variables.check_constants(one, other)


def test_a_function_of_the_batch_may_read_no_variable() -> None:
    made = task("none")
    with pytest.raises(ForeignVariableError, match=r"Squares reads the variable 'outside:0'"):
        foreign_variables.check_function(made, lambda: GLOBAL["variable"] * 2.0)
    foreign_variables.check_function(made, lambda: made.loss_weight(BATCH))


@pytest.mark.parametrize("execute", EXECUTIONS)
def test_steps_without_such_variables_run(execute: Callable[[Task], Any]) -> None:
    execute(task("none"))


class OfKeras(Layer):
    """Has a layer of Keras that was not called yet, and no weights."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.dense = tf.keras.layers.Dense(3)


def test_a_layer_of_keras_in_a_model_without_weights_is_refused_before_it_is_called() -> None:
    with pytest.raises(ForeignVariableError, match=r"^OfKeras has an attribute 'dense' of type D"):
        foreign_variables.check(OfKeras.Params().instantiate())


class Keeps(Layer):
    """Keeps a mean of its inputs in an attribute."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.mean: Any = 0.0

    def fprop(self, theta: Any, x: Any, ctx: Any) -> Any:
        y = x - self.mean
        self.mean = 0.9 * self.mean + 0.1 * tf.reduce_mean(x, 0)
        return y


class Shows(Layer):
    """Keeps its last output for its user, and fails in its second call."""

    last: Any = None

    def fprop(self, theta: Any, x: Any, ctx: Any) -> Any:
        y, before = x + 1.0, self.last
        self.last = y
        if before is not None:
            raise ValueError(f"{y!r} is too small")
        return y


def test_an_error_about_a_tensor_of_the_same_name_is_not_one_about_an_attribute() -> None:
    layer, ctx = Shows.Params().instantiate(), StepContext()

    def step() -> None:
        with foreign_variables.refused(layer):
            layer.fprop({}, tf.ones([2]), ctx)

    tf.function(step, autograph=False).get_concrete_function()
    before = repr(layer.last)
    with pytest.raises(ValueError, match=r"^<tf\.Tensor 'add:0' .*> is too small"):
        tf.function(step, autograph=False).get_concrete_function()
    assert repr(layer.last) == before


class HasKeeps(Squares):
    """Has a layer that keeps a tensor."""

    def __init__(self, params: Any) -> None:
        super(Squares, self).__init__(params)
        self.child_list("layers", [Scaled.Params(), Keeps.Params()])


@pytest.mark.parametrize("execute", [train, train_in_compiled_towers])
def test_a_tensor_of_a_step_that_another_one_reads_is_refused(
    execute: Callable[[Task], Any],
) -> None:
    what = (
        r"^layers/1 \(Keeps\) keeps a tensor of a step in self\.mean, which another step reads "
        rf"\({__file__}:\d+\): it has no value there\. .*trainable=False"
    )
    with pytest.raises(ForeignVariableError, match=what):
        execute(HasKeeps.Params().instantiate())
