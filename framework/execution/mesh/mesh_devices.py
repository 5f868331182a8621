"""The devices of a mesh: logical devices of the CPU, GPUs, or the cores of a TPU.

In several processes the mesh spans the devices of all, in the order of the processes; each process
sets up its own, and TensorFlow's runtime (gRPC) connects them.

What this cannot be tried on (TPU, GPU) is in the few lines below, and was never run.
"""

from __future__ import annotations

import os
from typing import Any

import tensorflow as tf
from tensorflow.experimental import dtensor

from tekso.framework.cores import num_cores
from tekso.framework.execution import devices
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.mesh import runtime
from tekso.framework.execution.mesh.cluster import Cluster
from tekso.framework.execution.mesh.layouts import MeshShape

MOST_CPU_DEVICES = 4096


def setup(
    size: int | None,
    tpu: str | None,
    cpu_devices: int | None,
    cluster: Cluster | None = None,
) -> str:
    """Sets threads and devices up; returns the type of the devices.

    Args:
      size: devices that the mesh asks for, as far as it says: so many are made of a CPU.
      tpu: name or address of a TPU.
      cpu_devices: number of logical CPU devices to make of this machine.
      cluster: the processes that the mesh spans; all have to call this at the same time.
    """
    choose_passes(tpu=bool(tpu))
    if cluster is not None:
        _describe(cluster)
    if tpu:
        try:
            dtensor.initialize_accelerator_system("TPU")
        except (ValueError, tf.errors.OpError) as error:
            reason = str(error).partition("\n")[0]
            raise ExecutionError(f"there is no TPU {tpu!r} to connect to: {reason}") from error
        return "TPU"
    processes = cluster.size if cluster is not None else 1
    if cpu_devices is None and tf.config.list_physical_devices("GPU"):
        device_type = "GPU"
    else:
        device_type, made = "CPU", cpu_devices or -(-(size or 1) // processes)
        if made > MOST_CPU_DEVICES:
            raise ExecutionError(
                f"execution.mesh asks for {made} devices of this machine's CPU, of which at most "
                f"{MOST_CPU_DEVICES} are made; --mode=inspect_sharding needs none"
            )
        threads = max(1, num_cores() // _streams(made, cluster))
        if have_cores(cluster, made):
            # Each device gets threads of its own. Of one common thread, which TensorFlow would
            # start, what XLA compiled for several devices would wait for one another.
            os.environ["TF_OVERRIDE_GLOBAL_THREADPOOL"] = "1"
        devices.setup_cpu(logical_devices=made, threads_per_op=threads)
        if not have_cores(cluster, made):
            # Devices that share cores try a layout out: starting soon is worth more than the few
            # percent by which TensorFlow's optimizer speeds a step up. It costs 8 devices and 12
            # layers most of a minute, since its time grows with devices and faster than with ops.
            devices.set_graph_optimizer(False)
    if cluster is not None:
        _connect(device_type, cluster)
    return device_type


def _streams(devices: int, cluster: Cluster | None) -> int:
    """Streams of ops on this machine: its devices, of all processes."""
    return devices * (cluster.num_local if cluster is not None else 1)


def have_cores(cluster: Cluster | None, made: int | None = None) -> bool:
    """Returns whether every logical device of this machine's CPU has a core of its own.

    Args:
      cluster: the processes that the mesh spans.
      made: devices of each of them; None: as many as this process has.
    """
    if made is None:
        made = dtensor.num_local_devices("CPU")  # TensorFlow lists those of all processes
    return _streams(made, cluster) <= num_cores()


def choose_passes(*, tpu: bool = False) -> None:
    """Sets which passes DTensor runs over a program: of CPU and GPU, or of TPU.

    To be called before it compiles the first; what is counted is compiled by the same passes.
    """
    if not tpu:  # TensorFlow's default moves wrong values between two inner dims
        os.environ["DTENSOR_USE_ALL_TO_ALL_RELAYOUT"] = "0"
    # It would join sums over devices from before and after a loop that is between them.
    os.environ["DTENSOR_ENABLE_COMBINE_ALL_REDUCES_OPTIMIZATION"] = "0"


def _describe(cluster: Cluster) -> None:
    """Tells DTensor who takes part: it reads that from the environment only."""
    os.environ["DTENSOR_JOB_NAME"] = "worker"
    os.environ["DTENSOR_JOBS"] = ",".join(cluster.addresses)
    os.environ["DTENSOR_NUM_CLIENTS"] = str(cluster.size)
    os.environ["DTENSOR_CLIENT_ID"] = str(cluster.process)


def _connect(device_type: str, cluster: Cluster) -> None:
    try:
        runtime.start(device_type)
    except (ValueError, RuntimeError, tf.errors.UnknownError) as error:
        reason = str(error).partition("\n")[0]
        raise ExecutionError(
            f"{cluster.name(cluster.process)} cannot start TensorFlow's runtime: {reason}"
        ) from error


def count(device_type: str, *, cpu_devices: int | None = None) -> int:
    """Returns how many devices of a type a mesh can have, in all processes.

    Args:
      device_type: the type.
      cpu_devices: how many of each process were asked for; an earlier experiment in this process
        may have made more.
    """
    if device_type == "CPU" and cpu_devices is not None:
        return int(cpu_devices * dtensor.num_clients())
    return dtensor.num_global_devices(device_type)


def make_mesh(shape: MeshShape, device_type: str, *, first: int = 0) -> Any:
    """Returns the DTensor mesh over some devices of a type, of each process equally many.

    Args:
      shape: its axes.
      device_type: the type.
      first: number of the first device; of several processes, 0.
    """
    processes = dtensor.num_clients()
    if shape.size % processes:
        raise ExecutionError(
            f"execution.mesh {str(shape)!r} has {shape.size} devices, which do not divide over the "
            f"{processes} processes"
        )
    local = shape.size // processes
    if processes > 1:
        names = None if device_type == "TPU" else [f"{device_type}:{i}" for i in range(local)]
        return dtensor.create_distributed_mesh(
            list(shape.axes), local_devices=names, device_type=device_type
        )
    names = [device.name for device in tf.config.list_logical_devices(device_type)]
    return dtensor.create_mesh(list(shape.axes), devices=names[first:][:local])
