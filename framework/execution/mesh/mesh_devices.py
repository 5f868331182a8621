"""The devices of a mesh: logical devices of the CPU, GPUs, or the cores of a TPU.

With several processes, the mesh spans the devices of all of them, in the order of the processes.
Each process sets up its own devices, and TensorFlow's runtime (gRPC) connects the processes.

The code for TPUs and GPUs was never run on one; docs/tpu.md describes what was tested instead.
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
from tekso.framework.execution.workarounds import compiler

LOCAL_TPU = "local"
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
      tpu: "local": uses the TPU of this machine; None: no TPU.
      cpu_devices: number of logical CPU devices to create on this machine; None: as `size` says.
      cluster: the processes that the mesh spans; all must call this at the same time.
    """
    compiler.choose_passes(tpu=bool(tpu))
    if cluster is not None:
        runtime.describe(cluster)
    if tpu:
        _start_tpu(tpu, cluster)
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


def _start_tpu(tpu: str, cluster: Cluster | None) -> None:
    """Initializes the TPU cores of this machine."""
    if tpu != LOCAL_TPU:
        raise ExecutionError(
            f"--tpu={tpu}: a mesh uses the TPU of the machine on which the program runs, and "
            f"cannot connect to another one; start the program on the TPU VM with "
            f"--tpu={LOCAL_TPU}"
        )
    if cluster is not None:
        # A checkpoint is divided over processes whose devices follow each other in the mesh. The
        # order of the cores of a slice is another one.
        raise ExecutionError(
            f"--tpu: a mesh of TPU cores belongs to one process, but this run has {cluster.size}: "
            "set --cluster=none, and use the TPU of one machine"
        )
    try:
        dtensor.initialize_accelerator_system("TPU")
    except (ValueError, tf.errors.OpError) as error:
        reason = str(error).partition("\n")[0]
        raise ExecutionError(f"cannot connect to the TPU {tpu!r}: {reason}") from error


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
    return int(dtensor.num_global_devices(device_type))


def make_mesh(shape: MeshShape, device_type: str, *, first: int = 0) -> Any:
    """Returns a DTensor mesh on some devices of a type, the same number in each process.

    Args:
      shape: axes of the mesh.
      device_type: the type; a mesh of TPU cores has all of them.
      first: index of the first device; 0 if there are several processes.

    Raises:
      ExecutionError: the devices do not divide evenly over the processes, or the mesh does not
        have all cores of the TPU.
    """
    if device_type == "TPU":
        return _tpu_mesh(shape)
    processes = dtensor.num_clients()
    if shape.size % processes:
        raise ExecutionError(
            f"execution.mesh {str(shape)!r} has {shape.size} devices, which do not divide evenly "
            f"over the {processes} processes"
        )
    local = shape.size // processes
    if processes > 1:
        names = [f"{device_type}:{i}" for i in range(local)]
        return dtensor.create_distributed_mesh(
            list(shape.axes), local_devices=names, device_type=device_type
        )
    names = [device.name for device in tf.config.list_logical_devices(device_type)]
    return dtensor.create_mesh(list(shape.axes), devices=names[first:][:local])


def _tpu_mesh(shape: MeshShape) -> Any:
    """Returns a mesh of all cores of a TPU slice, in an order that suits its links.

    The cores of all axes but the first form rings of neighbours in the slice, and the cores of the
    first axis form rings across them. A slice is a torus: its opposite borders are connected. For
    "data:4;model:4" on 4x4 chips, each row is a ring of `model`, each column a ring of `data`.
    """
    cores = dtensor.num_global_devices("TPU")
    if shape.size != cores:
        raise ExecutionError(
            f"execution.mesh {str(shape)!r} has {shape.size} devices, but a mesh on a TPU has to "
            f"use all cores, and there are {cores}"
        )
    names, sizes = (list(part) for part in zip(*shape.axes, strict=True))
    # The runtime looks up the order of the cores by the name of the mesh.
    name = "_".join(f"{axis}{size}" for axis, size in shape.axes)
    return dtensor.create_tpu_mesh(names, sizes, name, build_ring_across_rings=True)
