"""Loops on a mesh give the gradients of the plain ones, in every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
import tensorflow as tf

from tekso.framework import ops
from tekso.framework.context import StepContext, isolated
from tekso.framework.execution.mesh import control_flow, unrolled
from tekso.framework.execution.mesh.context import LayoutContext
from tekso.framework.layer import Layer
from tekso.framework.theta import Theta

PROGRAM = Path(__file__).with_name("control_flow_program.py")

RECURRENT = "data:2;model:2 batch:data;mlp:model;vocab:model"
EMBED = "model:2 embed:model"
TRANSFORMER = [  # split by "embed" in equality_test.py
    "data:2;model:2 length:data;head_dim:model",
    "model:3 layers:model",
]


def differences(*arguments: str) -> dict[str, dict[str, Any]]:
    done = processes.run([str(PROGRAM), *arguments], optimized=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_gradients_of_bfloat16_weights_are_summed_in_float32() -> None:
    """In bfloat16, 256 + 1 is 256."""

    class Context:
        is_training = True

    def iteration(i: Any, theta: Any, state: Any, x: Any) -> Any:
        return state, [theta[0] * x[0]], []

    loop = control_flow.Loop(Context(), iteration, 320, [None])
    with tf.GradientTape() as tape:
        w = tf.ones([2], tf.bfloat16)
        tape.watch(w)
        _, (stacked,), _ = loop.run([w], [tf.constant(0.0)], [tf.ones([320, 2], tf.bfloat16)])
    gradient = tape.gradient(stacked, w)
    assert gradient.dtype == tf.bfloat16
    np.testing.assert_array_equal(tf.cast(gradient, tf.float32), [320, 320])


class OneDevice(LayoutContext):
    """A context without a mesh for the loops of a mesh."""

    def iteration(self, index: Any) -> StepContext:
        return isolated(self).fold(index)


class Noise(Layer):
    """A layer that the loop draws from and collects as."""


NOISE = Noise.Params().instantiate()
ITERATIONS, BATCH, DIM, FIRST = 4, 2, 3, 7


def body(theta: Theta, state: tf.Tensor, x: tf.Tensor, ctx: StepContext) -> tuple[Any, Any]:
    h = ops.dropout(ctx, tf.tanh(state @ theta.w + x), 0.25, NOISE)
    ctx.collect_loss("size", tf.reduce_sum(tf.square(h)))
    ctx.collect_metric("mean", tf.reduce_sum(h), BATCH * DIM)
    ctx.collect_statistic(NOISE, "sum", tf.reduce_sum(h, 0), BATCH)
    return h, 2 * h


def python_loop(ctx: Any, body: Any, theta: Any, state: Any, xs: Any, first: int) -> Any:
    """The specification. Statistics are stacked by iteration, as the weights of layers are."""
    ys, statistics = [], []
    for i in range(ITERATIONS):
        inner = isolated(ctx).fold(first + i)
        state, y = body(theta, state, xs[i], inner)
        ys.append(y)
        statistics.append(inner.collected.sums.pop("statistic")["sum"])
        ctx.collected.merge(inner.collected.sums)
    value, weight = map(tf.stack, zip(*statistics, strict=True))
    ctx.collected.add("statistic", "sum", value, weight)
    return state, tf.stack(ys)


@tf.function(autograph=False)
def loop_and_gradients(scan: Any, w: Any, state: Any, xs: Any, v: Any) -> dict[str, Any]:
    ctx = OneDevice(mode="train", seed=4, step=9, num_examples=BATCH)
    with tf.GradientTape() as tape:
        tape.watch([w, state, xs, v])
        outer = tf.sin(v)

        def reading(theta: Theta, state: tf.Tensor, x: tf.Tensor, ctx: StepContext) -> Any:
            return body(theta, state * outer, x, ctx)

        last, ys = scan(ctx, reading, Theta(w=w), state, xs, FIRST)
        loss = tf.reduce_sum(ys**3) + tf.reduce_sum(last) + ctx.collected.total("loss")
    sums = ctx.collected.sums
    return {
        "last": last,
        "ys": ys,
        "loss": sums["loss"]["size"],
        "metric": sums["metric"]["mean"],
        "statistic": next(iter(sums["statistic"].values())),
        "gradients": tape.gradient(loss, [w, state, xs, v]),
    }


@pytest.mark.parametrize("form", [control_flow, unrolled])
def test_the_loops_of_a_mesh_return_and_collect_what_a_python_loop_does(form: Any) -> None:
    """On one device; the programs below compare them on meshes."""
    rng = np.random.default_rng(0)
    shapes = ([DIM, DIM], [BATCH, DIM], [ITERATIONS, BATCH, DIM], [DIM])
    inputs = [tf.constant(rng.normal(size=shape), tf.float32) for shape in shapes]
    found, expected = (loop_and_gradients(scan, *inputs) for scan in (form.scan, python_loop))
    assert expected["statistic"][0].shape == (ITERATIONS, DIM)
    tf.nest.assert_same_structure(found, expected)
    for a, b in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def check(report: dict[str, dict[str, Any]]) -> None:
    for layout, found in report.items():
        # float32 sums in another order; of a weight, relative to its largest gradient.
        assert found["outputs"] < 2e-6, (layout, found)
        assert found["gradients"] < 1e-5, (layout, found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("lstm", EMBED),
        ("repeated_recurrent", RECURRENT),
        # Loops of "lstm" and of "repeated_recurrent" in the layout of the other. "gru" is
        # GruCell(reset="after"), which has one weight more than "repeated_recurrent".
        pytest.param("repeated_recurrent", EMBED, marks=pytest.mark.matrix),
        pytest.param("gru", RECURRENT, marks=pytest.mark.matrix),
    ],
)
def test_loop_over_time_on_a_mesh_equals_the_plain_one(model: str, layout: str) -> None:
    check(differences(model, layout))


@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        pytest.param("repeated", TRANSFORMER, marks=pytest.mark.slow),
        # Experts in a loop over depth are in ../pipeline/spmd_test.py, over meshes in
        # equality_test.py.
        pytest.param("repeated_moe", ["model:4 experts:model"], marks=pytest.mark.matrix),
    ],
)
def test_loop_over_depth_on_a_mesh_equals_the_plain_one(model: str, layouts: list[str]) -> None:
    check(differences(model, *layouts))


@pytest.mark.slow
def test_parts_of_a_batch_add_up_on_a_mesh_also_their_statistics() -> None:
    check(differences("repeated_recurrent", "--accumulation=2", RECURRENT))
