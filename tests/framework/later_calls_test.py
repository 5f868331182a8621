"""A body that is called again for its gradient computes what it computed before."""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework import loops, ops, symbolic
from tekso.framework.closures import frozen
from tekso.framework.context import StepContext, isolated
from tekso.framework.execution.mesh import control_flow
from tekso.framework.execution.mesh.context import LayoutContext
from tekso.framework.layer import Layer
from tekso.framework.theta import Theta
from tekso.framework.user_mistakes import MistakeError


class OneDevice(LayoutContext):
    """A context without a mesh for the loops of a mesh."""

    def iteration(self, index: Any) -> StepContext:
        return isolated(self).fold(index)


class Noise(Layer):
    """A layer that draws."""


NOISE = Noise.Params().instantiate()


class Direct:
    """The specification: calls a function once, and writes loops out."""

    @staticmethod
    def rematerialize(ctx: Any, function: Any, theta: Any, *inputs: Any) -> Any:
        return function(theta, *inputs, ctx)

    @staticmethod
    def scan(ctx: Any, body: Any, theta: Any, state: Any, xs: Any) -> Any:
        ys = []
        for i in range(xs.shape[0]):
            state, y = body(theta, state, xs[i], isolated(ctx).fold(i))
            ys.append(y)
        return state, tf.nest.map_structure(lambda *y: tf.stack(y), *ys)


class OfOneDevice:
    """The forms of one device."""

    rematerialize = staticmethod(loops.rematerialize)
    scan = staticmethod(loops.scan)


class Again:
    """The forms that call a body a second time; the loop is that of a mesh."""

    rematerialize = staticmethod(loops.rematerialize)
    scan = staticmethod(functools.partial(control_flow.scan, first=0))


Case = Callable[[Any, StepContext, Theta, tf.Tensor], tf.Tensor]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


@case
def a_name_is_bound_again(form: Any, ctx: StepContext, theta: Theta, x: tf.Tensor) -> tf.Tensor:
    x = x + form.rematerialize(ctx, lambda t, z, ctx: tf.tanh(z @ t.w + x @ t.v), theta, tf.sin(x))
    body = lambda t, h, z, ctx: (tf.tanh(h @ t.w + z + tf.reduce_sum(x @ t.v)), h)  # noqa: E731
    return x + form.scan(ctx, body, theta, x[0], x)[1]


@case
def a_loop_goes_on(form: Any, ctx: StepContext, theta: Theta, x: tf.Tensor) -> tf.Tensor:
    for i, name in enumerate(("w", "v")):
        draw = lambda ctx, x: ops.dropout(ctx.fold(i), x, 0.5, NOISE)  # noqa: E731, B023
        function = lambda t, z, ctx: draw(ctx, tf.tanh(z @ t[name]))  # noqa: E731, B023
        x = x + form.rematerialize(ctx, function, theta, x)
        body = lambda t, h, z, ctx: (draw(ctx, tf.tanh(z + h @ t[name])), h)  # noqa: E731, B023
        x = x + form.scan(ctx, body, theta, x[0], x)[1]
    return x


@case
def complex_numbers(form: Any, ctx: StepContext, theta: Theta, x: tf.Tensor) -> tf.Tensor:
    z, c = tf.complex(x @ theta.w, x @ theta.v), tf.complex(theta.w, theta.v)[0]
    one = lambda t, z, ctx: tf.square(z) * c * tf.complex(t.v, t.w)[1]  # noqa: E731
    y = form.rematerialize(ctx, one, theta, z)
    body = lambda t, h, z, ctx: (c * h * z + tf.complex(t.w, t.w)[2], h * z)  # noqa: E731
    h, ys = form.scan(ctx, body, theta, z[0], y)
    return tf.math.real(ys) + tf.math.imag(ys) + tf.abs(h)


@case
def returned_as_it_is(form: Any, ctx: StepContext, theta: Theta, x: tf.Tensor) -> tf.Tensor:
    k, m = x @ theta.w, tf.sin(x[0] @ theta.v)
    y, same = form.rematerialize(ctx, lambda t, z, ctx: (tf.tanh(z @ t.v), k), theta, x)
    body = lambda t, h, z, ctx: ((tf.tanh(h[0] + z), m), (h[0] * h[1], k[0]))  # noqa: E731
    state, ys = form.scan(ctx, body, theta, (x[0], tf.zeros_like(x[0])), x)
    return y + same**2 + ys[0] + ys[1] ** 2 + state[1] ** 3


@case
def calls_are_counted(form: Any, ctx: StepContext, theta: Theta, x: tf.Tensor) -> tf.Tensor:
    count = 0.0

    def one(t: Theta, h: tf.Tensor, ctx: StepContext) -> Any:
        nonlocal count
        count += 1
        return tf.tanh(h @ t.w) * count

    def body(t: Theta, h: tf.Tensor, z: tf.Tensor, ctx: StepContext) -> Any:
        y = one(t, h, ctx)
        return h, y + z @ t.v

    x = x + form.rematerialize(ctx, one, theta, x)
    x = x + form.scan(ctx, body, theta, x[0], x[:1])[1]  # Direct calls it for each row
    return x * count


@case
def loops_and_branches(form: Any, ctx: StepContext, theta: Theta, x: tf.Tensor) -> tf.Tensor:
    keys = tf.sin(x)

    def one(t: Theta, h: tf.Tensor, ctx: StepContext) -> Any:
        inner = lambda t, g, k, ctx: (tf.tanh(g @ t.v + k), g)  # noqa: E731
        branches = [lambda: h @ t.v, lambda: h + tf.reduce_sum(keys), lambda: h]
        return (
            tf.switch_case(tf.cast(h[0, 0], tf.int32), branches)
            + (form.scan(ctx, inner, t, h, keys)[1][1])
        )

    def body(t: Theta, h: tf.Tensor, z: tf.Tensor, ctx: StepContext) -> Any:
        return tf.tanh(z + h), one(t, h, ctx)

    x = x + form.rematerialize(ctx, lambda t, x, ctx: one(t, x[0], ctx) * x @ t.w, theta, x)
    return x + form.scan(ctx, body, theta, x[0], x)[1]


@case
def a_loop_has_constants(form: Any, ctx: StepContext, theta: Theta, x: tf.Tensor) -> tf.Tensor:
    def body(t: Theta, h: tf.Tensor, z: tf.Tensor, ctx: StepContext) -> Any:
        c, k, first = tf.constant([0.5, 2.0, 3.0]), tf.sin(h), ops.dropout(ctx, h, 0.5, NOISE)
        one = lambda t, h, ctx: c * ops.dropout(ctx, h @ t.w, 0.5, NOISE) + k * first  # noqa: E731
        y = form.rematerialize(ctx.fold(1), one, t, h)
        return z + y, y

    return form.scan(ctx, body, theta, x[0] @ theta.v, x)[1]


@case
def a_function_is_called_twice(
    form: Any, ctx: StepContext, theta: Theta, x: tf.Tensor
) -> tf.Tensor:
    def branches(x: tf.Tensor) -> Any:
        return tf.map_fn(tf.sin, tf.cond(x[0, 0] > 0, lambda: tf.tanh(x), lambda: x / 2))

    shared, cache = tf.function(branches, autograph=False), dict[Any, tf.Tensor]()

    def one(t: Theta, h: tf.Tensor, ctx: StepContext) -> Any:
        graph = tf.compat.v1.get_default_graph()
        table = cache.setdefault(graph, tf.constant([0.5, 0.6, 0.7]))
        return tf.debugging.check_numerics(shared(h @ t.w), f"table {len(cache)}") + table

    def body(t: Theta, h: tf.Tensor, z: tf.Tensor, ctx: StepContext) -> Any:
        y = one(t, h, ctx) + form.rematerialize(ctx, one, t, h)
        return form.rematerialize(ctx, one, t, y + z), y @ t.v

    x = form.rematerialize(ctx, one, theta, form.rematerialize(ctx, one, theta, x[0])) + x
    return form.scan(ctx, body, theta, form.scan(ctx, body, theta, x[0], x)[0], x)[1]


@case
def a_function_reads_it(form: Any, ctx: StepContext, theta: Theta, x: tf.Tensor) -> tf.Tensor:
    k, times = tf.exp(x[0, 0]), tf.function(lambda x, k: x * k, autograph=False)

    def body(t: Theta, h: tf.Tensor, z: tf.Tensor, ctx: StepContext) -> Any:
        one = lambda t, h, ctx: times(tf.tanh(h @ t.w), k) + times(h, m)  # noqa: E731
        m = times(z, t.v[0]) + k
        return form.rematerialize(ctx, one, t, h) + z, times(h, k)

    return form.scan(ctx, body, theta, x[0], x)[1]


@case  # the graph optimizer has to be on: it has the defect
def a_bias_is_added_twice(form: Any, ctx: StepContext, theta: Theta, x: tf.Tensor) -> tf.Tensor:
    outer, sum_ = tf.exp(x[0, 0]), tf.function(lambda x, w, b: x @ w + b, autograph=False)
    theta = Theta(**theta, b=tf.reduce_sum(theta.w, 0), s=tf.reduce_sum(theta.v))

    def body(t: Theta, h: tf.Tensor, z: tf.Tensor, ctx: StepContext) -> Any:
        h = tf.tanh((z @ t.w + t.b) + (h @ t.v + tf.stop_gradient(t.b)) + (t.s + t.s))
        return h, sum_(h, t.v, outer) + sum_(z, t.w, outer)

    return form.scan(ctx, body, theta, x[0], x)[1]


def loss_and_gradients(name: str, form: Any, w: tf.Tensor, v: tf.Tensor, x: tf.Tensor) -> Any:
    ctx = OneDevice(mode="train", seed=4, num_examples=2)
    with tf.GradientTape() as tape:
        tape.watch([w, v, x])
        loss = tf.reduce_sum(CASES[name](form, ctx, Theta(w=w, v=v), x) ** 2)
    return [loss, *tape.gradient(loss, [w, v, x])]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", [OfOneDevice, Again])
def test_gradients_are_those_of_one_call(kind: Any, name: str) -> None:
    rng = np.random.default_rng(0)
    given = [tf.constant(rng.normal(size=size), tf.float32) for size in ([3, 3], [3, 3], [4, 2, 3])]
    found, expected = (
        tf.function(functools.partial(loss_and_gradients, name, form), autograph=False)(*given)
        for form in (kind, Direct)
    )
    assert all(np.any(gradient) for gradient in expected)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["rematerialize", "scan"])
def test_a_list_that_grows_until_the_gradients_is_an_error_with_the_line(form: str) -> None:
    @tf.function(autograph=False)
    def run(x: tf.Tensor) -> Any:
        ctx, layers = OneDevice(mode="train", seed=4, num_examples=2), [tf.sin(x[0])]

        def function(theta: Theta, *rest: Any) -> Any:
            y = tf.tanh(rest[0] * layers[-1] * theta.w)
            return y if form == "rematerialize" else (y, y)

        with tf.GradientTape() as tape:
            tape.watch(x)
            layers[0] = tf.cos(x[0])
            if form == "rematerialize":
                y = loops.rematerialize(ctx, function, Theta(w=x[1]), x[0])
            else:
                y, _ = control_flow.scan(ctx, function, Theta(w=x[1]), x[0], x, 0)
            layers.append(tf.exp(x[0]))
        return tape.gradient(y, x)

    message = rf"ops.{form}: .*later_calls_test.py:\d+.* is called again .*Exp.*as arguments"
    with pytest.raises(MistakeError, match=message):
        run(tf.ones([3, 2]))


def changed_number(own: Any) -> Any:
    own.k = 1.0
    yield lambda w, v, x: tf.tanh(x @ w) * own.k
    own.k = 2.0


def changed_weight(own: Any) -> Any:
    own.name = "w"
    yield lambda w, v, x: tf.tanh(x @ {"w": w, "v": v}[own.name]) + (v + w)[0]
    own.name = "v"


def changed_op(own: Any) -> Any:
    own.function = [tf.tanh]
    yield lambda w, v, x: own.function[0](x @ w)
    own.function[0] = tf.sin


def changed_variable_of_a_function_in_a_list(own: Any) -> Any:
    k = 2.0
    functions = [lambda x: x * k]
    yield lambda w, v, x: functions[0](tf.tanh(x @ w))
    k = 3.0


def counted(own: Any) -> Any:
    numbers = itertools.count(1.0)
    yield lambda w, v, x: tf.tanh(x @ w) * next(numbers)


def changed_branch(own: Any) -> Any:
    own.k = 1.0
    yield lambda w, v, x: tf.cond(x[0, 0] > 0, lambda: tf.tanh(x @ w) * own.k, lambda: x)
    own.k = 2.0


CHANGES = [
    changed_number,
    changed_weight,
    changed_op,
    changed_variable_of_a_function_in_a_list,
    counted,
    changed_branch,
]


def changing(form: str, change: Any, x: tf.Tensor, w: tf.Tensor, v: tf.Tensor) -> Any:
    """Returns gradients of a body that reads something, which changes before they are computed."""
    ctx = OneDevice(mode="train", seed=4, num_examples=2)
    steps = change(types.SimpleNamespace())
    function = next(steps)
    with tf.GradientTape() as tape:
        tape.watch([x, w, v])
        if form == "rematerialize":
            call = lambda theta, z, ctx: function(theta.w, theta.v, z)  # noqa: E731
            y = loops.rematerialize(ctx, call, Theta(w=w, v=v), x[0])
        else:
            body = lambda theta, h, z, ctx: (function(theta.w, theta.v, h + z), h)  # noqa: E731
            y, _ = control_flow.scan(ctx, body, Theta(w=w, v=v), x[0], x, 0)
        assert next(steps, None) is None
    return tape.gradient(y, [x, w, v])


@pytest.mark.parametrize("form", ["rematerialize", "scan"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_body_that_computes_something_else_later_is_an_error(form: str, change: Any) -> None:
    run = tf.function(functools.partial(changing, form, change), autograph=False)
    message = rf"(?s)ops.{form}: .*called again .*(other arguments|something else).*later_calls_te"
    with pytest.raises(MistakeError, match=message):
        run(tf.ones([4, 2, 3]), tf.ones([3, 3]), tf.ones([3, 3]))


SMALL, LARGE = tf.constant([0.4, 0.5, 0.6]), tf.constant([[0.3] * 3] * 70)


@pytest.mark.parametrize("form", [Again, Direct])
def test_constants_of_a_module_and_kept_ones_may_be_read(form: Any) -> None:
    @tf.function(autograph=False)
    def run(x: tf.Tensor) -> Any:
        ctx, kept = OneDevice(mode="train", seed=4, num_examples=2), dict[str, Any]()

        def function(theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
            kept.setdefault("mean", tf.constant([0.1, 0.2, 0.3]))
            return (x - SMALL - kept["mean"] - tf.reduce_mean(LARGE, 0)) * theta.w

        def body(theta: Theta, h: tf.Tensor, x: tf.Tensor, ctx: StepContext) -> Any:
            return (h - SMALL - tf.reduce_mean(LARGE, 0)) * theta.w, x

        with tf.GradientTape() as tape:
            tape.watch(x)
            y = form.rematerialize(ctx, function, Theta(w=x[1]), x[0])
            last, _ = form.scan(ctx, body, Theta(w=x[1]), y, x)
        return tape.gradient(last, x)

    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    w, outer = x[1], np.array([0.7, 0.8, 0.9])
    start = x[0] - outer - [0.1, 0.2, 0.3]
    # The loop computes ((start w - outer) w - outer) w.
    expected = [w**3, 3 * start * w**2 - 2 * outer * w - outer]
    np.testing.assert_allclose(run(tf.constant(x)), expected, rtol=1e-5)


def test_a_frozen_function_keeps_its_variables_and_those_of_functions_that_it_calls() -> None:
    values, twice = [], 2

    def times(x: int, /, more: int = 0, *, plus: int = 0) -> int:
        return x * twice + more + plus

    for i in range(3):

        def own(x: int) -> int:
            return times(x, i, plus=1) if x < 10 else own(x - 5)  # noqa: B023

        values.append(frozen(functools.partial(own)))
    twice = 100
    assert [value(3) for value in values] == [7, 8, 9]
    assert [value(13) for value in values] == [17, 18, 19]
    assert own(3) == 303
    assert values[0].func.__name__ == "own"


def test_functions_that_share_a_variable_share_it_when_they_are_frozen() -> None:
    count = 0

    def add() -> None:
        nonlocal count
        count += 1

    def own() -> int:
        add()
        return count

    copy = frozen(own)
    assert [own(), own(), own(), copy(), copy()] == [1, 2, 3, 1, 2]


def test_functions_in_arguments_and_defaults_are_frozen() -> None:
    scale = 2

    def times(x: int) -> int:
        return scale * x

    def twice(*of: Any, x: int = 0, by: Any = times) -> int:
        return of[0](x) + by(x) if not isinstance(of[0], tuple) else of[0][0](x)

    given = [functools.partial(twice, times), functools.partial(twice, by=times)]
    copies = [frozen(given[0]), frozen(functools.partial(twice, (times,)))]
    scale = 100
    assert [copy(x=1) for copy in copies] == [4, 2]
    assert given[0](x=1) == 200


def test_functions_of_modules_are_the_same_in_frozen_functions() -> None:
    relu, own = tf.nn.relu, frozen  # TensorFlow's functions have outer variables

    def same() -> bool:
        return relu is tf.nn.relu and own is frozen

    assert frozen(same)()


def test_frozen_methods_keep_their_object_and_unset_variables_stay_unset() -> None:
    class Counter:
        count = 0

        def add(self) -> int:
            self.count += 1
            return self.count

    counter = Counter()
    assert [frozen(counter.add)(), counter.add()] == [1, 2]

    def reading() -> Any:
        return later

    copy = frozen(reading)
    later = 1
    assert reading() == later
    with pytest.raises(NameError):
        copy()


def test_tensors_of_a_symbolic_graph_are_compared_by_their_elements() -> None:
    with symbolic.new_graph().as_default() as graph:
        x = symbolic.placeholder(tf.TensorSpec([2, 3], tf.int32))
        assert (x == 3).shape == [2, 3]
        assert (x != x).dtype == tf.bool
    assert graph.outputs is None
