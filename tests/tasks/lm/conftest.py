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
    """Weights of a layer on one device, each function traced once."""

    serialize_calls = False

    def __init__(self, theta: Theta, seed: int) -> None:
        """Keeps the weights; `seed` is that of `ctx`."""
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
    """Returns a function from a layer (and a seed) to a program with freshly drawn weights."""

    def make(layer: Layer, seed: int = 1) -> PlainProgram:
        return PlainProgram(layer.init(seed), seed)

    return make
