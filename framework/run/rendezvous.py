"""Rendezvous: the processes of a run find each other before TensorFlow starts.

The first process listens at its address, the others connect to it and say who they are. When all
are there, it stops listening, so that TensorFlow can take the address. Who does not come in time is
named, to all.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from tekso.framework.execution.mesh.cluster import Cluster, ClusterError, host_and_port
from tekso.framework.run.connection import Connection, Message, listen

_ANSWER_S = 10.0  # for who connects to say who it is
_AGAIN_S = 0.2
_TELL_AFTER_S = 10.0
_FREE_S = 20.0  # for an earlier run to leave the port


class Rendezvous:
    """Brings the processes together: `connections = Rendezvous(cluster, …).hold()`.

    Args:
      cluster: who takes part.
      timeout_s: how long to wait for all to come.
      tell: takes a line about who is waited for.
    """

    def __init__(self, cluster: Cluster, *, timeout_s: float, tell: Callable[[str], None]) -> None:
        self._cluster, self._timeout_s, self._tell = cluster, timeout_s, tell
        self._deadline = self._tell_at = 0.0  # set when it begins
        self._there: dict[int, Connection] = {}
        self._is_over = False
        self._changed = threading.Condition()

    def hold(self) -> dict[int, Connection]:
        """Returns connections by process: the first has one to every other, they have one to it.

        Raises:
          ClusterError: not all came in time, or they do not agree on who takes part.
        """
        self._deadline = time.monotonic() + self._timeout_s
        self._tell_at = time.monotonic() + _TELL_AFTER_S
        listener = self._listen()
        if self._cluster.process == 0:
            return self._receive_all(listener)
        listener.close()  # the address is free: TensorFlow will take it
        return {0: self._go_to_first()}

    def _listen(self) -> socket.socket:
        own = self._cluster.addresses[self._cluster.process]
        deadline = time.monotonic() + _FREE_S
        while True:
            try:
                return listen(host_and_port(own)[1])
            except OSError as error:
                if time.monotonic() > deadline:
                    raise ClusterError(
                        f"{self._name(self._cluster.process)} cannot listen at its port: "
                        f"{error.strerror}. End what uses it, or give another port"
                    ) from None
            self._tell_late(f"waiting until the port of {own} is free")
            time.sleep(_AGAIN_S)

    # --- the first process ---

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
        if hello is None or "process" not in hello:  # somebody who means something else
            connection.close()
            return
        with self._changed:
            refusal = self._refusal(hello)
            connection.send({"refused": refusal})
            if refusal is None:
                self._there[hello["process"]] = connection
                self._changed.notify_all()
        if refusal is not None:
            self._tell(f"refused a process: {refusal}")
            connection.close()

    def _refusal(self, hello: Message) -> str | None:
        process, addresses = hello["process"], tuple(hello["addresses"])
        if addresses != self._cluster.addresses:
            return (
                f"process {process} was told of other processes than process 0: "
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
                reason = "what answers there is no process of this run"
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
            f"{self._names(missing)} did not come within {self._timeout_s:g} s{why}: start every "
            f"process with the same addresses (here from {self._cluster.source}), or wait longer "
            "by --cluster_timeout_s"
        )

    def _names(self, processes: Iterable[int]) -> str:
        return ", ".join(map(self._name, processes))

    def _name(self, process: Any) -> str:
        return self._cluster.name(process)
