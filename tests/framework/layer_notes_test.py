"""Errors of layers that are called outside of a run name the layer."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.layer import Layer
from tekso.models.layers.linear import Linear


class Twice(Layer):
    """Computes two layers of a list."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        sizes = [(3, 5), (4, 5)]
        self.child_list("layers", [Linear.Params(input_dim=a, output_dim=b) for a, b in sizes])

    def fprop(self, theta: Any, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """Computes both layers: the second one takes another size."""
        for i, layer in enumerate(self.layers):
            x = layer.fprop(theta.layers[i], x, ctx)
        return x


class Thrice(Twice):
    """Calls the method of its base class."""

    def fprop(self, theta: Any, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        return super().fprop(theta, x, ctx)


class Alone(Layer):
    """Raises an error of its own."""

    def fprop(self, theta: Any, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        raise ZeroDivisionError("no numbers")


def scaled(self: Layer, scale: float, theta: Any, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
    """Returns x, multiplied."""
    del self, theta, ctx
    return scale * x


class Partial(Layer):
    """Has a method of which an argument is given."""

    fprop = functools.partialmethod(scaled, 2.0)


class Static(Layer):
    """Needs nothing of the layer."""

    @staticmethod
    def fprop(theta: Any, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """Returns twice x."""
        return scaled(None, 2.0, theta, x, ctx)


class OfClass(Layer):
    """Needs only the class of the layer."""

    @classmethod
    def fprop(cls, theta: Any, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """Returns twice x."""
        return scaled(cls, 2.0, theta, x, ctx)


def at_once(function: Callable[[], Any]) -> Any:
    return function()


def traced(function: Callable[[], Any]) -> Any:
    return tf.function(function, autograph=False)()


@pytest.mark.parametrize("way", [at_once, traced])
@pytest.mark.parametrize(
    ("kind", "note"),
    [
        (Twice, "in the layer layers/1 (Linear)"),
        (Thrice, "in the layer layers/1 (Linear)"),
        (Alone, "in the layer Alone"),
    ],
)
def test_an_error_in_a_layer_ends_with_its_path_and_class(
    kind: type[Layer], note: str, way: Callable[[Callable[[], Any]], Any]
) -> None:
    layer = kind.Params().instantiate()
    theta = layer.init(seed=0)
    with pytest.raises((ValueError, ZeroDivisionError, tf.errors.InvalidArgumentError)) as caught:
        way(lambda: layer.fprop(theta, tf.ones([2, 3]), StepContext()))
    assert caught.value.__notes__.count(note) == 1
    assert [one for one in caught.value.__notes__ if one.startswith("in the layer")] == [note]
    assert note in "".join(traceback.format_exception(caught.value)).splitlines()


def test_the_signature_and_the_docstring_of_a_layer_stay() -> None:
    assert Twice.fprop.__doc__ == "Computes both layers: the second one takes another size."
    assert Twice.fprop.__qualname__ == "Twice.fprop"
    layer = Twice.Params().instantiate()
    with pytest.raises(TypeError, match=r"Twice\.fprop\(\) missing 1 .* 'ctx'") as caught:
        layer.fprop(layer.init(), tf.ones([2, 3]))
    assert "in the layer Twice" in caught.value.__notes__


@pytest.mark.parametrize("kind", [Partial, Static, OfClass])
def test_the_fprop_of_a_layer_may_be_any_kind_of_method(kind: type[Layer]) -> None:
    layer = kind.Params().instantiate()
    assert layer.fprop(layer.init(), tf.ones([2]), StepContext()).numpy().tolist() == [2.0, 2.0]
    with pytest.raises(TypeError) as caught:
        layer.fprop(layer.init(), tf.ones([2]))
    assert caught.value.__notes__ == [f"in the layer {kind.__name__}"]
    if kind is not Partial:
        assert kind.fprop(layer.init(), tf.ones([1]), StepContext()).numpy().tolist() == [2.0]
