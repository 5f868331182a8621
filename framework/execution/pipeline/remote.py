"""Devices of other processes: each process runs a server, and this process drives it over gRPC.

TensorFlow's runtime has no authentication: anyone who can connect to the port can run any code. So
a worker accepts connections only at its address, and the process that drives it only at loopback.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

import tensorflow as tf

from tekso.framework import port_filter
from tekso.framework.commands import typed
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.exit_codes import ExitCode

JOB = "worker"
_DRIVER = "client"
# Both sides of a connection begin with these bytes (RFC 9113, section 3.4). A SETTINGS frame has
# type 4.
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HTTP2_SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


class NoWorkerError(ExecutionError):
    """A worker does not answer."""

    exit_code = ExitCode.PROCESS_LOST


def serve(address: str, *, threads: int, or_open: bool = False) -> tf.distribute.Server:
    """Starts a server in this process, which executes requests until the process ends.

    Args:
      address: host:port to listen on.
      threads: number of ops that run at the same time.
      or_open: whether it may listen at all addresses if this system cannot limit the port to one.

    Raises:
      ExecutionError: the address is not host:port or not this machine's, or the port is taken.
    """
    split(address)
    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=1, inter_op_parallelism_threads=threads
    )
    try:
        with port_filter.limited_to(address, or_open=or_open):
            return tf.distribute.Server(
                tf.train.ClusterSpec({JOB: [address]}),
                job_name=JOB,
                task_index=0,
                protocol="grpc",
                config=config,
            )
    except (OSError, RuntimeError, ValueError, tf.errors.OpError) as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise ExecutionError(f"cannot listen on {address}: {reason}") from error


def connect(addresses: Sequence[str], *, timeout_s: float = 60.0) -> list[str]:
    """Connects this process to servers; returns the names of their CPU or GPU devices.

    Args:
      addresses: host:port of each server.
      timeout_s: time limit for each server to answer.

    Raises:
      ExecutionError: a server does not answer, or is not a TensorFlow server.
    """
    for address in addresses:
        wait_for(address, timeout_s)
    own = f"localhost:{port_filter.free_port()}"  # TensorFlow starts a server here too
    cluster = tf.train.ClusterSpec({JOB: list(addresses), _DRIVER: [own]})
    try:
        with port_filter.limited_to(own):
            tf.config.experimental_connect_to_cluster(cluster, job_name=_DRIVER)
            found = tf.config.list_logical_devices()  # starts the server
    except (OSError, RuntimeError, tf.errors.OpError) as error:
        reason = str(error).partition("\n")[0]
        raise ExecutionError(f"cannot connect to {', '.join(addresses)}: {reason}") from error
    remote = [d.name for d in found if f"/job:{JOB}/" in d.name]
    return [n for n in remote if ":GPU:" in n] or [n for n in remote if ":CPU:" in n]


def lost(devices: Sequence[str]) -> list[str]:
    """Returns the devices of other processes that no longer answer."""
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
        raise ExecutionError(
            f"{address!r} is not an address: expected host:port, such as localhost:7000"
        )
    return host, int(port)


def wait_for(address: str, timeout_s: float) -> None:
    """Waits until a worker answers at an address.

    Raises:
      NoWorkerError: none answers within `timeout_s` seconds.
    """
    endpoint, end = split(address), time.monotonic() + timeout_s
    while True:
        try:
            with socket.create_connection(endpoint, timeout=_left(end)) as connection:
                _check_answer(connection, address, end)
            return
        except OSError as error:
            if time.monotonic() >= end:
                raise NoWorkerError(
                    f"no worker answers at {address} ({error.strerror or error}): start one there "
                    f"with {typed('tekso-worker')} --address={address}"
                ) from error
            time.sleep(min(0.2, max(end - time.monotonic(), 0.0)))


def answers(address: str, timeout_s: float) -> bool:
    """Returns whether a worker listens at an address and is not suspended."""
    end = time.monotonic() + timeout_s
    try:
        with socket.create_connection(split(address), timeout=timeout_s) as connection:
            _check_answer(connection, address, end)
    except (OSError, ExecutionError):
        return False
    return True


def _check_answer(connection: socket.socket, address: str, end: float) -> None:
    """Rejects a server that does not speak gRPC: TensorFlow would wait for it forever."""
    connection.sendall(_HTTP2_PREFACE + _HTTP2_SETTINGS)
    answer, said = b"", "sends nothing"
    try:
        while len(answer) < len(_HTTP2_SETTINGS):
            connection.settimeout(_left(end))
            more = connection.recv(len(_HTTP2_SETTINGS) - len(answer))
            if not more:
                break
            answer += more
    except TimeoutError:
        pass
    if len(answer) == len(_HTTP2_SETTINGS) and answer[3] == _HTTP2_SETTINGS[3]:
        return
    if answer:
        said = f"answers {answer!r}"
    raise ExecutionError(
        f"the program that listens at {address} is not a tekso-worker: it accepts a connection and "
        f"{said}; start a worker on a free port, and give its address"
    )


def _left(end: float) -> float:
    """Returns the seconds until `end`, a time of `time.monotonic`, but at least 0.1."""
    return max(end - time.monotonic(), 0.1)
