"""Counts the traces of every tf.function for itself, for TensorFlow's warning about retracing."""

from __future__ import annotations

from typing import Any


def counted_alone(function: Any) -> Any:
    """Returns a tf.function whose traces are not counted with those of others.

    Defect: TensorFlow warns if 5 of the last 10 calls traced, of all tf.functions of one method or
    inner function together. Each program has its own tf.functions, of the same methods, so several
    `Session`s in a process got the warning although nothing was traced twice. A function that is
    traced again and again is still reported.
    """
    if hasattr(function, "_key_for_call_stats"):
        function._key_for_call_stats = _Key()
    return function


class _Key:
    """The key of a function in TensorFlow's counts, which refer to it weakly."""
