"""The processes of a run meet, agree and lose each other; here each is a thread."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tensorflow as tf

from tekso.framework import watchdog
from tekso.framework.cluster import Cluster, ClusterError
from tekso.framework.exit_codes import ExitCode
from tekso.framework.run import connection, process_group, rendezvous
from tekso.framework.run.cluster_token import Token
from tekso.framework.run.process_group import ConnectedProcessGroup, LostProcessError, ProcessGroup

DEADLINE_S = 60.0
TOKEN = Token(b"a secret of 16 characters", "a test")


@pytest.fixture(autouse=True)
def _no_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "_exit", lambda code: None)


@pytest.fixture
def addresses() -> Iterator[tuple[str, ...]]:
    yield tuple(f"localhost:{port}" for port in free_ports(3))


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def of(addresses: tuple[str, ...], process: int, **options: Any) -> ConnectedProcessGroup:
    options = {"timeout_s": DEADLINE_S, "log": print, "last_words": print, **options}
    options.setdefault("token", TOKEN)
    return ConnectedProcessGroup(Cluster(addresses, process), **options)


def break_off(process: ConnectedProcessGroup) -> None:
    """Ends a process as `kill -9` does, as far as the others see."""
    process._closing.set()
    for broken in process._connections.values():
        broken.close()


def in_threads(*actions: Callable[[], Any]) -> list[Any]:
    """Returns what each returned, or raised."""
    with concurrent.futures.ThreadPoolExecutor(len(actions)) as pool:
        futures = [pool.submit(action) for action in actions]
        errors = [future.exception(timeout=DEADLINE_S) for future in futures]
        return [e if e is not None else f.result() for e, f in zip(errors, futures, strict=True)]


def test_one_process_agrees_with_itself() -> None:
    alone = ProcessGroup()
    assert alone.is_first
    assert alone.gather({"x": 1}) == [{"x": 1}]
    assert alone.from_first(2) == 2


def test_processes_gather_values_in_their_order(addresses: tuple[str, ...]) -> None:
    def run(process: int) -> Any:
        with of(addresses, process) as found:
            rounds = [found.gather([process, round]) for round in range(50)]
            return rounds, found.from_first(f"of {process}")

    for rounds, first in in_threads(*(lambda p=p: run(p) for p in (1, 0, 2))):
        assert rounds == [[[p, round] for p in range(3)] for round in range(50)]
        assert first == "of 0"


def test_exchanges_of_two_threads_are_apart(addresses: tuple[str, ...]) -> None:
    def run(process: int) -> Any:
        with of(addresses, process) as found:
            rounds = [f"{process}, {round}" for round in range(50)]

            def gather(exchange: str) -> list[Any]:
                return [found.gather(exchange + text, exchange=exchange) for text in rounds]

            return in_threads(lambda: gather(""), lambda: gather("files "))

    for both in in_threads(*(lambda p=p: run(p) for p in range(3))):
        for exchange, found in zip(("", "files "), both, strict=True):
            assert found == [[f"{exchange}{p}, {r}" for p in range(3)] for r in range(50)]


def test_first_process_goes_before_the_others(addresses: tuple[str, ...]) -> None:
    order: list[int] = []

    def run(process: int) -> None:
        with of(addresses[:2], process) as found, found.first_before_others():
            order.append(process)

    assert in_threads(lambda: run(1), lambda: run(0)) == [None, None]
    assert order == [0, 1]


def test_process_whose_connection_breaks_is_named_to_all(addresses: tuple[str, ...]) -> None:
    def stays(process: int) -> None:
        with of(addresses, process) as found:
            found.gather(None)
            found.gather(None)

    def is_killed() -> None:
        found = of(addresses, 1).__enter__()
        found.gather(None)
        break_off(found)

    lost = in_threads(lambda: stays(0), is_killed, lambda: stays(2))
    for error in (lost[0], lost[2]):
        assert isinstance(error, LostProcessError)
        assert f"process 1 ({addresses[1]}) was lost" in str(error)


def test_lost_first_process_is_named(addresses: tuple[str, ...]) -> None:
    def stays() -> None:
        with of(addresses[:2], 1) as found:
            found.gather(None)

    def is_killed() -> None:
        found = of(addresses[:2], 0).__enter__()
        break_off(found)

    error = in_threads(stays, is_killed)[0]
    assert str(error).startswith(f"process 0 ({addresses[0]}) was lost")


def test_process_that_others_wait_for_is_reported(
    addresses: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_group, "_REPORT_AFTER_S", 0.05)
    messages: list[str] = []
    is_reported = threading.Event()

    def log(text: str) -> None:
        messages.append(text)
        is_reported.set()

    def waits() -> Any:
        with of(addresses[:2], 0, log=log) as found:
            return found.gather(0)

    def is_slow() -> Any:
        with of(addresses[:2], 1) as found:
            assert is_reported.wait(DEADLINE_S)
            return found.gather(1)

    assert in_threads(waits, is_slow) == [[0, 1], [0, 1]]
    assert messages[0] == f"waiting for process 1 ({addresses[1]})"


def test_error_of_one_process_ends_the_others_with_its_text(addresses: tuple[str, ...]) -> None:
    def run(process: int) -> None:
        with of(addresses, process) as found:
            found.gather(None)
            if process == 2:
                raise OSError("no room\nand more")
            found.gather(None)

    errors = in_threads(*(lambda p=p: run(p) for p in range(3)))
    assert str(errors[2]) == "no room\nand more"
    for error in errors[:2]:
        assert isinstance(error, LostProcessError)
        assert str(error) == f"process 2 ({addresses[2]}) ended with an error: no room"


def test_others_hear_of_a_loss_before_this_process_can_take_note_and_leave(
    addresses: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def loses() -> None:
        with of(addresses[:2], 0) as found:
            notify, send = found._changed.notify_all, found._connections[1].send

            def noted() -> None:
                order.append("noted")
                notify()

            def sent(message: Any) -> None:
                order.append(message["kind"])
                send(message)

            monkeypatch.setattr(found._changed, "notify_all", noted)
            monkeypatch.setattr(found._connections[1], "send", sent)
            found._lose(1, "is away")
            found.gather(None)

    def hears() -> None:
        with of(addresses[:2], 1) as found:
            found.gather(None)

    assert all(isinstance(error, LostProcessError) for error in in_threads(loses, hears))
    assert order[:2] == ["lost", "noted"]


def test_error_of_tensorflow_is_explained_by_the_loss(addresses: tuple[str, ...]) -> None:
    broke = threading.Event()

    def stays() -> None:
        with of(addresses[:2], 0) as found, found.explaining():
            broke.wait(DEADLINE_S)
            raise tf.errors.UnavailableError(None, None, "Connection reset by peer")

    def is_killed() -> None:
        found = of(addresses[:2], 1).__enter__()
        break_off(found)
        broke.set()

    error = in_threads(stays, is_killed)[0]
    assert isinstance(error, LostProcessError)
    assert f"process 1 ({addresses[1]}) was lost" in str(error)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            "Collective ops is aborted by: Error reported from /job:worker/task:1: The following "
            "tasks are unhealthy (stopped sending heartbeats):\n/job:worker/replica:0/task:1\n",
            "process 1 (",
        ),
        (
            "recvmsg:Connection reset by peer\nAdditional GRPC error information from remote "
            "target /job:worker/replica:0/task:1 while calling /tensorflow.WorkerService/RecvBuf",
            "process 1 (",
        ),
        ("something else\nmore", "a process was lost; TensorFlow reports: something else"),
    ],
)
def test_task_that_tensorflow_names_is_reported(
    addresses: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, message: str, expected: str
) -> None:
    monkeypatch.setattr(process_group, "_TENSORFLOW_S", 0.1)
    done = threading.Event()

    def stays() -> None:
        try:
            with of(addresses[:2], 0) as found, found.explaining():
                raise tf.errors.UnavailableError(None, None, message)
        finally:
            done.set()

    def hangs() -> None:
        with of(addresses[:2], 1):
            done.wait(DEADLINE_S)

    error = in_threads(stays, hangs)[0]
    assert isinstance(error, LostProcessError)
    assert str(error).startswith(expected)


def test_hanging_process_is_ended(
    addresses: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    exits: list[int] = []
    ended = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda code: (exits.append(code), ended.set()))
    monkeypatch.setattr(process_group, "_GRACE_S", 0.1)
    words: list[str] = []

    def hangs() -> None:
        with of(addresses[:2], 0, last_words=words.append) as found:
            # That another thread notices the loss does not save this one.
            (error,) = in_threads(lambda: found.gather(None, exchange="of another thread"))
            assert isinstance(error, LostProcessError)
            assert ended.wait(DEADLINE_S)
            found.gather(None)

    def is_killed() -> None:
        found = of(addresses[:2], 1).__enter__()
        break_off(found)

    in_threads(hangs, is_killed)
    assert exits == [ExitCode.PROCESS_LOST]
    assert f"process 1 ({addresses[1]}) was lost" in words[0]


# --- rendezvous ---


def test_missing_process_is_named_to_those_who_came(addresses: tuple[str, ...]) -> None:
    def run(process: int) -> None:
        with of(addresses, process, timeout_s=3.0):
            raise AssertionError("met")

    for error in in_threads(lambda: run(0), lambda: run(2)):
        assert isinstance(error, ClusterError)
        assert f"process 1 ({addresses[1]}) did not connect within 3 s" in str(error)


def test_missing_first_process_is_named(addresses: tuple[str, ...]) -> None:
    with (
        pytest.raises(
            ClusterError, match=r"process 0 \(localhost:\d+\) did not connect within 1 s"
        ),
        of(addresses, 1, timeout_s=1.0),
    ):
        raise AssertionError("met")


def test_who_is_waited_for_is_reported(
    addresses: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_REPORT_AFTER_S", 0.1)
    messages: list[str] = []
    with pytest.raises(ClusterError), of(addresses, 0, timeout_s=1.0, log=messages.append):
        raise AssertionError("met")
    assert messages[0] == f"waiting for process 1 ({addresses[1]}), process 2 ({addresses[2]})"


def test_process_of_another_cluster_is_refused(addresses: tuple[str, ...]) -> None:
    def run(process: int, count: int) -> None:
        with of(addresses[:count], process, timeout_s=3.0):
            raise AssertionError("met")

    first, other = in_threads(lambda: run(0, 3), lambda: run(1, 2))
    assert "did not connect" in str(first)
    assert "process 1 was started with the addresses " in str(other)


def test_index_given_twice_is_refused(addresses: tuple[str, ...]) -> None:
    def run(process: int) -> None:
        with of(addresses, process, timeout_s=3.0):
            raise AssertionError("met")

    errors = in_threads(lambda: run(0), lambda: run(1), lambda: run(1))
    messages = sorted(str(e) for e in errors[1:])
    assert any("was started twice" in text for text in messages)


def test_strangers_at_the_port_do_no_harm(addresses: tuple[str, ...]) -> None:
    stop = threading.Event()

    def knock() -> None:
        while not stop.is_set():
            try:
                stranger = connection.Connection.to(addresses[0], timeout_s=1.0)
            except OSError:
                continue
            stranger._socket.sendall(b"PRI * HTTP/2.0\r\n\r\n")
            stranger.close()

    def run(process: int) -> int:
        with of(addresses[:2], process) as found:
            stop.set()
            return len(found.gather(None))

    assert in_threads(knock, lambda: run(0), lambda: run(1))[1:] == [2, 2]


def test_port_in_use_is_reported(
    addresses: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_FREE_S", 0.1)
    taken = socket.create_server(("", 0))
    own = (f"localhost:{taken.getsockname()[1]}", *addresses)
    with (
        pytest.raises(ClusterError, match="cannot listen at its address: Address already in use"),
        of(own, 0, timeout_s=1.0),
    ):
        raise AssertionError("met")
    taken.close()


# --- waits ---


def test_process_that_is_alive_is_waited_for_and_a_frozen_one_is_not(
    addresses: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_group, "_REPORT_AFTER_S", 0.02)
    waits: list[str] = []  # of process 0 for process 1
    enough, asked_often = threading.Event(), threading.Event()
    asked_in_silence = -1  # -1 as long as process 1 answers

    @contextlib.contextmanager
    def waiting(name: str, **options: Any) -> Iterator[None]:
        if "process 1" in name:  # process 1 waits as well
            waits.append(name)
        yield

    monkeypatch.setattr(watchdog, "waiting", waiting)

    def log(text: str) -> None:
        nonlocal asked_in_silence
        if len(waits) > 3:
            enough.set()
        if asked_in_silence >= 0:
            asked_in_silence += 1
        if asked_in_silence > 5:
            asked_often.set()

    def waits_for_it() -> Any:
        nonlocal asked_in_silence
        with of(addresses[:2], 0, log=log) as found:
            first = found.gather(0)
            found.gather(0)  # comes after all answers of before
            before, asked_in_silence = len(waits), 0
            assert found.gather(0)  # no answer: one wait until the value comes
            return first, len(waits) - before

    def is_slow() -> Any:
        with of(addresses[:2], 1) as found:
            assert enough.wait(DEADLINE_S)  # every answer began another wait
            found.gather(1)
            send = connection.Connection.send
            monkeypatch.setattr(
                connection.Connection,
                "send",
                lambda s, m: None if m["kind"] == "answer" else send(s, m),
            )
            found.gather(1)
            assert asked_often.wait(DEADLINE_S)
            return found.gather(1)

    first, second = in_threads(waits_for_it, is_slow)
    assert first[0] == second == [0, 1]
    assert first[1] <= 2  # an answer may have been about to be sent when process 1 became silent
    assert set(waits) >= {f"an answer of process 1 ({addresses[1]})"}
