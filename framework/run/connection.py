"""A connection between two processes: JSON objects over a socket, one per line."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
import time
from typing import Any

from tekso.framework import exposure
from tekso.framework.cluster import host_and_port

Message = dict[str, Any]
_LONGEST = 64 * 2**20  # bytes of a message
_BLOCK = 2**16  # bytes that are received together
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
        self._received = bytearray()  # the beginning of the next message
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

    def receive(self, *, timeout_s: float | None = None, longest: int = _LONGEST) -> Message | None:
        """Returns the next message; None if the connection ended or the message is invalid.

        Args:
          timeout_s: limit for the whole message.
          longest: number of bytes after which a message is invalid; no more are held in memory.
        """
        try:
            line = self._line(timeout_s, longest)
            message = None if line is None else json.loads(line)
        except (OSError, ValueError, RecursionError):
            return None
        return message if isinstance(message, dict) else None

    def _line(self, timeout_s: float | None, longest: int) -> bytes | None:
        end = None if timeout_s is None else time.monotonic() + timeout_s
        searched = 0
        while (at := self._received.find(b"\n", searched)) < 0:
            searched = len(self._received)
            if searched > longest:
                return None
            self._socket.settimeout(None if end is None else max(end - time.monotonic(), 0.001))
            data = self._socket.recv(_BLOCK)
            if not data:
                return None
            self._received += data
        self._socket.settimeout(None)
        line = bytes(self._received[:at])
        del self._received[: at + 1]
        return line if len(line) <= longest else None

    def is_closed(self) -> bool:
        """Whether the other side closed the connection and all its messages were received."""
        try:
            readable, _, _ = select.select([self._socket], [], [], 0)
            return bool(readable) and not self._socket.recv(1, socket.MSG_PEEK)
        except (OSError, ValueError):  # ValueError: closed on this side
            return True

    def end(self) -> None:
        """Ends the connection for a thread that receives, which then gets None and has to close it.

        If another thread closed it, the next connection could get its file descriptor before the
        receiving thread wakes, which would then wait for that connection until its time is over.
        """
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the connection; messages already sent still arrive."""
        self.end()
        with contextlib.suppress(OSError):
            self._socket.close()


def listen(address: str) -> socket.socket:
    """Returns a socket that accepts connections at an address of this machine, and only there.

    Raises:
      OSError: the port is in use, or the address is not one of this machine.
      ExposureError: the host has no IP address.
    """
    host, port = host_and_port(address)
    *others, last = exposure.ips(host)
    for ip in others:  # a name may have addresses that this machine does not have, such as ::1
        with contextlib.suppress(OSError):
            return _listen(ip, port)
    return _listen(last, port)


def _listen(ip: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    return socket.create_server((ip, port), family=family)
