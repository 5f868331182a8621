"""Waits for the processes of a run without blocking Python's other threads.

Defect: TensorFlow holds the global interpreter lock (GIL) while it waits for all processes. If a
process is lost at that moment, it waits for an hour, and no thread can detect and report this. Here
the same C function is called with ctypes, which releases the GIL.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python import pywrap_tfe

_LIBRARY = "libtensorflow_cc.so.2"


@contextlib.contextmanager
def without_lock() -> Iterator[None]:
    """Releases the GIL while TensorFlow waits for the processes of a run, in the block."""
    path = os.path.join(tf.sysconfig.get_lib(), _LIBRARY)
    if not os.path.exists(path):  # another build of TensorFlow: the GIL stays held
        yield
        return
    library = ctypes.CDLL(path)
    usual = pywrap_tfe.TFE_EnableCollectiveOps
    pywrap_tfe.TFE_EnableCollectiveOps = lambda context, server: _enable(library, context, server)
    try:
        yield
    finally:
        pywrap_tfe.TFE_EnableCollectiveOps = usual


def _enable(library: ctypes.CDLL, context: Any, server_def: bytes) -> None:
    """Calls TFE_EnableCollectiveOps of TensorFlow's C API."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    library.TF_NewStatus.restype = ctypes.c_void_p
    library.TF_Message.restype = ctypes.c_char_p
    status = ctypes.c_void_p(library.TF_NewStatus())
    size = ctypes.c_size_t(len(server_def))
    handle = ctypes.c_void_p(pointer(context, None))
    library.TFE_EnableCollectiveOps(handle, server_def, size, status)
    code, message = library.TF_GetCode(status), library.TF_Message(status).decode(errors="replace")
    library.TF_DeleteStatus(status)
    if code:
        raise tf.errors.exception_type_from_error_code(code)(None, None, message)
