"""`tf.custom_gradient` as a decorator that keeps types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec

import tensorflow as tf

P = ParamSpec("P")


def custom_gradient(function: Callable[P, Any]) -> Callable[P, Any]:
    """Gives a function its own gradient.

    Args:
      function: returns its value, and a function from the gradients of the value to those of its
        arguments.
    """
    made: Callable[P, Any] = tf.custom_gradient(function)
    return made
