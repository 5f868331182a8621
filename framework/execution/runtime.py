"""Starts TensorFlow's runtime in several processes without blocking Python's other threads.

TensorFlow holds the global interpreter lock (GIL) while it waits for all processes. If a process is
lost at that moment, it waits for an hour, and no thread could detect and report this. Here the same
C function is called with ctypes, which releases the GIL. The server of the runtime accepts
connections only at the address of its process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.experimental import dtensor
from tensorflow.python import pywrap_tfe

from tekso.framework import port_filter, watchdog
from tekso.framework.cluster import Cluster
from tekso.framework.execution.errors import ExecutionError

_LIBRARY = "libtensorflow_cc.so.2"


def describe(cluster: Cluster) -> None:
    """Sets the processes for TensorFlow, which reads them only from the environment."""
    os.environ["DTENSOR_JOB_NAME"] = "worker"
    os.environ["DTENSOR_JOBS"] = ",".join(cluster.addresses)
    os.environ["DTENSOR_NUM_CLIENTS"] = str(cluster.size)
    os.environ["DTENSOR_CLIENT_ID"] = str(cluster.process)


def start(device_type: str, cluster: Cluster) -> None:
    """Connects the processes that `describe` has set; all must call it at the same time.

    Raises:
      ExecutionError: the runtime does not start.
      tf.errors.OpError: a process is lost meanwhile.
    """
    try:
        with (
            port_filter.limited_to(cluster.address, or_open=cluster.allows_network),
            watchdog.waiting(f"all {cluster.size} processes to start TensorFlow's runtime"),
            _without_lock(),
        ):
            dtensor.initialize_accelerator_system(device_type)
    except (ValueError, RuntimeError, OSError, tf.errors.UnknownError) as error:
        reason = str(error).partition("\n")[0]
        raise ExecutionError(
            f"{cluster.name(cluster.process)} cannot start TensorFlow's runtime: {reason}"
        ) from error


@contextlib.contextmanager
def _without_lock() -> Iterator[None]:
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
