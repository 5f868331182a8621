"""Settings of DTensor's compiler and of its error messages."""

from __future__ import annotations

import os
import threading
from typing import Any

from tensorflow.python.framework import error_interpolation

_LONGEST = 20_000  # length to which messages are cut, in characters

SERIAL = threading.Lock()
"""Held by each call of DTensor where several threads use it.

Defect: DTensor's device has tables without a lock, so only one thread at a time may call it. To get
a value from it (`unpack`, `numpy`) waits for the functions of all meshes, so callers wait with this
lock: without it, a function that another thread starts meanwhile may be cancelled (CancelledError).
Functions of several meshes therefore run one after the other.
"""

_parse_message = error_interpolation.parse_message


def choose_passes(*, tpu: bool = False) -> None:
    """Selects the compiler passes of DTensor: for CPU and GPU, or for TPU.

    Call it before DTensor compiles its first program. Programs whose collectives are only counted
    are compiled by the same passes.

    Defects: with DTENSOR_USE_ALL_TO_ALL_RELAYOUT, TensorFlow's default except on TPUs, resharding
    between two inner dims of a tensor of rank 4 gives wrong values. The pass that combines
    all-reduces may combine one before a loop with one after it.
    """
    if not tpu:
        os.environ["DTENSOR_USE_ALL_TO_ALL_RELAYOUT"] = "0"
    os.environ["DTENSOR_ENABLE_COMBINE_ALL_REDUCES_OPTIMIZATION"] = "0"


def cut_messages() -> None:
    """Makes TensorFlow search only the beginning of an error message for names of ops.

    Defect: messages of DTensor contain the whole program (hundreds of kilobytes). TensorFlow
    searches them with a regular expression, whose time grows with the square of the length: it
    takes minutes.
    """
    error_interpolation.parse_message = _parse_cut_message


def _parse_cut_message(message: str) -> Any:
    return _parse_message(message[:_LONGEST])
