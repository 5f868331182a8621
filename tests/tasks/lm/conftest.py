"""Fixtures of the language-model tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.layer import Layer
from tekso.framework.theta import Theta


class PlainProgram:
    """A program for tests: the weights of a layer on one device; traces each function once."""

    serialize_calls = False

    def __init__(self, theta: Theta, seed: int) -> None:
        """Stores the weights; `seed` is the seed of `ctx`."""
        self.theta, self.seed = theta, seed
        self.traced: dict[Any, Any] = {}

    def call(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Returns `function(theta, *inputs, ctx)`."""
        if function not in self.traced:

            def run(*inputs: Any) -> Any:
                return function(self.theta, *inputs, StepContext(mode="decode", seed=self.seed))

            self.traced[function] = tf.function(run, autograph=False)
        return self.traced[function](*inputs)


@pytest.fixture
def program_of() -> Callable[..., PlainProgram]:
    """Returns a function of a layer and a seed that makes a program with new initial weights."""

    def make(layer: Layer, seed: int = 1) -> PlainProgram:
        return PlainProgram(layer.init(seed), seed)

    return make
