"""Starts TensorFlow's runtime in several processes.

The server of the runtime accepts connections only at the address of its process.
"""

from __future__ import annotations

import os

import tensorflow as tf
from tensorflow.experimental import dtensor

from tekso.framework import port_filter, watchdog
from tekso.framework.cluster import Cluster
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.workarounds.unlocked_start import without_lock


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
            without_lock(),
        ):
            dtensor.initialize_accelerator_system(device_type)
    except (ValueError, RuntimeError, OSError, tf.errors.UnknownError) as error:
        reason = str(error).partition("\n")[0]
        raise ExecutionError(
            f"{cluster.name(cluster.process)} cannot start TensorFlow's runtime: {reason}"
        ) from error
