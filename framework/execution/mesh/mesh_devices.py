"""The devices of a mesh: logical devices of the CPU, GPUs, or the cores of a TPU.

With several processes, the mesh spans the devices of all of them, in the order of the processes.
Each process sets up its own devices, and TensorFlow's runtime (gRPC) connects the processes.

The code for TPUs and GPUs was never run.
"""

from __future__ import annotations

import os
from typing import Any

import tensorflow as tf
from tensorflow.experimental import dtensor

from tekso.framework.cluster import Cluster
from tekso.framework.cores import num_cores
from tekso.framework.execution import devices, runtime
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.mesh.layouts import MeshShape
from tekso.framework.execution.mesh.workarounds import compiler

MOST_CPU_DEVICES = 4096


def setup(
    size: int | None,
    tpu: str | None,
    cpu_devices: int | None,
    cluster: Cluster | None = None,
) -> str:
    """Sets up threads and devices; returns the type of the devices.

    Args:
      size: number of devices of the mesh; None if unknown. On a CPU, this many logical devices are
        created, divided over the processes.
      tpu: name or address of a TPU.
      cpu_devices: number of logical CPU devices to create on this machine; None: as `size` says.
      cluster: the processes that the mesh spans; all must call this at the same time.
    """
    compiler.choose_passes(tpu=bool(tpu))
    if cluster is not None:
        runtime.describe(cluster)
    if tpu:
        try:
            dtensor.initialize_accelerator_system("TPU")
        except (ValueError, tf.errors.OpError) as error:
            reason = str(error).partition("\n")[0]
            raise ExecutionError(f"cannot connect to the TPU {tpu!r}: {reason}") from error
        return "TPU"
    processes = cluster.size if cluster is not None else 1
    if cpu_devices is None and tf.config.list_physical_devices("GPU"):
        device_type = "GPU"
    else:
        device_type, made = "CPU", cpu_devices or -(-(size or 1) // processes)
        if made > MOST_CPU_DEVICES:
            raise ExecutionError(
                f"execution.mesh needs {made} logical CPU devices on this machine, but at most "
                f"{MOST_CPU_DEVICES} are supported; --mode=inspect_sharding needs no devices"
            )
        threads = max(1, num_cores() // _streams(made, cluster))
        if have_cores(cluster, made):
            # Each device gets its own threads. Otherwise TensorFlow starts one common thread, on
            # which the clusters that XLA compiled for different devices wait for each other.
            os.environ["TF_OVERRIDE_GLOBAL_THREADPOOL"] = "1"
        devices.setup_cpu(logical_devices=made, threads_per_op=threads)
        if not have_cores(cluster, made):
            # Devices that share cores are used to try a layout, where a fast start matters more
            # than the few percent that TensorFlow's graph optimizer saves per step. With 8 devices
            # and 12 layers it takes most of a minute: its time grows with the number of devices,
            # and faster than the number of ops.
            devices.set_graph_optimizer(False)
    if cluster is not None:
        runtime.start(device_type, cluster)
    return device_type


def _streams(devices: int, cluster: Cluster | None) -> int:
    """Returns the number of logical devices on this machine, over all its processes."""
    return devices * (cluster.num_local if cluster is not None else 1)


def have_cores(cluster: Cluster | None, made: int | None = None) -> bool:
    """Returns whether every logical CPU device of this machine has its own core.

    Args:
      cluster: the processes that the mesh spans.
      made: number of devices of each process; None: the number of this process.
    """
    if made is None:
        made = dtensor.num_local_devices("CPU")  # tf.config lists the devices of all processes
    return _streams(made, cluster) <= num_cores()


def count(device_type: str, *, cpu_devices: int | None = None) -> int:
    """Returns the number of devices of a type, over all processes, that a mesh can use.

    Args:
      device_type: the type.
      cpu_devices: number of logical CPU devices per process, if it was set; an earlier experiment
        in this process may have created more.
    """
    if device_type == "CPU" and cpu_devices is not None:
        return int(cpu_devices * dtensor.num_clients())
    return dtensor.num_global_devices(device_type)


def make_mesh(shape: MeshShape, device_type: str, *, first: int = 0) -> Any:
    """Returns a DTensor mesh on some devices of a type, the same number in each process.

    Args:
      shape: axes of the mesh.
      device_type: the type.
      first: index of the first device; 0 if there are several processes.
    """
    processes = dtensor.num_clients()
    if shape.size % processes:
        raise ExecutionError(
            f"execution.mesh {str(shape)!r} has {shape.size} devices, which do not divide evenly "
            f"over the {processes} processes"
        )
    local = shape.size // processes
    if processes > 1:
        names = None if device_type == "TPU" else [f"{device_type}:{i}" for i in range(local)]
        return dtensor.create_distributed_mesh(
            list(shape.axes), local_devices=names, device_type=device_type
        )
    names = [device.name for device in tf.config.list_logical_devices(device_type)]
    return dtensor.create_mesh(list(shape.axes), devices=names[first:][:local])
