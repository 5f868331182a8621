"""scan and rematerialize: eager, in a graph and written out are one; nothing collected is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework import ops
from tekso.framework.context import StepContext
from tekso.framework.layer import Layer
from tekso.framework.theta import Theta

TURNS, BATCH, DIM = 5, 2, 3

Body = Callable[[Theta, Any, Any, StepContext], tuple[Any, Any]]


class Noise(Layer):
    """A layer that the bodies of these tests draw from and collect as."""


NOISE = Noise.Params().instantiate()


def values() -> tuple[Theta, dict[str, tf.Tensor], dict[str, tf.Tensor]]:
    rng = np.random.default_rng(0)
    theta = Theta(w=tf.constant(rng.normal(size=(DIM, DIM))), b=tf.constant(rng.normal(size=DIM)))
    state = {"h": tf.constant(rng.normal(size=(BATCH, DIM))), "count": tf.constant(0)}
    xs = {
        "x": tf.constant(rng.normal(size=(TURNS, BATCH, DIM))),
        "ids": tf.constant(rng.integers(0, 4, size=(TURNS, BATCH))),
        "keep": tf.constant(rng.integers(0, 2, size=(TURNS, BATCH)) > 0),
    }
    return theta, state, xs


def body(theta: Theta, state: Any, x: Any, ctx: StepContext) -> tuple[Any, Any]:
    gain = tf.cast(tf.expand_dims(x["ids"], 1), tf.float64)
    h = tf.tanh(ops.project(ctx, state["h"], theta.w, theta.b) + x["x"] * gain)
    h = ops.dropout(ctx, h, 0.25, NOISE)
    h = tf.where(tf.expand_dims(x["keep"], 1), h, state["h"])
    ctx.collect_loss("norm", tf.reduce_sum(tf.square(h)))
    ctx.collect_metric("mean", tf.reduce_sum(h), BATCH * DIM)
    ctx.collect_statistic(NOISE, "sum", tf.reduce_sum(h, 0), BATCH)
    return {"h": h, "count": state["count"] + 1}, {"y": 2 * h, "none": None, "seen": x["ids"] + 1}


def written_out(ctx: StepContext, body: Body, theta: Theta, state: Any, xs: Any) -> tuple[Any, Any]:
    """The specification: a Python loop over the iterations, with one collection for all."""
    ys = []
    for i in range(TURNS):
        x = tf.nest.map_structure(lambda t, i=i: t[i], xs)
        state, y = body(theta, state, x, ctx.fold(i))
        ys.append(y)
    return state, tf.nest.map_structure(lambda *y: None if y[0] is None else tf.stack(y), *ys)


def loss_and_all(run: Callable[..., Any], theta: Theta, state: Any, xs: Any) -> dict[str, Any]:
    """Returns outputs, what was collected, and gradients of a loss that depends on all of them."""
    ctx = StepContext(mode="train", seed=4, step=9, num_examples=BATCH)
    wanted = [theta, state["h"], xs["x"]]
    with tf.GradientTape() as tape:
        tape.watch(wanted)
        last, ys = run(ctx, body, theta, state, xs)
        loss = tf.reduce_sum(ys["y"] ** 3) + tf.reduce_sum(last["h"])
        loss += tf.cast(ctx.collected.total("loss"), tf.float64)
        loss += tf.cast(ctx.collected.sums["metric"]["mean"][0], tf.float64)
    sums = {kind: dict(by_name) for kind, by_name in ctx.collected.sums.items()}
    return {
        "last": last,
        "y": ys["y"],
        "seen": ys["seen"],
        "loss": sums["loss"]["norm"][0],
        "metric": sums["metric"]["mean"],
        "statistic": sums["statistic"]["sum"],
        "gradients": tape.gradient(loss, wanted),
    }


def scan(ctx: StepContext, *args: Any) -> Any:
    return ops.scan(ctx, *args)


def in_graph(run: Callable[..., Any], **options: Any) -> Callable[..., dict[str, Any]]:
    return tf.function(lambda *args: loss_and_all(run, *args), autograph=False, **options)


def assert_same(found: Any, expected: Any, rtol: float = 1e-6) -> None:
    tf.nest.assert_same_structure(found, expected)
    for a, b in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-9)


@pytest.mark.parametrize("how", ["eager", "graph", "compiled"])
def test_scan_is_the_loop_written_out_with_gradients_and_all_that_is_collected(how: str) -> None:
    expected = loss_and_all(written_out, *values())
    # Statistics are summed over iterations there; scan stacks them by iteration, like layers.
    total = expected.pop("statistic")
    if how == "eager":
        found = loss_and_all(scan, *values())
    else:
        found = in_graph(scan, jit_compile=how == "compiled")(*values())
    value, weight = found.pop("statistic")
    assert value.shape == (TURNS, DIM)
    np.testing.assert_array_equal(weight, np.full([TURNS, DIM], BATCH))  # it was a scalar
    np.testing.assert_allclose(tf.reduce_sum(value, 0), total[0], rtol=1e-5)
    assert_same(found, expected)


def nested(choice: str) -> Body:
    """Projects twice with one weight, and a third time within another graph or function."""

    def cond(theta: Theta, state: Any, x: Any, ctx: StepContext) -> tuple[Any, Any]:
        h = ops.project(ctx, state, theta.w)
        h = tf.tanh(ops.project(ctx, h + x, theta.w))
        if choice == "condition":
            h += tf.cond(x[0, 0] > 0, lambda: ops.project(ctx, h, theta.w), lambda: h)
        elif choice == "scan":
            inner = ops.scan(ctx, lambda t, s, x, c: (ops.project(c, s, t.w), None), theta, h, x)
            h += inner[0]
        elif choice == "tape":
            with tf.GradientTape() as tape:
                tape.watch([theta.w, h])
                energy = tf.reduce_sum(tf.tanh(ops.project(ctx, h, theta.w)) ** 2)
            dw, dh = tape.gradient(energy, [theta.w, h])
            h = h @ (theta.w - 0.3 * dw) + dh
        elif choice == "tape of a tape":
            with tf.GradientTape() as outer:
                outer.watch(theta.w)
                with tf.GradientTape() as tape:
                    tape.watch(h)
                    energy = tf.reduce_sum(tf.tanh(ops.project(ctx, h, theta.w)) ** 2)
                norm = tf.reduce_sum(tape.gradient(energy, h) ** 2)
            h = h @ outer.gradient(norm, theta.w)
        else:
            h += ops.rematerialize(ctx, lambda t, h, c: ops.project(c, h, t.w), theta, h)
        return h, h

    return cond


CHOICES = ["condition", "scan", "tape", "tape of a tape", "rematerialised"]


@pytest.mark.parametrize("choice", CHOICES)
def test_gradients_of_weights_that_a_body_projects_with_are_those_written_out(choice: str) -> None:
    theta, state, xs = values()
    theta = Theta(w=theta.w, unused=theta.b)

    def gradients(run: Callable[..., Any]) -> Any:
        ctx = StepContext(mode="train", seed=0, step=0, num_examples=1)
        with tf.GradientTape() as tape:
            tape.watch([theta.w, state["h"], xs["x"]])
            last, ys = run(ctx, nested(choice), theta, state["h"], xs["x"])
            loss = tf.reduce_sum(last**2) + tf.reduce_sum(ys**3)
        return tape.gradient(loss, [theta.w, state["h"], xs["x"]])

    expected = gradients(written_out)
    assert_same(tf.function(lambda: gradients(scan), autograph=False)(), expected)


def test_a_projection_that_does_not_fit_is_refused_in_a_loop_as_outside() -> None:
    def body(theta: Theta, state: Any, x: Any, ctx: StepContext) -> tuple[Any, Any]:
        return state, ops.project(ctx, tf.concat([x, x], -1), theta.w)

    theta, state, xs = values()
    ctx = StepContext(mode="train", seed=0, step=0)
    run = tf.function(lambda: ops.scan(ctx, body, Theta(w=theta.w), state, xs["x"])[1])
    with pytest.raises(ValueError, match="project: the last 1 dims of x"):
        run()


def test_a_loop_multiplies_once_for_the_gradient_of_a_weight() -> None:
    def recur(theta: Theta, state: Any, x: Any, ctx: StepContext) -> tuple[Any, Any]:
        h = tf.tanh(ops.project(ctx, state, theta.w) + x)
        return h, h

    @tf.function(autograph=False)
    def gradient(w: tf.Tensor, h: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(w)
            ctx = StepContext(mode="train", seed=0, step=0)
            _, ys = ops.scan(ctx, recur, Theta(w=w), h, x)
        return tape.gradient(ys, w)

    theta, state, xs = values()
    gradient(theta.w, state["h"], xs["x"])
    concrete = gradient.get_concrete_function(theta.w, state["h"], xs["x"])
    outside = [op for op in concrete.graph.get_operations() if op.type == "MatMul"]
    assert [op.outputs[0].shape.as_list() for op in outside] == [[DIM, DIM]]
    assert outside[0].inputs[0].shape[0] == TURNS * BATCH


def test_scan_draws_other_numbers_every_turn_and_returns_none_for_none() -> None:
    def noise(theta: Theta, state: Any, x: Any, ctx: StepContext) -> Any:
        return state, {"u": ctx.uniform(NOISE, [4, 6]), "none": None}

    def run() -> Any:
        return ops.scan(StepContext(seed=1), noise, Theta(), tf.constant(0.0), tf.zeros([TURNS]))[1]

    eager, graph = run(), tf.function(run, autograph=False)()
    assert eager["none"] is None
    assert graph["none"] is None
    np.testing.assert_array_equal(eager["u"], graph["u"])
    assert len({row.numpy().tobytes() for row in eager["u"]}) == TURNS


def test_scan_within_scan_stacks_statistics_by_both_iterations() -> None:
    weights = tf.reshape(tf.range(6.0), [2, 3])

    def inner(theta: Theta, state: tf.Tensor, x: tf.Tensor, ctx: StepContext) -> Any:
        ctx.collect_statistic(NOISE, "x", x, 1)
        ctx.collect_metric("u", ctx.uniform(NOISE, [1])[0], 1)
        return state + x, None

    def outer(theta: Theta, state: tf.Tensor, x: tf.Tensor, ctx: StepContext) -> Any:
        return ops.scan(ctx, inner, theta, state, x)[0], None

    def run() -> Any:
        ctx = StepContext(seed=3)
        last, _ = ops.scan(ctx, outer, Theta(), tf.constant(0.0), weights)
        return last, ctx.collected.sums["statistic"]["x"], ctx.collected.sums["metric"]["u"]

    for last, (value, weight), (noise, count) in (run(), tf.function(run, autograph=False)()):
        assert float(last) == 15
        np.testing.assert_array_equal(value, weights)
        np.testing.assert_array_equal(weight, tf.ones([2, 3]))
        ctx = StepContext(seed=3)
        turns = [ctx.fold(i).fold(j) for i in range(2) for j in range(3)]
        expected = sum(float(turn.uniform(NOISE, [1])[0]) for turn in turns)
        assert float(noise) == pytest.approx(expected, rel=1e-6)
        assert float(count) == 6


@pytest.mark.parametrize(
    ("returned", "times"), [("state", 1), ("stacked", 2), ("metric", 2), ("statistic", 2)]
)
def test_scan_traces_its_body_once_if_it_returns_only_its_state(returned: str, times: int) -> None:
    traces = []

    def count(theta: Theta, state: tf.Tensor, x: tf.Tensor, ctx: StepContext) -> Any:
        traces.append(1)
        if returned == "metric":
            ctx.collect_metric("x", x, 1)
        if returned == "statistic":
            ctx.collect_statistic(NOISE, "x", x, 1)
        return state + x, (x, None) if returned == "stacked" else None

    @tf.function(autograph=False)
    def run(xs: tf.Tensor) -> Any:
        ctx = StepContext()
        last, ys = ops.scan(ctx, count, Theta(), tf.constant(0.0), xs)
        return last, ys, ctx.collected.sums

    last, ys, sums = run(tf.ones([100]))
    assert float(last) == 100
    assert len(traces) == times  # another time to find out what else it returns
    if returned == "stacked":
        np.testing.assert_array_equal(ys[0], tf.ones([100]))
        assert ys[1] is None
    else:
        assert ys is None
    if returned == "metric":
        assert [float(one) for one in sums["metric"]["x"]] == [100, 100]
    if returned == "statistic":
        np.testing.assert_array_equal(sums["statistic"]["x"], tf.ones([2, 100]))


def test_scan_says_that_its_body_returns_other_tensors_each_time() -> None:
    found = iter([(1.0, 2.0), (1.0, 2.0, 3.0)])

    def changing(theta: Theta, state: tf.Tensor, x: tf.Tensor, ctx: StepContext) -> Any:
        return state, tf.nest.map_structure(tf.constant, next(found))

    @tf.function(autograph=False)
    def run(xs: tf.Tensor) -> Any:
        return ops.scan(StepContext(), changing, Theta(), tf.constant(0.0), xs)

    with pytest.raises(ValueError, match=r"scan: the body .* 2 tensors .* and 3 when"):
        run(tf.ones([3]))


@pytest.mark.parametrize(
    ("xs", "message"),
    [
        ({}, "no tensor"),
        ({"a": tf.ones([2, 3]), "b": tf.ones([3, 2])}, r"same known leading dim.*\[2, 3\]"),
        ({"a": tf.ones([0, 3])}, r"at least 1.*\[0\]"),
        ({"a": tf.constant(1.0)}, "scalar"),
    ],
)
def test_scan_refuses_inputs_whose_iterations_it_cannot_count(xs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.scan(StepContext(), lambda *_: (1, 2), Theta(), tf.constant(0.0), xs)


@pytest.mark.parametrize("new", [tf.ones([2]), tf.constant(1, tf.int32)])
@pytest.mark.parametrize("graph", [False, True])
def test_scan_refuses_a_state_that_changes_its_type(new: tf.Tensor, graph: bool) -> None:
    def run() -> Any:
        return ops.scan(
            StepContext(),
            lambda theta, state, x, ctx: (new, None),
            Theta(),
            tf.constant(0.0),
            tf.ones([3]),
        )

    with pytest.raises(ValueError, match="dtype and shape must stay the same"):
        (tf.function(run, autograph=False) if graph else run)()


# Rematerialisation.


def block(theta: Theta, x: tf.Tensor, extra: Any, ctx: StepContext) -> Any:
    h = tf.tanh(x @ theta.w + theta.b)
    h = ops.dropout(ctx, h, 0.25, NOISE)
    if extra["mask"] is not None:
        h = tf.where(extra["mask"], h, 0)
    if extra["ids"] is not None:
        h += tf.cast(tf.expand_dims(extra["ids"], 1), h.dtype)
    ctx.collect_loss("norm", tf.reduce_sum(tf.square(h)))
    ctx.collect_metric("mean", tf.reduce_sum(h), BATCH * DIM)
    ctx.collect_statistic(NOISE, "sum", tf.reduce_sum(h, 0), BATCH)
    return {"y": h, "ids": extra["ids"], "none": None}


EXTRAS = {
    "none": {"ids": None, "mask": None},
    "ints": {"ids": tf.constant([2, 3]), "mask": None},
    "all": {"ids": tf.constant([2, 3], tf.int64), "mask": tf.constant([[True, False, True]])},
}


def direct(ctx: StepContext, function: Any, *args: Any) -> Any:
    return function(*args, ctx)


def again(ctx: StepContext, function: Any, *args: Any) -> Any:
    return ops.rematerialize(ctx, function, *args)


def block_and_gradients(run: Callable[..., Any], extra: Any) -> dict[str, Any]:
    theta, state, _ = values()
    x = state["h"]
    ctx = StepContext(mode="train", seed=4, num_examples=BATCH)
    with tf.GradientTape() as tape:
        tape.watch((theta, x))
        out = run(ctx, block, theta, x, extra)
        loss = tf.reduce_sum(out["y"] ** 3) + tf.cast(ctx.collected.total("loss"), tf.float64)
    sums = {kind: dict(by_name) for kind, by_name in ctx.collected.sums.items()}
    return {"out": out, "sums": sums, "gradients": tape.gradient(loss, (theta, x))}


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("how", ["eager", "graph", "compiled"])
def test_rematerialised_is_the_direct_form(how: str, extra: str) -> None:
    expected = block_and_gradients(direct, EXTRAS[extra])

    def run() -> dict[str, Any]:
        return block_and_gradients(again, EXTRAS[extra])

    if how != "eager":
        run = tf.function(run, autograph=False, jit_compile=how == "compiled")
    found = run()
    assert found["out"]["none"] is None
    present = [[t for t in tf.nest.flatten(tree) if t is not None] for tree in (found, expected)]
    assert_same(*present)


@pytest.mark.parametrize("from_outside", [False, True])
def test_rematerialised_computes_twice_and_once_without_gradient(from_outside: bool) -> None:
    calls = []
    theta = Theta(w=tf.constant(3.0))

    @tf.function(autograph=False)
    def run(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        def function(theta: Theta, own: tf.Tensor, ctx: StepContext) -> tf.Tensor:
            calls.append(1)
            return (outer if from_outside else own) * theta.w

        with tf.GradientTape() as tape:
            tape.watch(x)
            outer = x + 0.0
            y = ops.rematerialize(StepContext(), function, theta, x)
        assert len(calls) == 1
        return y, tape.gradient(y, x)

    assert [float(t) for t in run(tf.constant(2.0))] == [6.0, 3.0]
    assert len(calls) == 2


def test_rematerialised_returns_a_tensor_from_outside_with_its_gradient() -> None:
    @tf.function(autograph=False)
    def run(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            outer = x * x
            function = lambda theta, own, ctx: (own * theta.w, outer)  # noqa: E731
            ys = ops.rematerialize(StepContext(), function, Theta(w=tf.constant(3.0)), x)
            y = ys[0] + 5.0 * ys[1]
        return tape.gradient(y, x)

    assert float(run(tf.constant(2.0))) == 3.0 + 5.0 * 4.0


def test_rematerialised_gives_zero_for_a_weight_that_is_not_used() -> None:
    theta = Theta(w=tf.constant(3.0), unused=tf.ones([2]))

    @tf.function(autograph=False)
    def run(theta: Theta) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(theta)
            y = ops.rematerialize(StepContext(), lambda t, x, ctx: t.w * x, theta, tf.constant(2.0))
        return tape.gradient(y, theta)

    gradient = run(theta)
    assert float(gradient.w) == 2.0
    np.testing.assert_array_equal(gradient.unused, [0.0, 0.0])


@pytest.mark.parametrize("how", ["eager", "graph", "compiled"])
@pytest.mark.parametrize("place", ["step", "scan", "scan from outside", "state of a scan"])
def test_what_a_rematerialised_function_reads_from_outside_has_gradients(
    place: str, how: str
) -> None:
    """Of w, by what the function closes over; of u, which it gets; of v, which it closes over."""
    rng = np.random.default_rng(0)
    w, u, v = (tf.constant(rng.normal(size=(3, 3))) for _ in range(3))
    xs = tf.constant(rng.normal(size=(4, 2, 3)))

    def loss(w: tf.Tensor, u: tf.Tensor, v: tf.Tensor, again: Any) -> tf.Tensor:
        keys, mask = tf.tanh(w), tf.cast(xs[0, 0] > 0, w.dtype)

        def block(theta: Theta, h: tf.Tensor, x: Any, ctx: StepContext) -> tf.Tensor:
            inner, state = keys if place != "scan" else tf.matmul(keys, theta.u), h

            def function(theta: Theta, h: tf.Tensor, ctx: StepContext) -> tf.Tensor:
                h = tf.tanh(tf.matmul(h, theta.u) @ inner * mask + tf.reduce_sum(v * v) + x)
                return h + tf.sin(state) if place == "state of a scan" else h

            return again(ctx, function, theta, h)

        if place == "step":
            return tf.reduce_sum(block(Theta(u=u), xs[0], xs[1], StepContext()) ** 2)
        h, ys = ops.scan(
            StepContext(), lambda *args: (block(*args), args[1]), Theta(u=u), xs[0], xs
        )
        return tf.reduce_sum(h**2) + tf.reduce_sum(ys**3)

    def gradients(again: Any, *weights: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(weights)
            y = loss(*weights, again)
        return [y, *tape.gradient(y, weights)]

    def run(*weights: tf.Tensor) -> Any:
        return gradients(ops.rematerialize, *weights)

    if how != "eager":
        run = tf.function(run, autograph=False, jit_compile=how == "compiled")
    expected = gradients(lambda ctx, function, theta, h: function(theta, h, ctx), w, u, v)
    assert_same(run(w, u, v), expected)


@pytest.mark.parametrize("outer", ["scan of rematerialised", "rematerialised scan"])
@pytest.mark.parametrize("graph", [False, True])
def test_rematerialisation_and_scan_nest(outer: str, graph: bool) -> None:
    def run(ctx: StepContext, body: Body, theta: Theta, state: Any, xs: Any) -> Any:
        if outer == "rematerialised scan":
            return ops.rematerialize(
                ctx,
                lambda theta, state, xs, ctx: ops.scan(ctx, body, theta, state, xs),
                theta,
                state,
                xs,
            )
        return ops.scan(
            ctx,
            lambda theta, state, x, ctx: ops.rematerialize(ctx, body, theta, state, x),
            theta,
            state,
            xs,
        )

    expected = loss_and_all(scan, *values())
    found = (in_graph(run) if graph else lambda *args: loss_and_all(run, *args))(*values())
    assert_same(found, expected)


@pytest.mark.parametrize("graph", [False, True])
def test_scan_sums_gradients_of_bfloat16_weights_in_float32(graph: bool) -> None:
    """In bfloat16, 256 + 1 is 256."""

    def gradient() -> tf.Tensor:
        w = tf.ones([2], tf.bfloat16)

        def add(theta: Theta, state: Any, x: tf.Tensor, ctx: StepContext) -> tuple[Any, Any]:
            assert theta.w.dtype == tf.bfloat16
            return state, theta.w * x

        with tf.GradientTape() as tape:
            tape.watch(w)
            ctx = StepContext(mode="train", seed=0, step=0)
            xs = tf.ones([1024, 2], tf.bfloat16)
            _, ys = ops.scan(ctx, add, Theta(w=w), tf.constant(0.0), xs)
        return tape.gradient(ys, w)

    found = tf.function(gradient)() if graph else gradient()
    assert found.dtype == tf.bfloat16
    np.testing.assert_array_equal(tf.cast(found, tf.float32), [1024, 1024])
