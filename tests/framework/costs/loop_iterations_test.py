"""Loops whose iterations overlap; the arrays that exist at once can be counted by hand."""

from __future__ import annotations

import random
from typing import Any

import pytest
import tensorflow as tf

from tekso.framework.costs import executor, graph_memory, loop_iterations
from tekso.framework.costs.executor import TimedOps
from tekso.framework.costs.graph_memory import Tensors

LENGTH, SIDE = 20, 100
WEIGHT = 4 * SIDE * SIDE  # bytes


def learned(x: tf.Tensor, w: tf.Tensor, *, overlap: int = 10) -> tf.Tensor:
    """The gradient of a weight that all iterations use."""
    with tf.GradientTape() as tape:
        tape.watch(w)
        y = tf.while_loop(
            lambda *_: True,
            lambda y: [tf.tanh(y @ w)],
            [x],
            maximum_iterations=LENGTH,
            parallel_iterations=overlap,
        )[0]
    return tape.gradient(y, w)


def tensors_of(rows: int, *, least: float, overlap: int = 10) -> Tensors:
    specs = [tf.TensorSpec([rows, SIDE]), tf.TensorSpec([SIDE, SIDE])]
    function = tf.function(lambda x, w: learned(x, w, overlap=overlap), autograph=False)
    return graph_memory.tensors_of(function.get_concrete_function(*specs).graph, least=least)


def most_at_once(tensors: Tensors, *, threads: int, of_weights: float) -> float:
    """Returns how many arrays exist at once, if products take a second."""

    def seconds(op: Any) -> float:
        if op.type != "MatMul":
            return 0.0
        return of_weights if op.outputs[0].shape == [SIDE, SIDE] else 1.0

    ops = TimedOps(tensors.ops, tensors.merged, {op.name: seconds(op) for op in tensors.ops})
    run, sizes, most = tensors.run(), dict[str, float](), 0.0
    for _, op, ends in executor.events([ops], threads=threads, chance=random.Random(0)):
        if ends:
            for name in run.end(op):
                sizes.pop(name, None)
            continue
        change = run.begin(op)
        sizes |= change.takes
        most = max(most, sum(sizes.values()))
        if change.overwrites:
            before, after = change.overwrites
            sizes[after] = sizes.pop(before)
    return most / WEIGHT


@pytest.mark.parametrize("overlap", [1, 3, 10])
def test_gradients_of_weights_of_iterations_that_overlap_exist_at_once(overlap: int) -> None:
    """A thread computes the gradients of the states of all iterations that may overlap first.

    The sum of the gradients is in the memory of the first one.
    """
    tensors = tensors_of(3, least=WEIGHT, overlap=overlap)
    found = most_at_once(tensors, threads=1, of_weights=1.0)
    assert overlap <= found <= overlap + 1


def test_an_idle_thread_adds_the_gradient_of_each_iteration_meanwhile() -> None:
    tensors = tensors_of(3, least=WEIGHT)
    assert most_at_once(tensors, threads=2, of_weights=0.8) <= 3


def test_the_gradient_frees_what_each_iteration_has_saved_after_its_use() -> None:
    size = 4 * 3 * SIDE
    held, counts = dict[str, float](), []
    for change in tensors_of(3, least=size).changes():
        held |= change.takes
        if change.overwrites:
            held[change.overwrites[1]] = held.pop(change.overwrites[0])
        for name in change.frees:
            held.pop(name, None)
        counts.append(sum(1 for each in held.values() if each == size))
    fewer = counts[counts.index(max(counts)) :]
    assert max(counts) >= LENGTH
    assert {LENGTH // 4, LENGTH // 2, 3 * LENGTH // 4} <= set(fewer)


def test_a_loop_of_too_many_ops_is_one_op(monkeypatch: pytest.MonkeyPatch) -> None:
    divided = {op.type for op in tensors_of(3, least=WEIGHT).ops}
    monkeypatch.setattr(loop_iterations, "MOST_OPS", 30)
    whole = {op.type for op in tensors_of(3, least=WEIGHT).ops}
    assert "StatelessWhile" in whole - divided
    assert "LoopCond" in divided - whole


def test_loops_within_loops_are_divided_too() -> None:
    def nested(x: tf.Tensor) -> tf.Tensor:
        inner = lambda x: [tf.tanh(x)]  # noqa: E731
        outer = lambda x: tf.while_loop(lambda _: True, inner, [x], maximum_iterations=3)  # noqa: E731
        return tf.while_loop(lambda _: True, outer, [x], maximum_iterations=5)[0]

    made = tf.function(nested, autograph=False).get_concrete_function(tf.TensorSpec([SIDE, SIDE]))
    tensors = graph_memory.tensors_of(made.graph)
    assert sum(1 for op in tensors.ops if op.type == "Tanh") == 15
    assert most_at_once(tensors, threads=1, of_weights=1.0) == pytest.approx(1, abs=0.01)
