"""What TensorFlow has once a process: threads, logical devices, determinism, graph optimizer.

A mesh besides sets environment variables of DTensor (`mesh/mesh_devices.py`).
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf
from absl import logging
from tensorflow.python.framework import config as tf_config

from tekso.framework.cores import num_cores
from tekso.framework.execution.errors import ExecutionError


@dataclasses.dataclass
class _Process:
    """What Tekso has set in this process; what a user has set stays.

    Attributes:
      has_threads: the threads are set, or it was reported that they cannot be.
      is_deterministic: operations are deterministic.
      is_unoptimized: TensorFlow's graph optimizer is off.
    """

    has_threads: bool = False
    is_deterministic: bool = False
    is_unoptimized: bool = False


_PROCESS = _Process()


def set_determinism(wanted: bool) -> None:
    """Switches deterministic operations on, or off if an earlier experiment switched them on."""
    if wanted == _PROCESS.is_deterministic:
        return
    if wanted:
        tf.config.experimental.enable_op_determinism()
    else:
        tf_config.disable_op_determinism()
    _PROCESS.is_deterministic = wanted


def set_graph_optimizer(wanted: bool) -> None:
    """Switches TensorFlow's graph optimizer off, or on if an earlier experiment switched it off."""
    if wanted == _PROCESS.is_unoptimized:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": not wanted})
        _PROCESS.is_unoptimized = not wanted


def setup_cpu(*, logical_devices: int | None, threads_per_op: int = 1) -> None:
    """Sets the process-wide threads and the logical devices of the CPU.

    TensorFlow fixes both when it runs its first operation. Before that, a later call never takes
    logical devices away. After that, threads stay as they are, which a warning reports once a
    process, unless a call of this function has set them; and logical devices can be used only if
    enough of them exist.

    Args:
      logical_devices: number of devices to make of the CPU; None: as TensorFlow decides.
      threads_per_op: number of threads that one operation may use.

    Raises:
      ExecutionError: TensorFlow has already run in this process, with fewer logical devices.
    """
    if logical_devices is not None and logical_devices < 1:
        raise ExecutionError(
            f"the number of logical CPU devices is {logical_devices}, want at least 1"
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
                f"this execution needs {wanted} logical CPU devices, and TensorFlow, which has "
                f"already run in this process, started with {len(there)} ({', '.join(there)}). "
                "Restart the kernel or program, and before any other TensorFlow operation build "
                "the experiment or call tekso.framework.execution.devices.setup_cpu("
                f"logical_devices={wanted}); or choose an execution that needs fewer devices"
            ) from None


def _set_threads(*, per_op: int, parallel_ops: int) -> None:
    try:
        tf.config.threading.set_intra_op_parallelism_threads(per_op)
        tf.config.threading.set_inter_op_parallelism_threads(parallel_ops)
        _PROCESS.has_threads = True
    except RuntimeError:  # TensorFlow has started
        if _PROCESS.has_threads:  # of an earlier call, or reported
            return
        _PROCESS.has_threads = True
        threads = tf.config.threading
        logging.warning(
            "TensorFlow has already run in this process, so its threads stay as they are: %s per "
            "operation and %s for parallel operations, where this execution would set %d and %d. "
            "Steps may be slower; to avoid it, build the experiment first",
            threads.get_intra_op_parallelism_threads() or "TensorFlow's default",
            threads.get_inter_op_parallelism_threads() or "TensorFlow's default",
            per_op,
            parallel_ops,
        )
