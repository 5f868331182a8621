"""Imports TensorFlow without the log lines about itself that it writes to stderr.

TensorFlow's C++ code writes them before any setting has an effect. So stderr is redirected to a
file during the import, and all other lines are written to stderr afterwards.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import sys
import tempfile
from collections.abc import Iterator

from tekso.framework import out_of_memory
from tekso.framework.run.lazy_keras import lazy_keras

_CHATTER = re.compile(
    rb"All log messages before absl::InitializeLog|oneDNN custom operations|This TensorFlow binary "
    rb"is optimized|To enable the following instructions|Unable to register cu\w+ factory|"
    rb"Could not find cuda drivers|computation placer already registered|TF-TRT Warning"
)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppresses TensorFlow's log lines in the block that imports it, and most of them later."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # errors also raise exceptions
    with without_chatter():
        yield


@contextlib.contextmanager
def without_chatter() -> Iterator[None]:
    """Suppresses TensorFlow's lines about itself in the block that imports it, and nothing else.

    Without a stderr or a folder for temporary files, as in a service, it suppresses nothing.
    """
    with contextlib.ExitStack() as stack:
        file = None
        with contextlib.suppress(OSError):
            stderr = os.dup(2)
            stack.callback(os.close, stderr)
            file = stack.enter_context(tempfile.TemporaryFile())
        if file is None:
            yield
            return
        _flush()
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            _flush()
            os.dup2(stderr, 2)
            file.seek(0)
            kept = b"".join(line for line in file if not _CHATTER.search(line))
            if kept:
                os.write(2, kept)


def _flush() -> None:
    if sys.stderr is not None:  # Python has none if its descriptor was closed
        sys.stderr.flush()


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
