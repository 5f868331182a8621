"""Devices of other processes: a server there, whose devices this process drives through gRPC.

TensorFlow's runtime has no authentication: whoever reaches the port runs what they like. Use it on
loopback or in a closed network.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

import tensorflow as tf

from tekso.framework.execution.base import ExecutionError

JOB = "worker"


def serve(address: str, *, threads: int) -> tf.distribute.Server:
    """Starts a server in this process, which runs what it is told until the process ends.

    Args:
      address: host:port to listen on.
      threads: ops that run at the same time.

    Raises:
      ExecutionError: the address is not one, or the port is taken.
    """
    split(address)
    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=1, inter_op_parallelism_threads=threads
    )
    try:
        return tf.distribute.Server(
            tf.train.ClusterSpec({JOB: [address]}),
            job_name=JOB,
            task_index=0,
            protocol="grpc",
            config=config,
        )
    except tf.errors.OpError as error:
        reason = str(error).partition("\n")[0]
        raise ExecutionError(f"cannot listen on {address}: {reason}") from error


def connect(addresses: Sequence[str], *, timeout_s: float = 60.0) -> list[str]:
    """Connects this process to servers; returns the names of their CPU or GPU devices.

    Raises:
      ExecutionError: one does not answer.
    """
    for address in addresses:
        _wait_for(address, timeout_s)
    cluster = tf.train.ClusterSpec({JOB: list(addresses)})
    try:
        tf.config.experimental_connect_to_cluster(cluster, job_name="client")
    except tf.errors.OpError as error:
        reason = str(error).partition("\n")[0]
        raise ExecutionError(f"cannot connect to {', '.join(addresses)}: {reason}") from error
    remote = [d.name for d in tf.config.list_logical_devices() if f"/job:{JOB}/" in d.name]
    return [n for n in remote if ":GPU:" in n] or [n for n in remote if ":CPU:" in n]


def lost(devices: Sequence[str]) -> list[str]:
    """Returns those devices of other processes that do not answer any more."""
    found = []
    for device in dict.fromkeys(devices):
        if f"/job:{JOB}/" not in device:
            continue
        try:
            with tf.device(device):
                tf.identity(tf.zeros([])).numpy()
        except tf.errors.OpError:
            found.append(device)
    return found


def split(address: str) -> tuple[str, int]:
    """Returns host and port.

    Raises:
      ExecutionError: it is not host:port.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ExecutionError(f"{address!r} is no address: want host:port, as localhost:7000")
    return host, int(port)


def _wait_for(address: str, timeout_s: float) -> None:
    place, end = split(address), time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection(place, timeout=max(end - time.monotonic(), 0.1)).close()
            return
        except OSError as error:
            if time.monotonic() >= end:
                raise ExecutionError(
                    f"no worker answers at {address} ({error.strerror or error}): start one there "
                    f"with tekso-worker --address={address}"
                ) from error
            time.sleep(min(0.2, max(end - time.monotonic(), 0.0)))
