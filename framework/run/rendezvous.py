"""Rendezvous: connects the processes of a run before TensorFlow starts.

Process 0 listens at its address. The others connect to it and send their process index. When all
are connected, process 0 stops listening, so that TensorFlow can use the address. If a process does
not connect in time, all processes report which one.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from tekso.framework.cluster import Cluster, ClusterError
from tekso.framework.run.connection import Connection, Message, listen

_ANSWER_S = 10.0  # time for a connected process to send its index
_AGAIN_S = 0.2
_TELL_AFTER_S = 10.0
_FREE_S = 20.0  # time for an earlier run to release the port


class Rendezvous:
    """Connects the processes: `connections = Rendezvous(cluster, …).hold()`.

    Args:
      cluster: the processes.
      timeout_s: how long to wait for all processes to connect.
      tell: called with a line that says which processes are awaited.
    """

    def __init__(self, cluster: Cluster, *, timeout_s: float, tell: Callable[[str], None]) -> None:
        self._cluster, self._timeout_s, self._tell = cluster, timeout_s, tell
        self._deadline = self._tell_at = 0.0  # set when it begins
        self._there: dict[int, Connection] = {}
        self._is_over = False
        self._changed = threading.Condition()

    def hold(self) -> dict[int, Connection]:
        """Returns connections by process: process 0 is connected to all others, they only to it.

        Raises:
          ClusterError: a process did not connect in time, or was started with other addresses.
        """
        self._deadline = time.monotonic() + self._timeout_s
        self._tell_at = time.monotonic() + _TELL_AFTER_S
        listener = self._listen()
        if self._cluster.process == 0:
            return self._receive_all(listener)
        listener.close()  # the address is free, so TensorFlow can use it
        return {0: self._go_to_first()}

    def _listen(self) -> socket.socket:
        own = self._cluster.address
        deadline = time.monotonic() + _FREE_S
        while True:
            try:
                return listen(own)
            except OSError as error:
                if time.monotonic() > deadline:
                    raise ClusterError(
                        f"{self._name(self._cluster.process)} cannot listen at its address: "
                        f"{error.strerror}. If its port is in use, end the program that uses it, or "
                        "give another port; the host must be a name or an address of this machine"
                    ) from None
            self._tell_late(f"waiting until the port of {own} is free")
            time.sleep(_AGAIN_S)

    # --- process 0 ---

    def _receive_all(self, listener: socket.socket) -> dict[int, Connection]:
        others = range(1, self._cluster.size)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        with self._changed:
            while missing := [p for p in others if p not in self._there]:
                self._changed.wait(_AGAIN_S)
                self._forget_who_left()
                if time.monotonic() > self._deadline:
                    break
                self._tell_late(f"waiting for {self._names(missing)}")
            connections = dict(self._there)
            self._is_over = True
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for connection in connections.values():
            connection.send({"missing": missing})
        if missing:
            raise self._missing(missing)
        return connections

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                accepted, _ = listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._greet, args=(accepted,), daemon=True).start()

    def _greet(self, accepted: socket.socket) -> None:
        connection = Connection(accepted)
        hello = connection.receive(timeout_s=_ANSWER_S)
        if hello is None or "process" not in hello:  # not a process of a run
            connection.close()
            return
        with self._changed:
            refusal = self._refusal(hello)
            connection.send({"refused": refusal})
            if refusal is None:
                self._there[hello["process"]] = connection
                self._changed.notify_all()
        if refusal is not None:
            self._tell(f"rejected a process: {refusal}")
            connection.close()

    def _refusal(self, hello: Message) -> str | None:
        process, addresses = hello["process"], tuple(hello["addresses"])
        if addresses != self._cluster.addresses:
            return (
                f"process {process} was started with other addresses than process 0: "
                f"{','.join(addresses)} instead of {','.join(self._cluster.addresses)}"
            )
        if self._is_over or process == 0 or process in self._there:
            return f"{self._name(process)} was started twice: give each process its own index"
        return None

    def _forget_who_left(self) -> None:
        for process, connection in list(self._there.items()):
            if connection.is_closed():
                del self._there[process]

    # --- the others ---

    def _go_to_first(self) -> Connection:
        reason = "no answer"
        while True:
            try:
                connection = Connection.to(self._cluster.addresses[0], timeout_s=_ANSWER_S)
            except OSError as error:
                reason = error.strerror or str(error)
            else:
                answer = self._introduce_to(connection)
                if answer is not None:
                    return self._wait_for_others(connection, answer)
                connection.close()
                reason = "the program that answers is not a process of this run"
            if time.monotonic() > self._deadline:
                raise self._missing([0], f" ({reason})")
            self._tell_late(f"waiting for {self._name(0)}: {reason}")
            time.sleep(_AGAIN_S)

    def _introduce_to(self, connection: Connection) -> Message | None:
        addresses = list(self._cluster.addresses)
        connection.send({"process": self._cluster.process, "addresses": addresses})
        answer = connection.receive(timeout_s=_ANSWER_S)
        return answer if answer is not None and "refused" in answer else None

    def _wait_for_others(self, connection: Connection, answer: Message) -> Connection:
        if answer["refused"] is not None:
            raise ClusterError(answer["refused"])
        found = connection.receive(timeout_s=max(1.0, self._timeout_s * 2))
        if found is None:
            raise ClusterError(f"{self._name(0)} was lost while it waited for the others")
        if found["missing"]:
            raise self._missing(found["missing"])
        return connection

    # --- waiting ---

    def _tell_late(self, text: str) -> None:
        if time.monotonic() > self._tell_at:
            self._tell(text)
            self._tell_at = time.monotonic() + 3 * _TELL_AFTER_S

    def _missing(self, missing: Iterable[int], why: str = "") -> ClusterError:
        return ClusterError(
            f"{self._names(missing)} did not connect within {self._timeout_s:g} s{why}: start "
            f"every process with the same addresses (here from {self._cluster.source}), or wait "
            "longer with --cluster_timeout_s"
        )

    def _names(self, processes: Iterable[int]) -> str:
        return ", ".join(map(self._name, processes))

    def _name(self, process: Any) -> str:
        return self._cluster.name(process)
