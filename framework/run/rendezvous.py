"""Rendezvous: connects the processes of a run before TensorFlow starts.

Process 0 listens at its address. The others connect to it and send their process index. When all
are connected, process 0 stops listening, so that TensorFlow can use the address. If a process does
not connect in time, all processes report which one.

Both sides prove that they know the token of the run, without sending it:

    process p ── p, a random number ────────────────────────► process 0
              ◄─ another random number, a proof of all that ──
              ── its addresses, a proof of them and all that ►
              ◄─ accepted, or why not ────────────────────────

Other connections are ignored. At most a few of them are open at the same time, each for a limited
time and number of bytes, so that strangers do not keep a process of the run out.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from tekso.framework.cluster import Cluster, ClusterError
from tekso.framework.run.cluster_token import Token
from tekso.framework.run.connection import Connection, Message, listen

_ANSWER_S = 10.0  # time for a connected process to send its index
_AGAIN_S = 0.2
_REPORT_AFTER_S = 10.0
_FREE_S = 20.0  # time for an earlier run to release the port
_GREETED = 32  # connections that have not proven to be processes of this run; the oldest is closed
_STRANGERS = 16  # addresses of strangers that are reported
_HELLO_BYTES, _ADDRESSES_BYTES = 2**12, 2**22  # of a message that is not proven yet


class Rendezvous:
    """Connects the processes: `connections = Rendezvous(cluster, …).hold()`.

    Args:
      cluster: the processes.
      token: the secret that the processes share.
      timeout_s: how long to wait for all processes to connect.
      log: called with a line that says which processes are awaited.
    """

    def __init__(
        self, cluster: Cluster, *, token: Token, timeout_s: float, log: Callable[[str], None]
    ) -> None:
        self._cluster, self._timeout_s, self._log = cluster, timeout_s, log
        self._token = token
        self._deadline = self._report_at = 0.0  # set when it begins
        self._there: dict[int, Connection] = {}
        self._greeted: dict[Connection, str] = {}  # in order, with IP address
        self._strangers: set[str] = set()
        self._is_over = False
        self._changed = threading.Condition()

    def hold(self) -> dict[int, Connection]:
        """Returns connections by process: process 0 is connected to all others, they only to it.

        Raises:
          ClusterError: a process did not connect in time, or was started with other addresses.
        """
        self._deadline = time.monotonic() + self._timeout_s
        self._report_at = time.monotonic() + _REPORT_AFTER_S
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
                        f"{error.strerror}. If its port is in use, end the program that uses "
                        "it, or give another port; the host must be an address of this machine"
                    ) from None
            self._report_late(f"waiting until the port of {own} is free")
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
                self._report_late(f"waiting for {self._names(missing)}")
            connections = dict(self._there)
            self._is_over = True
            strangers = list(self._greeted)
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for stranger in strangers:
            stranger.end()
        for connection in connections.values():
            connection.send({"missing": missing})
        if missing:
            raise self._missing(missing)
        return connections

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                accepted, (ip, *_) = listener.accept()
            except OSError:
                if self._is_over:  # closed
                    return
                time.sleep(_AGAIN_S)  # no more files may be open
                continue
            connection = Connection(accepted)
            with self._changed:
                self._greeted[connection] = ip
                surplus = list(self._greeted)[:-_GREETED]
                for oldest in surplus:
                    del self._greeted[oldest]
            for oldest in surplus:
                oldest.end()
            threading.Thread(target=self._greet, args=(connection, ip), daemon=True).start()

    def _greet(self, connection: Connection, ip: str) -> None:
        """Adds a process to the group if it proves that it knows the token."""
        process, addresses = self._proven(connection)
        with self._changed:
            self._greeted.pop(connection, None)
            if process is None:
                self._ignore(ip)
                connection.close()
                return
            refusal = self._refusal(process, addresses)
            connection.send({"refused": refusal})
            if refusal is None:
                self._there[process] = connection
                self._changed.notify_all()
        if refusal is not None:
            self._log(f"rejected a process: {refusal}")
            connection.close()

    def _proven(self, connection: Connection) -> tuple[Any, Any]:
        """Returns index and addresses of a process of this run; (None, None) for a stranger."""
        hello = connection.receive(timeout_s=_ANSWER_S, longest=_HELLO_BYTES) or {}
        facts = [hello.get("process"), hello.get("nonce"), secrets.token_hex(16)]
        if type(facts[0]) is not int or type(facts[1]) is not str:
            return None, None
        connection.send({"nonce": facts[2], "proof": self._token.proof("process 0", *facts)})
        answer = connection.receive(timeout_s=_ANSWER_S, longest=_ADDRESSES_BYTES) or {}
        addresses = answer.get("addresses")
        if not self._token.proves(answer.get("proof"), "other", *facts, addresses):
            return None, None
        return facts[0], addresses

    def _ignore(self, ip: str) -> None:
        """Reports a stranger, once per address."""
        if ip not in self._strangers and len(self._strangers) < _STRANGERS and not self._is_over:
            self._strangers.add(ip)
            self._log(
                f"ignored a connection from {ip}: it is not a process of this run, or does not "
                f"know its token ({self._token.source})"
            )

    def _refusal(self, process: int, addresses: Any) -> str | None:
        given = tuple(map(str, addresses)) if isinstance(addresses, list) else ()
        if given != self._cluster.addresses:
            return (
                f"process {process} was started with the addresses {','.join(given)}, but process "
                f"0 with {','.join(self._cluster.addresses)}"
            )
        if not 0 < process < self._cluster.size:
            return (
                f"a process has the index {process}, but the others are 1 to "
                f"{self._cluster.size - 1}"
            )
        if self._is_over or process in self._there:
            return f"{self._name(process)} was started twice: give each process its own index"
        return None

    def _forget_who_left(self) -> None:
        for process, connection in list(self._there.items()):
            if connection.is_closed():
                del self._there[process]

    # --- the others ---

    def _go_to_first(self) -> Connection:
        reason, stranger = "no answer", ""
        while True:
            try:
                connection = Connection.to(self._cluster.addresses[0], timeout_s=_ANSWER_S)
            except OSError as error:
                reason = stranger or error.strerror or str(error)
            else:
                answer = self._introduce_to(connection)
                if answer is not None:
                    return self._wait_for_others(connection, answer)
                connection.close()
                reason = stranger = (
                    "the program that answers is not a process of this run, or has a different "
                    f"token; the token of this process is from {self._token.source}"
                )
            if time.monotonic() > self._deadline:
                raise self._missing([0], f" ({reason})")
            self._report_late(f"waiting for {self._name(0)}: {reason}")
            time.sleep(_AGAIN_S)

    def _introduce_to(self, connection: Connection) -> Message | None:
        facts = [self._cluster.process, secrets.token_hex(16)]
        connection.send({"process": facts[0], "nonce": facts[1]})
        answer = connection.receive(timeout_s=_ANSWER_S, longest=_HELLO_BYTES) or {}
        facts.append(answer.get("nonce"))
        if not self._token.proves(answer.get("proof"), "process 0", *facts):
            return None
        addresses = list(self._cluster.addresses)
        proof = self._token.proof("other", *facts, addresses)
        connection.send({"addresses": addresses, "proof": proof})
        answer = connection.receive(timeout_s=_ANSWER_S, longest=_ADDRESSES_BYTES) or {}
        return answer if "refused" in answer else None

    def _wait_for_others(self, connection: Connection, answer: Message) -> Connection:
        if answer["refused"] is not None:
            raise ClusterError(answer["refused"])
        found = connection.receive(timeout_s=max(1.0, self._timeout_s * 2))
        if found is None or not isinstance(found.get("missing"), list):
            raise ClusterError(f"{self._name(0)} was lost while it waited for the others")
        if found["missing"]:
            raise self._missing(found["missing"])
        return connection

    # --- waiting ---

    def _report_late(self, text: str) -> None:
        if time.monotonic() > self._report_at:
            self._log(text)
            self._report_at = time.monotonic() + 3 * _REPORT_AFTER_S

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
