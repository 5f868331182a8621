"""`tf.custom_gradient` as a decorator that keeps types, for functions of the body of a loop too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec

import tensorflow as tf

P = ParamSpec("P")


def custom_gradient(function: Callable[P, Any]) -> Callable[P, Any]:
    """Gives a function its own gradient.

    Arguments from outside of the body of a loop become tensors of the body: DTensor compiles no
    IdentityN of both, which every custom gradient adds.

    Args:
      function: returns its value, and a function from the gradients of the value to those of its
        arguments.
    """
    made: Callable[..., Any] = tf.custom_gradient(function)

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> Any:
        graph = tf.compat.v1.get_default_graph()
        own: list[Any] = list(args)
        for i, x in enumerate(own):
            if tf.is_symbolic_tensor(x) and x.graph is not graph:
                own[i] = tf.identity(x)
        return made(*own, **kwargs)

    return run
