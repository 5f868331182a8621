"""Random numbers that a layer draws twice in a step: what is refused, what is a warning."""

from __future__ import annotations

import re
from typing import Any

import pytest
import tensorflow as tf

from tekso.framework import ops
from tekso.framework.context import StepContext
from tekso.framework.draws import DrawError, Repeats
from tekso.framework.layer import Layer
from tekso.framework.theta import Theta

SHAPE = [2, 3]


class Noise(Layer):
    """Draws as its subclass says."""

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> Any:
        raise NotImplementedError


class Once(Noise):
    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> Any:
        return x + ctx.uniform(self, SHAPE)


class OneLine(Noise):
    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> Any:
        return ctx.uniform(self, SHAPE), ctx.uniform(self, SHAPE)


class TwoLines(Noise):
    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> Any:
        x = ops.dropout(ctx, x, 0.5, self, "mask")
        return ops.dropout(ctx, x, 0.5, self, "mask")


class OwnMethod(Noise):
    def noise(self, ctx: StepContext) -> tf.Tensor:
        return ctx.uniform(self, SHAPE)

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> Any:
        return self.noise(ctx), self.noise(ctx)


class InBody(Noise):
    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> Any:
        def body(theta: Any, state: Any, x: Any, ctx: StepContext) -> Any:
            return state + ctx.uniform(self, [3]), x * ctx.uniform(self, [3])

        return ops.scan(ctx, body, theta, tf.zeros([3]), x)


class Apart(Noise):
    """Every way to tell draws apart, and those that belong to the same numbers on purpose."""

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> Any:
        x = x + ctx.uniform(self, SHAPE) + ctx.uniform(self, SHAPE, "b")
        x = x + ctx.fold(1).uniform(self, SHAPE) + ctx.fold(2).uniform(self, SHAPE)

        def body(theta: Any, state: Any, x: Any, ctx: StepContext) -> Any:
            return state + ctx.uniform(self, [3]), None

        state, _ = ops.scan(ctx, body, theta, tf.zeros([3]), x)

        def again(theta: Any, x: Any, ctx: StepContext) -> Any:
            return x * x * ctx.uniform(self, SHAPE)

        x = ops.rematerialize(ctx, again, theta, x) + state
        left = tf.reduce_sum(x) > 0
        return tf.cond(
            left,
            lambda: x + ctx.uniform(self, SHAPE, "branch"),
            lambda: x - ctx.uniform(self, SHAPE, "branch"),
        )


class Loop(Noise):
    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> Any:
        return [ops.dropout(ctx, x, 0.5, self) for _ in range(2)]


class Parent(Layer):
    def __init__(self, params: Layer.Params) -> None:
        super().__init__(params)
        self.child("one", Once.Params())
        self.child_list("layers", [Once.Params()] * 2)


class Shared(Parent):
    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> Any:
        x = self.one.fprop(theta.one, x, ctx)
        return self.one.fprop(theta.one, x, ctx)


class Listed(Parent):
    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> Any:
        for i, layer in enumerate(self.layers):
            x = layer.fprop(theta.layers[i], x, ctx)
        return x


class Folded(Parent):
    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> Any:
        for i, layer in enumerate(self.layers):
            x = layer.fprop(theta.layers[i], x, ctx.fold(i))
        return self.one.fprop(theta.one, x, ctx)


def run(kind: type[Layer], repeats: Repeats | None = None) -> Any:
    """Computes a layer op by op."""
    layer: Any = kind.Params().instantiate()
    ctx = StepContext(mode="train", num_examples=2)
    ctx.collected.repeats = repeats
    return layer.fprop(layer.theta({}), tf.ones(SHAPE), ctx)


def traced(kind: type[Layer], *, calls: int = 1) -> Any:
    """Traces a layer and its gradient."""

    def step() -> None:
        layer: Any = kind.Params().instantiate()
        ctx = StepContext(mode="train", num_examples=2)
        x = tf.ones(SHAPE)
        with tf.GradientTape() as tape:
            tape.watch(x)
            for _ in range(calls):
                y = layer.fprop(layer.theta({}), x, ctx)
        tape.gradient(y, x, unconnected_gradients="zero")

    return tf.function(step, autograph=False).get_concrete_function()


@pytest.mark.parametrize("kind", [OneLine, TwoLines, OwnMethod, InBody])
@pytest.mark.parametrize("how", ["traced", "trial"])
def test_a_second_draw_with_the_same_name_is_refused(kind: type[Layer], how: str) -> None:
    with pytest.raises(DrawError) as error:
        traced(kind) if how == "traced" else run(kind, Repeats())
    named = "with the name 'mask'" if kind is TwoLines else "without a name"
    text = str(error.value)
    assert text.startswith(
        f"{kind.__name__} draws the same random numbers twice: two draws {named}, in one call. Give"
    )
    assert 'name="…"' in text and "ctx.fold(1)" in text
    assert "draws_test.py" in text
    lines = set(re.findall(r"draws_test.py:(\d+), in", text))
    assert len(lines) == (1 if kind in (OneLine, OwnMethod, InBody) else 2)


@pytest.mark.parametrize("kind", [Apart, Folded, Shared, Listed, Loop])
def test_other_draws_are_not_refused(kind: type[Layer]) -> None:
    traced(kind)
    traced(kind, calls=2)  # a context that is used for two passes


def test_a_context_of_a_notebook_may_draw_again() -> None:
    one, other = run(OneLine)
    assert one.numpy().tolist() == other.numpy().tolist()


@pytest.mark.parametrize("kind", [Apart, Folded])
def test_draws_that_differ_are_no_warning(kind: type[Layer]) -> None:
    repeats = Repeats()
    run(kind, repeats)
    assert repeats.warnings() == []


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Loop, r"Loop draws the same random numbers several times in a step: .*ctx\.fold\(i\)"),
        (Shared, r"Once \(one\) draws the same random numbers several times in a step: "),
        (
            Listed,
            r"Once \(layers/0\) and Once \(layers/1\) draw the same random numbers in a step, as "
            r"all layers of a list do with the same context\. Compute layer i with ctx\.fold\(i\)",
        ),
    ],
)
def test_draws_that_repeat_on_a_line_are_one_warning(kind: type[Layer], text: str) -> None:
    repeats = Repeats()
    run(kind, repeats)
    (found,) = repeats.warnings()
    assert re.match(text, found)
    assert "draws_test.py" in found
