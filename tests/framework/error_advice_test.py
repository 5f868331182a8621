"""What to write instead, for common errors in layers."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework import error_advice, foreign_methods
from tekso.framework.context import StepContext
from tekso.framework.initializers import GlorotUniform
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.models.layers.linear import Linear
from tekso.models.layers.stack import Stack


class Plain(Layer):
    """A layer whose fprop has no keyword arguments."""

    def fprop(self, theta: Any, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        return x


@pytest.mark.parametrize("name", ["mask", "positions"])
def test_a_layer_of_a_stack_without_side_arguments_is_told_its_signature(name: str) -> None:
    stack = Stack.Params(num_layers=1, layer=Plain.Params()).instantiate()
    with pytest.raises(TypeError) as caught:
        stack.fprop(stack.init(seed=0), tf.ones([2, 3, 5]), StepContext(), **{name: None})
    assert "mask=None, positions=None)" in error_advice.text_of(caught.value)


def test_a_batch_in_float32_for_weights_in_bfloat16_is_told_to_cast_it() -> None:
    layer = Linear.Params(input_dim=3, output_dim=5).instantiate()
    theta = tf.nest.map_structure(lambda w: tf.cast(w, tf.bfloat16), layer.init(seed=0))
    with pytest.raises(Exception, match="bfloat16") as caught:
        layer.fprop(theta, tf.ones([2, 3]), StepContext())
    assert "x = tf.cast(x, theta.w.dtype)" in error_advice.text_of(caught.value)


@pytest.mark.parametrize(
    ("function", "instead"),
    [
        (lambda step: 0.1 if step < 3 else 0.01, "tf.where(condition, a, b)"),
        (lambda step: max(0, step), "tf.maximum"),
        (lambda step: [each for each in step], "loop over a Python range"),
        (lambda step: step.numpy(), "ops of TensorFlow"),
        (lambda step: float(step), "ops of TensorFlow"),
        (lambda step: range(step), "ops of TensorFlow"),
        (lambda step: math.exp(step), "such as tf.exp"),
        (lambda step: np.exp(step), "not with NumPy"),
        (lambda step: len(step), 'tf.reduce_sum(batch["weights"])'),
        (lambda step: 0.5 ** (step // 10), "tf.cast(step, tf.float32)"),
    ],
)
def test_code_that_reads_the_value_of_a_tensor_is_told_what_to_write(
    function: Callable[[Any], Any], instead: str
) -> None:
    """As a schedule would that is written with `if` and `max`."""
    traced = tf.function(function, autograph=False)
    with pytest.raises(Exception, match=r"[Ss]ymbolic|Expected int64") as caught:
        traced.get_concrete_function(tf.TensorSpec([], tf.int64))
    text = error_advice.text_of(caught.value)
    assert instead in text and "@tf.function" not in text and "\n" not in text


def test_a_weight_with_the_arguments_of_keras_is_told_those_of_tekso() -> None:
    for arguments in ({"initializer": "zeros"}, {"dims": (None,)}):
        layer: Any = Plain.Params().instantiate()
        with pytest.raises(TypeError, match=r"weight\(\)") as caught:
            layer.weight("w", [3], **arguments)
        assert "self.weight(name, shape, dims=(None, …), init=" in error_advice.text_of(
            caught.value
        )


def test_a_product_of_sizes_that_do_not_fit_is_told_that_a_batch_has_parts() -> None:
    function = tf.function(lambda x: x @ tf.ones([7, 1]), autograph=False)
    with pytest.raises(ValueError, match="must be equal") as caught:
        function.get_concrete_function(tf.TensorSpec([16, 6]))
    text = error_advice.text_of(caught.value)
    assert text.endswith(
        "[16,6], [7,1]; the number of examples in a shape may be below batch_size, "
        "because a step computes a batch in parts"
    )


def test_labels_of_another_type_are_told_to_be_cast() -> None:
    labels = tf.constant([1, 2], tf.int64)
    function = tf.function(lambda x: tf.argmax(x, 1, tf.int32) == labels, autograph=False)
    with pytest.raises(TypeError, match="int64") as caught:
        function.get_concrete_function(tf.TensorSpec([2, 3], tf.float32))
    assert "as in tf.cast(y, tf.int32)" in error_advice.text_of(caught.value)


@pytest.mark.parametrize("dtype", ["uint8", "int64"])
def test_whole_numbers_for_a_layer_are_told_to_become_floats(dtype: str) -> None:
    function = tf.function(lambda x: x @ tf.ones([3, 5]), autograph=False)
    with pytest.raises(TypeError, match=f"float32 that does not match type {dtype}") as caught:
        function.get_concrete_function(tf.TensorSpec([2, 3], dtype))
    assert "as in tf.cast(y, tf.float32)" in error_advice.text_of(caught.value)
    function = tf.function(lambda x: tf.ones([3, 5]) @ x, autograph=False)
    with pytest.raises(TypeError, match=f"{dtype} that does not match type float32") as caught:
        function.get_concrete_function(tf.TensorSpec([5, 2], dtype))
    assert "as in tf.cast(y, tf.float32)" in error_advice.text_of(caught.value)


def test_a_layer_that_computes_in_float64_is_told_to_cast_to_float32() -> None:
    for wide in (
        lambda x: tf.stack([x, tf.cast(x, tf.float64)]),
        lambda x: x * tf.cast(x, "double"),
    ):
        function = tf.function(wide, autograph=False)
        with pytest.raises(TypeError, match="float64") as caught:
            function.get_concrete_function(tf.TensorSpec([2, 3], tf.float32))
        assert "as in tf.cast(y, tf.float32)" in error_advice.text_of(caught.value)


def test_arrays_in_float16_are_told_that_load_chose_their_type() -> None:
    function = tf.function(lambda x: x @ tf.ones([3, 5]), autograph=False)
    with pytest.raises(TypeError, match="float16") as caught:
        function.get_concrete_function(tf.TensorSpec([2, 3], tf.float16))
    assert "have the types that load returned, " in error_advice.text_of(caught.value)


@pytest.mark.parametrize("dtype", ["float32", "bool"])
def test_labels_that_are_no_whole_numbers_are_told_to_be_cast(dtype: str) -> None:
    function = tf.function(tf.nn.sparse_softmax_cross_entropy_with_logits, autograph=False)
    with pytest.raises(TypeError, match="labels") as caught:
        function.get_concrete_function(tf.TensorSpec([2], dtype), tf.TensorSpec([2, 3]))
    assert "as in tf.cast(labels, tf.int32)" in error_advice.text_of(caught.value)


@pytest.mark.parametrize("shape", [[2, 1], [2, 3]])
def test_labels_with_a_dim_of_classes_are_told_what_takes_them(shape: list[int]) -> None:
    with pytest.raises(ValueError, match="rank") as caught:
        tf.nn.sparse_softmax_cross_entropy_with_logits(tf.zeros(shape, tf.int32), tf.ones([2, 3]))
    text = error_advice.text_of(caught.value)
    assert "tf.squeeze(labels, 1) turns" in text and "takes one-hot labels" in text


class WithoutParams(Layer):
    def __init__(self, params: Any) -> None:
        super().__init__()


def test_an_init_without_params_is_told_what_to_pass() -> None:
    with pytest.raises(TypeError) as caught:
        WithoutParams.Params().instantiate()
    assert error_advice.text_of(caught.value).endswith("begins with super().__init__(params)")


def test_an_object_that_is_built_without_params_is_named() -> None:
    with pytest.raises(TypeError) as caught:
        GlorotUniform()
    assert "write GlorotUniform.Params() for a field" in error_advice.text_of(caught.value)


@pytest.mark.parametrize(
    ("function", "instead"),
    [
        (
            lambda x: x.view(-1, 2),
            "attribute 'view'; a tensor of TensorFlow has no .view: write tf.resh",
        ),
        (
            lambda x: x.reshape(-1, 2),
            "'reshape'; a tensor of TensorFlow has no .reshape: write tf.reshape(x, shape)",
        ),
        (lambda x: x.unsqueeze(1), "write tf.expand_dims(x, axis)"),
        (lambda x: x.mean(0), "write the function tf.reduce_mean(x, axis)"),
        (lambda x: x.masked_fill(x > 0, 0.0), "write tf.where(mask, value, x)"),
    ],
)
@pytest.mark.parametrize("is_traced", [False, True])
def test_a_method_of_a_tensor_of_another_framework_is_told_the_function(
    is_traced: bool, function: Callable[[Any], Any], instead: str
) -> None:
    called: Any = tf.function(function, autograph=False) if is_traced else function
    with pytest.raises(AttributeError, match="has no attribute") as caught:
        called(tf.ones([3, 2]))
    text = error_advice.text_of(caught.value)
    assert instead in text and "\n" not in text


def test_every_function_that_a_hint_names_exists() -> None:
    for name in foreign_methods._OF_TENSORS:
        hint = foreign_methods.tensor_hint(name)
        for path in re.findall(r"\btf\.([\w.]+)\(", hint):
            assert callable(functools.reduce(getattr, path.split("."), tf)), hint
    assert foreign_methods.tensor_hint("shapes") == ""
    assert hasattr(StepContext, "collect_statistic") and hasattr(Layer, "updated_statistics")
    assert "ctx.collect_statistic(self, " in foreign_methods.tensor_hint("assign")


class Forward(Layer):
    """As in PyTorch."""

    def forward(self, x: tf.Tensor, edges: tf.Tensor) -> tf.Tensor:
        return x


class WithoutTheta(Layer):
    def fprop(self, x: Any, edges: Any, ctx: Any) -> Any:  # type: ignore[override]
        return x


class WithoutCtx(Layer):
    def fprop(self, theta: Any, x: Any, edges: Any) -> Any:
        return x


class Right(Layer):
    def fprop(self, theta: Any, x: Any, ctx: Any) -> Any:
        return x


class CallsChild(Layer):
    """Calls a child with two inputs."""

    class Params(Layer.Params):
        """Params of CallsChild."""

        inner: Layer.Params = param("The child.", default=REQUIRED)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child_list("parts", [self.params.inner])

    def fprop(self, theta: Any, x: Any, ctx: Any) -> Any:
        return self.parts[0].fprop(theta.parts[0], x, x, ctx)


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        (
            Forward,
            r"Forward has no fprop\(\), but forward\(\), the method of PyTorch: define "
            r"fprop\(self, theta, x, edges, ctx\) instead",
        ),
        (WithoutTheta, r"define fprop\(self, theta, x, edges, ctx\): fprop is given theta, .*"),
        (WithoutCtx, r"define fprop\(self, theta, x, edges, ctx\): fprop is given theta, .*"),
        (Right, r"it is fprop\(self, theta, x, ctx\)"),
    ],
)
def test_a_wrong_fprop_is_named_with_its_line(kind: type[Layer], advice: str) -> None:
    layer = CallsChild.Params(inner=kind.Params()).instantiate()
    with pytest.raises(TypeError) as caught:
        layer.fprop(layer.theta({}), tf.ones([2, 3]), StepContext())
    found = error_advice.text_of(caught.value)
    method = inspect.unwrap(kind.__dict__["forward" if kind is Forward else "fprop"])
    line = method.__code__.co_firstlineno
    assert re.search(rf"; {advice} \(.*error_advice_test\.py:{line}\)$", found), found


class Built(Layer):
    """A layer that declares a weight as one of Keras does."""

    def build(self, shape: Any) -> None:
        self.weight("w", [2], dims=(None,), init=GlorotUniform.Params())

    def fprop(self, theta: Any, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        return x * theta.w


def test_a_layer_with_build_is_told_that_nothing_calls_it() -> None:
    layer = Built.Params().instantiate()
    what = r"^theta has no 'w', only \[\]; Built.build\(\) is not called: declare .* in __init__\n"
    with pytest.raises(AttributeError, match=what):
        layer.fprop(layer.init(), tf.ones([2]), StepContext())


def test_a_field_of_the_params_as_an_attribute_is_told_where_it_is() -> None:
    layer: Any = Linear.Params(input_dim=2, output_dim=3).instantiate()
    with pytest.raises(AttributeError, match=r"'output_dim': it is in .* self.params.output_dim$"):
        _ = layer.output_dim


def test_a_projection_of_a_tensor_without_a_shape_is_told_to_give_it_one() -> None:
    layer = Linear.Params(input_dim=2, output_dim=3).instantiate()
    theta = layer.init()
    with pytest.raises(ValueError, match=r"is unknown, .* tf.ensure_shape\(x, \[None, 2\]\)$"):
        tf.function(lambda x: layer.fprop(theta, x, StepContext())).get_concrete_function(
            tf.TensorSpec(None)
        )


def test_a_projection_of_another_size_names_input_dim_and_parts_of_a_batch() -> None:
    layer = Linear.Params(input_dim=2, output_dim=3).instantiate()
    what = (
        r"^project: .* x \(5, 4\) are .* w \(2, 3\); .* is the input_dim of .* below batch_size, "
    )
    with pytest.raises(ValueError, match=what):
        layer.fprop(layer.init(), tf.ones([5, 4]), StepContext())


def advice_in_a_trace(function: Callable[[tf.Tensor], Any]) -> str:
    """Returns the message of the error of a function of a tensor [None, 3]."""
    with pytest.raises(Exception, match=r".") as caught:
        tf.function(function, autograph=False).get_concrete_function(tf.TensorSpec([None, 3]))
    return error_advice.text_of(caught.value)


def set_item(x: Any) -> None:
    x[:, 0] = 0.0


@pytest.mark.parametrize(
    ("function", "instead"),
    [
        (set_item, r"item assignment; a tensor cannot be changed: .* tf\.where\(mask, value, x\)"),
        (
            lambda x: list(tf.py_function(lambda v: v, [x], tf.float32).shape),
            r"; a tensor has no shape, as .* of tf\.py_function: .* tf\.ensure_shape\(y, \[None, ",
        ),
        (
            lambda x: tf.Variable(tf.zeros([3])) * x,
            r"creates no variables .*, which __init__ declares with self\.child\(name, LayerNorm",
        ),
    ],
)
def test_code_that_a_trace_rejects_is_told_what_to_write(
    function: Callable[[Any], Any], instead: str
) -> None:
    assert re.search(instead, advice_in_a_trace(function))


def test_theta_and_the_input_in_the_wrong_places_are_told_the_right_ones() -> None:
    layer = Linear.Params(input_dim=3, output_dim=3).instantiate()
    theta, ctx = layer.init(), StepContext()
    found = advice_in_a_trace(lambda x: layer.fprop(x, theta, ctx))  # type: ignore[arg-type]
    assert found.endswith(
        "; Linear.fprop was given a tensor as theta: the weights of the layer come first, "
        "self.child.fprop(theta.child, x, ctx)"
    )
    parts: Any = CallsChild.Params(inner=Right.Params()).instantiate().theta({})
    found = advice_in_a_trace(lambda x: parts.parts(x))
    assert found.endswith("not callable; theta.name has the weights of the child; the child "
                          "computes: self.name.fprop(theta.name, x, ctx)")  # fmt: skip
