"""Imports TensorFlow for the commands: without its log lines, Keras and the garbage collector."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator

from tekso.framework import out_of_memory
from tekso.framework.run.lazy_keras import lazy_keras
from tekso.framework.tensorflow_log import quiet


@contextlib.contextmanager
def without_collecting() -> Iterator[None]:
    """Suspends the garbage collector in a block that imports, and exempts what there is at its end.

    The modules of TensorFlow create 300,000 objects that stay. Searching them for garbage again and
    again takes a fifth of the time of the import, and more at every later full collection.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def import_tensorflow() -> None:
    """Imports TensorFlow, without Keras, and sets its Python logger to errors only."""
    out_of_memory.save_address_space()
    if "tensorflow" not in sys.modules:
        with quiet(), lazy_keras(), without_collecting():
            import tensorflow as tf
        tf.get_logger().setLevel("ERROR")
    out_of_memory.limit_tensors()
