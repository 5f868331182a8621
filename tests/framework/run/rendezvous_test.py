"""Strangers at the port of the rendezvous: none takes part, and none keeps a process out."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tekso.framework.cluster import Cluster, ClusterError, host_and_port
from tekso.framework.run import connection, rendezvous
from tekso.framework.run.cluster_token import Token
from tekso.framework.run.connection import Connection
from tekso.framework.run.rendezvous import Rendezvous

DEADLINE_S = 60.0
TOKEN = Token(b"the secret of this run", "a test")


def free_addresses(count: int) -> tuple[str, ...]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return tuple(f"127.0.0.1:{port}" for port in ports)


class Run:
    """Process 0 of a run of two, which waits in a thread."""

    def __init__(self) -> None:
        self.addresses = free_addresses(2)
        self.messages: list[str] = []
        self._pool = concurrent.futures.ThreadPoolExecutor(2)
        self.first = self._pool.submit(self.of(0).hold)
        self.connect().close()  # it listens

    def of(self, process: int, token: Token = TOKEN, timeout_s: float = DEADLINE_S) -> Rendezvous:
        cluster = Cluster(self.addresses, process)
        return Rendezvous(cluster, token=token, timeout_s=timeout_s, log=self.messages.append)

    def connect(self) -> socket.socket:
        end = time.monotonic() + DEADLINE_S
        while True:
            try:
                return socket.create_connection(host_and_port(self.addresses[0]), timeout=30.0)
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.01)

    def meets(self) -> None:
        """The real process 1 comes, and the two exchange a message."""
        assert not self.first.done()
        own = self.of(1).hold()[0]
        theirs = self.first.result(DEADLINE_S)[1]
        own.send({"from": 1})
        assert theirs.receive(timeout_s=DEADLINE_S) == {"from": 1}
        theirs.close()
        own.close()


@pytest.fixture
def run() -> Iterator[Run]:
    made = Run()
    yield made
    if not made.first.done():
        made.meets()


def ends(stranger: socket.socket) -> bytes:
    """Returns what a stranger receives until process 0 closes its connection."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while data := stranger.recv(2**16):
            received += data
    stranger.close()
    return received


def hello(process: Any, nonce: Any = "0" * 32) -> bytes:
    return json.dumps({"process": process, "nonce": nonce}).encode() + b"\n"


DEEP = b'{"process": ' + b"[" * 3000 + b"]" * 3000
GARBAGE = [
    b"\n",
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    bytes(range(256)) + b"\n",
    b"[]\n",
    b'"process"\n',
    b"{}\n",
    b'{"process": 1}\n',
    DEEP + b"}\n",
    b"[" * 4000 + b"\n",
    b"9" * 4000 + b"\n",
    b"x" * 10_000,  # without an end
    hello("x"),
    hello(True),
    hello(1.0),
    hello(None),
    hello([1]),
    hello(1, nonce=5),
    b'{"process": 1, "addresses": ["127.0.0.1:1"]}\n',
]


def test_garbage_is_ignored_and_reported_once_per_address(run: Run) -> None:
    for data in GARBAGE:
        stranger = run.connect()
        with contextlib.suppress(ConnectionError):
            stranger.sendall(data)
        assert ends(stranger) == b"", data[:60]
    run.meets()
    messages = [text for text in run.messages if "ignored a connection from 127.0.0.1" in text]
    assert len(messages) == 1 and "does not know its token" in messages[0]


@pytest.mark.parametrize("process", [1, 99, -1, 0, 2**70])
def test_stranger_without_the_token_takes_no_place(run: Run, process: int) -> None:
    stranger = Connection(run.connect())
    stranger.send({"process": process, "nonce": "n"})
    challenge = stranger.receive(timeout_s=DEADLINE_S)
    assert challenge is not None and set(challenge) == {"nonce", "proof"}
    # What process 0 proved is not accepted as a proof of the other side, nor is another secret.
    facts = [process, "n", challenge["nonce"]]
    guesses = [challenge["proof"], Token(b"wrong", "").proof("other", *facts, [*run.addresses])]
    proof = guesses[process % 2]
    stranger.send({"addresses": list(run.addresses), "proof": proof})
    assert stranger.receive(timeout_s=DEADLINE_S) is None
    stranger.close()
    run.meets()


def test_recorded_proof_is_not_accepted_again(run: Run) -> None:
    sent: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        send = Connection.send
        patch.setattr(Connection, "send", lambda s, m: (sent.append(m), send(s, m))[1])
        run.meets()
    again = Run()
    stranger = Connection(again.connect())
    for message in (m for m in sent if "process" in m or "addresses" in m):
        stranger.send(message)
    assert set(stranger.receive(timeout_s=DEADLINE_S) or {}) == {"nonce", "proof"}
    assert stranger.receive(timeout_s=DEADLINE_S) is None
    assert all(TOKEN.secret.decode() not in json.dumps(message) for message in sent)
    stranger.close()
    again.meets()


@pytest.mark.parametrize("process", [99, -1, 0])
def test_index_out_of_range_is_refused_with_the_range(run: Run, process: int) -> None:
    made = run.of(1)
    made._cluster = _Claiming(run.addresses, process)  # type: ignore[assignment]
    made._deadline = time.monotonic() + DEADLINE_S
    with pytest.raises(ClusterError, match=f"index {process}, but the others are 1 to 1"):
        made._go_to_first()
    run.meets()


class _Claiming:
    """A cluster with an index that it does not have."""

    source = "--cluster"

    def __init__(self, addresses: tuple[str, ...], process: int) -> None:
        self.addresses, self.process, self.size = addresses, process, len(addresses)


def test_three_hundred_silent_connections_do_not_keep_a_process_out(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_ANSWER_S", DEADLINE_S)
    silent = [run.connect() for _ in range(300)]
    begin = time.monotonic()
    run.meets()
    assert time.monotonic() - begin < rendezvous._ANSWER_S  # it does not wait for them to give up
    for stranger in silent:
        stranger.close()


def test_number_of_open_strangers_is_limited(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_ANSWER_S", DEADLINE_S)
    silent = [run.connect() for _ in range(rendezvous._GREETED + 8)]
    for stranger in silent[:8]:  # the oldest
        assert ends(stranger) == b""
    # The thread of a stranger that was cut off ends, too, before the time to answer is over.
    end = time.monotonic() + DEADLINE_S / 2
    while sum("_greet" in t.name for t in threading.enumerate()) > rendezvous._GREETED + 1:
        assert time.monotonic() < end
        time.sleep(0.01)
    for stranger in silent[8:]:
        stranger.close()


def test_stranger_that_sends_slowly_is_cut_off_in_time(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_ANSWER_S", 0.3)
    stranger = run.connect()
    stranger.settimeout(0.05)
    begin = time.monotonic()
    for _ in itertools.count():  # a byte at a time, each in time
        try:
            stranger.sendall(b"x")
            if not stranger.recv(1):
                break
        except TimeoutError:
            continue
        except ConnectionError:
            break
        assert time.monotonic() - begin < DEADLINE_S
    stranger.close()


def test_message_is_cut_off_at_its_longest_size_before_it_is_held() -> None:
    ours, theirs = socket.socketpair()
    receiver = Connection.__new__(Connection)
    receiver._socket, receiver._received = theirs, bytearray()

    def send() -> None:
        with contextlib.suppress(OSError):
            while True:
                ours.sendall(b"x" * 2**16)

    threading.Thread(target=send, daemon=True).start()
    assert receiver.receive(timeout_s=DEADLINE_S, longest=2**20) is None
    assert len(receiver._received) <= 2**20 + connection._BLOCK
    theirs.close()
    ours.close()


def test_program_without_the_token_at_the_address_of_process_0_is_not_joined() -> None:
    addresses = free_addresses(2)
    other = Token(b"the secret of another run", "another")
    messages: list[str] = []

    def hold(process: int, token: Token) -> Callable[[], Any]:
        cluster = Cluster(addresses, process)
        return Rendezvous(cluster, token=token, timeout_s=1.0, log=messages.append).hold

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(hold(0, TOKEN)), pool.submit(hold(1, other))]
        errors = [str(future.exception(DEADLINE_S)) for future in futures]
    assert "process 1" in errors[0] and "did not connect within 1 s" in errors[0]
    assert "has a different token; the token of this process is from another" in errors[1]


def test_only_the_named_address_is_listened_at(run: Run) -> None:
    port = host_and_port(run.addresses[0])[1]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=DEADLINE_S)
