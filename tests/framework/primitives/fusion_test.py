"""Fusion: the same numbers, one compiled function a cluster, and nothing shared by two towers."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework.primitives.custom_gradient import custom_gradient
from tekso.framework.primitives.fusion import (
    Fuse,
    MarkedFusion,
    SharedTraces,
    XlaFusion,
    no_fusion,
)

TRACES: list[float] = []


def scaled(x: tf.Tensor, y: tf.Tensor, *, factor: float) -> tf.Tensor:
    TRACES.append(factor)
    return tf.sin(x) * factor + y


def test_gives_the_function_with_its_static_arguments_bound() -> None:
    x, y = tf.constant([0.5, 2.0]), tf.constant([1.0, -1.0])
    for fuse in (no_fusion, XlaFusion()):
        np.testing.assert_allclose(
            fuse(scaled, factor=3.0)(x, y), 3 * np.sin([0.5, 2]) + [1, -1], rtol=1e-6
        )


def test_compiles_a_cluster_once_for_every_choice_of_its_static_arguments() -> None:
    fuse = XlaFusion()
    assert fuse(scaled, factor=2.0) is fuse(scaled, factor=2.0)
    assert fuse(scaled, factor=2.0) is not fuse(scaled, factor=3.0)
    TRACES.clear()
    for _ in range(3):
        fuse(scaled, factor=2.0)(tf.ones([2]), tf.ones([2]))
    assert TRACES == [2.0]


def test_two_instances_share_no_compiled_function() -> None:
    first, second = XlaFusion(), XlaFusion()
    assert first(scaled, factor=2.0) is not second(scaled, factor=2.0)


def test_the_gradient_of_a_condition_uses_tensors_of_its_branch() -> None:
    fuse = XlaFusion()

    @custom_gradient
    def squared(x: tf.Tensor) -> Any:
        return x * x, lambda dy: fuse(scaled, factor=0.0)(x, x * (2 * dy))

    @tf.function(autograph=False)
    def gradient(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.cond(tf.reduce_sum(x) > 0, lambda: squared(tf.sin(x)), lambda: x)
        return tape.gradient(y, x)

    np.testing.assert_allclose(gradient(tf.constant([0.5, 2.0])), np.sin([1, 4]), rtol=1e-6)
    np.testing.assert_allclose(gradient(tf.constant([-0.5, -2.0])), [1, 1])


def test_marks_the_ops_of_large_clusters_alone() -> None:
    fuse = MarkedFusion(min_elements=8)

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> tf.Tensor:
        y = tf.cos(x)
        with tf.GradientTape() as tape:
            tape.watch(y)
            z = fuse(scaled, factor=3.0)(y, y)
        return tape.gradient(z, y)

    for size, marked in ((3, set()), (4, {"Sin", "AddV2"})):
        x = tf.linspace(0.0, 1.0, size)
        ops = step.get_concrete_function(x).graph.get_operations()
        found = {op.type for op in ops if op.node_def.attr["_XlaCompile"].b}
        assert found >= marked
        assert "Cos" not in {op.name for op in ops if op.node_def.attr["_XlaCompile"].b}
        assert bool(found) is bool(marked)
        np.testing.assert_allclose(step(x), 3 * np.cos(np.cos(x)) + 1, rtol=1e-6)


def test_shared_traces_trace_once_per_shape_and_arguments_and_compute_the_same() -> None:
    traces = []

    def grown(x: tf.Tensor, *, factor: float) -> tf.Tensor:
        traces.append(x.shape.as_list())
        return tf.exp(factor * x) / 3.0

    xs = [tf.random.stateless_normal([n, 3], seed=[n, i]) for i in range(4) for n in (2, 5)]

    def run(fuse: Fuse) -> list[tf.Tensor]:
        whole = tf.function(lambda: [fuse(grown, factor=0.5)(x) for x in xs], autograph=False)
        return whole()  # type: ignore[no-any-return]

    expected = run(no_fusion)
    assert len(traces) == len(xs)
    traces.clear()
    shared = SharedTraces()
    for one, other in zip(run(shared), expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert traces == [[2, 3], [5, 3]]
    assert shared(grown, factor=0.5) is shared(grown, factor=0.5)
    assert shared(grown, factor=0.5) is not shared(grown, factor=0.25)
