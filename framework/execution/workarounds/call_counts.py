"""Makes TensorFlow count the traces of each tf.function separately, to warn of retracing."""

from __future__ import annotations

from typing import Any


def counted_alone(function: Any) -> Any:
    """Returns the tf.function, whose traces are now counted separately from those of others.

    Defect: TensorFlow counts all tf.functions of one method or inner function together, and warns
    if 5 of their last 10 calls were traced. Each program has its own tf.functions of the same
    methods, so several `Session`s in a process got the warning although nothing was traced twice.
    A function that is traced again and again is still reported.
    """
    if hasattr(function, "_key_for_call_stats"):
        function._key_for_call_stats = _Key()
    return function


class _Key:
    """The key of a function in TensorFlow's counts, which refer to it weakly."""
