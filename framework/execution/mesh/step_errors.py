"""Compiles steps for a mesh, and shortens DTensor's errors to one line."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.workarounds.compiler import cut_messages
from tekso.framework.execution.workarounds.retracing import DUPLICATE_NAME, retraced
from tekso.framework.execution.workarounds.unsupported_ops import refuse_unsupported

_OF_DTENSOR = ("dtensor", DUPLICATE_NAME)
_OF_COMPILER = re.compile(r"(?:(\S+:\d+):\d+: )?error: (?!'builtin.module')(.*)")
ADVICE = (
    "Remove rules and extra axes one by one to find the one that does not work. "
    'docs/meshes.md, "Custom layers", lists the ops that custom layers should not use'
)


def compiled(step: Callable[..., Any], where: str, *, advice: str = ADVICE) -> Callable[..., Any]:
    """Returns a step as a program of a mesh: a tf.function with the errors of `explained`.

    Everything that is traced is searched for unsupported ops: training and evaluation, forward and
    backward.

    Args:
      step: a function of tensors.
      where: as in `explained`.
      advice: as in `explained`.
    """

    @functools.wraps(step)
    def checked(*args: Any) -> Any:
        outputs = step(*args)
        refuse_unsupported(tf.compat.v1.get_default_graph())  # during tracing, before it runs
        return outputs

    return explained(retraced(checked), where, advice=advice)


def explained(step: Callable[..., Any], where: str, *, advice: str = ADVICE) -> Callable[..., Any]:
    """Returns `step` with an ExecutionError if DTensor cannot partition its program over the mesh.

    Args:
      step: a tf.function.
      where: the mesh, the rules and the extra axes, for the message.
      advice: end of the message: what to do.
    """
    cut_messages()

    @functools.wraps(step)
    def run(*args: Any) -> Any:
        try:
            return step(*args)
        except (
            tf.errors.InternalError,
            tf.errors.InvalidArgumentError,
            tf.errors.UnimplementedError,
            tf.errors.UnknownError,
        ) as error:
            message = str(error)
            if not any(word in message for word in _OF_DTENSOR):
                raise
            found = _OF_COMPILER.search(message)
            reason = found.group(2) if found else message.partition("\n")[0]
            if found and found.group(1) and "/tensorflow/" not in found.group(1):
                reason = f"{found.group(1)}: {reason}"
            raise ExecutionError(
                f"TensorFlow's DTensor cannot compile this step for {where}: {reason[:500]}. "
                f"{advice}"
            ) from None

    return run
