"""A loss that draws from the global random numbers of NumPy or of Python is refused."""

from __future__ import annotations

import random
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from wrong_losses import OnHost, Points, Squares, check

from tekso.framework.context import StepContext
from tekso.framework.foreign_variables import ForeignVariableError
from tekso.framework.run import loss_check
from tekso.framework.task import LossSums

IMPORTED: list[str] = []
OTHERS: list[float] = []  # numbers that another thread draws


def scaled(way: str, squares: tf.Tensor) -> tf.Tensor:
    if way == "tiny noise":
        return squares * (1 + 1e-9 * np.random.normal())
    if way == "layer drop":
        keep = random.random() < 2
        return squares if keep else -squares
    if way == "draws at import" and not IMPORTED:
        IMPORTED.append(str(np.random.normal() + random.random()))
    if way == "sets the seed":
        np.random.seed(0)
        return squares * np.square(np.random.normal(size=3)).sum()
    if way == "numpy_function":
        return squares * tf.numpy_function(tiny_noise, [], tf.float32, stateful=True)
    if way == "py_function":
        return squares * tf.py_function(tiny_noise, [], tf.float32)
    if way == "direct":
        normal = tf.numpy_function(np.random.standard_normal, [], tf.float64)
        return squares * (1 + 1e-9 * tf.cast(normal, tf.float32))
    if way == "another thread draws":
        another = threading.Thread(target=draw_as_another)
        another.start()
        another.join()
    if way == "own generator":
        return squares * (1 + np.square(np.random.default_rng(0).normal()))
    return squares


def tiny_noise() -> np.float32:
    return np.float32(1 + 1e-9 * np.random.normal())


def draw_as_another() -> None:
    OTHERS.append(np.random.normal(size=len(OTHERS) + 1).sum())


class Drawing(Squares):
    """Draws in training, or in evaluations too."""

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> LossSums:
        found = super().loss(theta, batch, ctx)
        way, _, mode = self.params.way.partition(", ")
        if mode != "train" or ctx.is_training:
            return LossSums(scaled(way, found.loss_sum))
        return found


@pytest.mark.parametrize("mode", ["train", "always"])
@pytest.mark.parametrize(
    ("way", "whose", "line"),
    [
        ("tiny noise", r"NumPy \(np.random\)", r"return squares \* \(1 \+ 1e-9"),
        ("layer drop", r"Python \(random\)", r"keep = random.random\(\) < 2"),
    ],
)
def test_draws_that_a_comparison_of_losses_does_not_find_are_refused_with_their_line(
    way: str, whose: str, line: str, mode: str
) -> None:
    tracing = sys.gettrace()
    said = (
        rf"^Drawing.loss \(.*\) draws random numbers of {whose}: .* ctx.uniform\(self, shape\).*"
        rf"\n  \(at .*global_draws_test.py:\d+, in scaled\)\n    {line}"
    )
    with pytest.raises(ForeignVariableError, match=said):
        check(f"{way}, {mode}", Drawing)
    assert sys.gettrace() is tracing


@pytest.mark.parametrize("way", ["numpy_function", "py_function", "direct"])
def test_draws_of_a_function_that_each_step_calls_are_refused_with_another_cause(way: str) -> None:
    said = (
        r"draws random numbers of NumPy \(np.random\) in tf.numpy_function or tf.py_function: .*, "
        r"and pass them to the function\n  \(at .*global_draws_test.py"
    )
    with pytest.raises(ForeignVariableError, match=said):
        check(f"{way}, always", Drawing)


@pytest.mark.parametrize("way", ["draws at import", "sets the seed", "own generator"])
def test_numbers_that_are_not_drawn_each_time_are_allowed(way: str) -> None:
    IMPORTED.clear()
    assert check(f"{way}, train", Drawing) == check("nothing", Drawing)
    assert bool(IMPORTED) == (way == "draws at import")


def test_numbers_that_another_thread_draws_meanwhile_are_allowed() -> None:
    """A thread draws as many numbers as its time allows: here, more in each computation."""
    OTHERS.clear()
    assert check("another thread draws, always", Drawing) == check("nothing", Drawing)
    assert OTHERS


def test_numbers_that_another_thread_also_draws_while_nothing_is_computed_are_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such a thread may by chance have drawn one number at the same line each time."""
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds + np.random.normal())

    monkeypatch.setattr(time, "sleep", sleep)
    assert check("tiny noise, always", Drawing) == check("nothing", Drawing)
    assert waits


def test_a_run_that_began_before_this_check_can_be_resumed() -> None:
    task = Drawing.Params(way="tiny noise, always").instantiate()
    inputs = {"input": Points.Params(batch_size=4).instantiate()}
    found = loss_check.check_restored(task, OnHost(task), inputs)
    assert not found.warnings and not found.unchecked
