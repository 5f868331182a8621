"""Process-wide settings of TensorFlow: threads, logical devices, determinism, graph optimizer.

A mesh also sets environment variables of DTensor (`mesh/mesh_devices.py`).
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf
from absl import logging
from tensorflow.python.framework import config as tf_config

from tekso.framework.cores import num_cores
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.workarounds import ordered_sums


@dataclasses.dataclass
class _Process:
    """The settings that Tekso has changed in this process; a user's own settings stay.

    Attributes:
      has_threads: the threads are set, or a warning has said that they cannot be.
      is_deterministic: operations are deterministic.
      is_unoptimized: TensorFlow's graph optimizer is off.
    """

    has_threads: bool = False
    is_deterministic: bool = False
    is_unoptimized: bool = False


_PROCESS = _Process()
_MOST = 4096  # logical ones of the CPU; each takes memory


def set_determinism(wanted: bool) -> None:
    """Enables deterministic operations, or disables them if an earlier experiment enabled them."""
    if wanted == _PROCESS.is_deterministic:
        return
    if wanted:
        tf.config.experimental.enable_op_determinism()
    else:
        tf_config.disable_op_determinism()
    ordered_sums.set_ordered(wanted)
    _PROCESS.is_deterministic = wanted


def set_graph_optimizer(wanted: bool) -> None:
    """Disables TensorFlow's graph optimizer, or enables it if an earlier experiment disabled it."""
    if wanted == _PROCESS.is_unoptimized:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": not wanted})
        _PROCESS.is_unoptimized = not wanted


def setup_cpu(*, logical_devices: int | None, threads_per_op: int = 1) -> None:
    """Sets the process-wide numbers of threads and of logical CPU devices.

    TensorFlow fixes both when it runs its first operation. Before that, a later call never reduces
    the number of logical devices. After that, the threads stay as they are. A warning reports this
    once per process, unless an earlier call of this function has set them. The logical devices can
    then be used only if there are enough.

    Args:
      logical_devices: number of logical devices of the CPU; None: TensorFlow's default.
      threads_per_op: number of threads that one operation may use.

    Raises:
      ExecutionError: TensorFlow runs already with fewer logical devices, or the number is invalid.
    """
    if logical_devices is not None and logical_devices not in range(1, _MOST + 1):
        raise ExecutionError(
            f"cpu_devices is {logical_devices!r}, but must be a whole number from 1 to {_MOST:,}"
        )
    if logical_devices is not None:
        _make_logical_devices(logical_devices)
    _set_threads(per_op=threads_per_op, parallel_ops=max(num_cores(), logical_devices or 1))


def _make_logical_devices(wanted: int) -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    if len(tf.config.get_logical_device_configuration(cpu) or []) >= wanted:
        return
    try:
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * wanted
        )
    except RuntimeError:  # TensorFlow has started
        there = [device.name for device in tf.config.list_logical_devices("CPU")]
        if len(there) < wanted:
            raise ExecutionError(
                f"this execution needs {wanted} logical CPU devices, but TensorFlow has already "
                f"run in this process and started with {len(there)} ({', '.join(there)}). Restart "
                "the kernel or program. Before any other TensorFlow operation, build the "
                "experiment or call tekso.framework.execution.devices.setup_cpu("
                f"logical_devices={wanted}). Or choose an execution that needs fewer devices"
            ) from None


def _set_threads(*, per_op: int, parallel_ops: int) -> None:
    try:
        tf.config.threading.set_intra_op_parallelism_threads(per_op)
        tf.config.threading.set_inter_op_parallelism_threads(parallel_ops)
        _PROCESS.has_threads = True
    except RuntimeError:  # TensorFlow has started
        if _PROCESS.has_threads:  # set by an earlier call, or a warning was logged
            return
        _PROCESS.has_threads = True
        threads = tf.config.threading
        logging.warning(
            "TensorFlow has already run in this process, so its threads stay as they are: %s per "
            "operation and %s for parallel operations. This execution would set %d and %d. "
            "Steps may be slower; to avoid this, build the experiment first",
            threads.get_intra_op_parallelism_threads() or "TensorFlow's default",
            threads.get_inter_op_parallelism_threads() or "TensorFlow's default",
            per_op,
            parallel_ops,
        )
