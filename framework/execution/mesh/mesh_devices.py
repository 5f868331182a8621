"""The devices of a mesh: logical devices of the CPU, GPUs, or the cores of a TPU.

What this cannot be tried on (TPU, GPU) is in the few lines below, and was never run.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.experimental import dtensor

from tekso.framework.execution import devices
from tekso.framework.execution.base import ExecutionError
from tekso.framework.execution.mesh.layouts import MeshShape


def setup(size: int | None, tpu: str | None, cpu_devices: int | None) -> str:
    """Sets threads and devices up; returns the type of the devices.

    Args:
      size: devices that the mesh asks for, as far as it says: so many are made of a CPU.
      tpu: name or address of a TPU.
      cpu_devices: number of logical CPU devices to make of this machine.
    """
    if tpu:
        try:
            dtensor.initialize_accelerator_system("TPU")
        except (ValueError, tf.errors.OpError) as error:
            reason = str(error).partition("\n")[0]
            raise ExecutionError(f"there is no TPU {tpu!r} to connect to: {reason}") from error
        return "TPU"
    if cpu_devices is None and tf.config.list_physical_devices("GPU"):
        return "GPU"
    made = cpu_devices or size or 1
    devices.setup_cpu(logical_devices=made, threads_per_op=max(1, devices.num_cores() // made))
    return "CPU"


def count(device_type: str) -> int:
    """Returns how many devices of a type there are."""
    return len(tf.config.list_logical_devices(device_type))


def make_mesh(shape: MeshShape, device_type: str) -> Any:
    """Returns the DTensor mesh over the first devices of a type."""
    names = [device.name for device in tf.config.list_logical_devices(device_type)]
    return dtensor.create_mesh(list(shape.axes), devices=names[: shape.size])
