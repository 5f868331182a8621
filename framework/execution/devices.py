"""Devices and threads of this process."""

from __future__ import annotations

import tensorflow as tf

from tekso.framework.cores import num_cores
from tekso.framework.execution.base import ExecutionError


def setup_cpu(*, logical_devices: int | None, threads_per_op: int) -> None:
    """Sets the process-wide threads and the logical devices of the CPU.

    Raises:
      ExecutionError: TensorFlow has run already, with other settings.
    """
    if logical_devices is not None and logical_devices < 1:
        raise ExecutionError(f"cpu_devices is {logical_devices}, want at least 1")
    parallel_ops = max(num_cores(), logical_devices or 1)
    try:
        tf.config.threading.set_intra_op_parallelism_threads(threads_per_op)
        tf.config.threading.set_inter_op_parallelism_threads(parallel_ops)
        if logical_devices is not None:
            tf.config.set_logical_device_configuration(
                tf.config.list_physical_devices("CPU")[0],
                [tf.config.LogicalDeviceConfiguration()] * logical_devices,
            )
    except RuntimeError as error:
        raise ExecutionError(
            "threads and logical devices must be set before TensorFlow runs anything in this "
            f"process ({error})"
        ) from error
