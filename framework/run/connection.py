"""A connection between two processes: JSON objects over a socket, one per line."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
from typing import Any

from tekso.framework.execution.cluster import host_and_port

Message = dict[str, Any]
_LONGEST = 64 * 2**20  # bytes of a message
_KEEP_ALIVE = {
    "TCP_KEEPIDLE": 10,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 4,
    "TCP_USER_TIMEOUT": 30_000,
}


class Connection:
    """Sends messages from any thread, and receives messages in one thread.

    The connection breaks when the other process ends, or half a minute after its machine fails.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE.items():
            if hasattr(socket, name):  # options that only Linux has
                self._socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._file = connected.makefile("rb")
        self._sending = threading.Lock()

    @classmethod
    def to(cls, address: str, *, timeout_s: float) -> Connection:
        """Connects to an address; raises OSError if no process answers."""
        return cls(socket.create_connection(host_and_port(address), timeout=timeout_s))

    def send(self, message: Message) -> None:
        """Sends a message; drops it if the other process is gone, which `receive` then reports."""
        data = json.dumps(message).encode() + b"\n"
        with self._sending, contextlib.suppress(OSError):
            self._socket.sendall(data)

    def receive(self, *, timeout_s: float | None = None) -> Message | None:
        """Returns the next message; None if the connection ended or the message is invalid."""
        try:
            self._socket.settimeout(timeout_s)
            message = json.loads(self._file.readline(_LONGEST))
        except (OSError, ValueError):
            return None
        return message if isinstance(message, dict) else None

    def is_closed(self) -> bool:
        """Whether the other side closed the connection and all its messages were received."""
        try:
            readable, _, _ = select.select([self._socket], [], [], 0)
            return bool(readable) and not self._socket.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def close(self) -> None:
        """Closes the connection; messages already sent still arrive."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._file.close()
            self._socket.close()


def listen(port: int) -> socket.socket:
    """Returns a socket that accepts connections at a port on all addresses of this machine.

    Raises:
      OSError: the port is in use.
    """
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))
