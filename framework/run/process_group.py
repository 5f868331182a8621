"""The process group of a run: exchanges values between processes, apart from TensorFlow.

    process 1 ──┐
    process 2 ──┼── a connection each ──► process 0
    process 3 ──┘

TensorFlow's runtime moves tensors. The process group connects the processes before TensorFlow
starts, lets them agree on common decisions (which step to restore, when to stop), and detects lost
processes: if a connection breaks, the process was killed or its machine failed. TensorFlow's own
heartbeats detect a process that is connected but does not respond. Heartbeats of this group would
have to be sent by Python, whose lock TensorFlow holds while it waits for a tensor.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import tensorflow as tf

from tekso.framework import watchdog
from tekso.framework.cluster import Cluster
from tekso.framework.exit_codes import ExitCode
from tekso.framework.run.cluster_token import Token
from tekso.framework.run.connection import Connection, Message
from tekso.framework.run.rendezvous import Rendezvous

_REPORT_AFTER_S = 30.0
_GRACE_S = 15.0  # time for the main thread to notice that a process is lost
_TENSORFLOW_S = 5.0  # by how much TensorFlow may detect a lost process earlier than this group
_TASK = re.compile(r"(?:unhealthy|remote target)[^/]*/job:worker/(?:replica:\d+/)?task:(\d+)")

_OF_CONNECTIONS = (
    tf.errors.UnavailableError,
    tf.errors.DeadlineExceededError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
)


class LostProcessError(RuntimeError):
    """Another process of the run was lost, so this one cannot continue."""

    exit_code = ExitCode.PROCESS_LOST


class ProcessGroup:
    """The processes of a run, as seen by one of them. This base class is a single process."""

    cluster: Cluster | None = None
    process = 0
    size = 1

    def name(self, process: int) -> str:
        """Returns the name of a process for messages."""
        return self.cluster.name(process) if self.cluster is not None else f"process {process}"

    def others(self) -> str:
        """Returns " with process 1 (node2:5000), …" for messages; "" for a single process."""
        names = [self.name(process) for process in range(self.size) if process != self.process]
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        return f" with {shown}" if names else ""

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and reports."""
        return self.process == 0

    def gather(self, value: Any, *, exchange: str = "") -> list[Any]:
        """Returns the values of all processes; all processes must call it.

        Args:
          value: a value that JSON can represent.
          exchange: name of the exchange that the value belongs to. A thread that gathers at the
            same time as the main thread has an exchange of its own.

        Raises:
          LostProcessError: a process was lost.
        """
        return [value]

    def from_first(self, value: Any) -> Any:
        """Returns the value that process 0 passes; all processes must call it."""
        return self.gather(value if self.is_first else None)[0]

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Converts a TensorFlow error that a lost process caused to a LostProcessError."""
        yield

    @contextlib.contextmanager
    def first_before_others(self) -> Iterator[None]:
        """Runs the block in process 0 first, then in all other processes."""
        if not self.is_first:
            self.gather(None)
        yield
        if self.is_first:
            self.gather(None)


class ConnectedProcessGroup(ProcessGroup):
    """Several processes: `with ConnectedProcessGroup(cluster, …) as group:`.

    Args:
      cluster: the processes.
      token: the secret that they share.
      timeout_s: how long to wait for all processes to connect.
      log: called with a line that says which processes are awaited.
      last_words: called with the error before a process that hangs in TensorFlow is ended.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        token: Token,
        timeout_s: float,
        log: Callable[[str], None],
        last_words: Callable[[str], None],
    ) -> None:
        self.process, self.size = cluster.process, cluster.size
        self.cluster = cluster
        self._log, self._last_words = log, last_words
        self._rendezvous = Rendezvous(cluster, token=token, timeout_s=timeout_s, log=log)
        self._connections: dict[int, Connection] = {}
        self._changed = threading.Condition()
        self._inbox: dict[tuple[int, str], collections.deque[Any]] = collections.defaultdict(
            collections.deque
        )
        self._answers: collections.Counter[int] = collections.Counter()  # by process
        self._left: set[int] = set()
        self._loss: str | None = None
        self._noticed, self._closing = threading.Event(), threading.Event()

    def __enter__(self) -> ConnectedProcessGroup:
        self._connections = self._rendezvous.hold()
        for process, connection in self._connections.items():
            _thread(self._listen, process, connection)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self.gather(None)  # so that no process ends while another one needs it
            elif not isinstance(error, LostProcessError):
                text = str(error).partition("\n")[0] or type(error).__name__
                self._lose(self.process, f"ended with an error: {text}")
        finally:
            self._noticed.set()
            self._closing.set()
            for connection in self._connections.values():
                connection.send({"kind": "bye"})
                connection.close()

    # --- exchanging values ---

    def gather(self, value: Any, *, exchange: str = "") -> list[Any]:
        """See `ProcessGroup`."""
        message = {"kind": "value", "exchange": exchange}
        if not self.is_first:
            self._connections[0].send({**message, "value": value})
            found: list[Any] = self._next(0, exchange)
            return found
        others = [self._next(process, exchange) for process in range(1, self.size)]
        values = [json.loads(json.dumps(value)), *others]
        for connection in self._connections.values():
            connection.send({**message, "value": values})
        return values

    def _next(self, process: int, exchange: str) -> Any:
        with self._changed:
            inbox = self._inbox[process, exchange]
            self._wait(process, lambda: bool(inbox or self._loss or process in self._left))
            if inbox:
                return inbox.popleft()
            if not exchange:  # another thread may notice while the main thread hangs
                self._noticed.set()
            loss = self._loss or f"{self.name(process)} ended before this one"
        raise LostProcessError(loss)

    def _wait(self, process: int, is_over: Callable[[], bool]) -> None:
        """Waits for a message of a process; as long as it is alive, it may prepare something."""
        answers = self._answers
        while not is_over():
            answers[process] = 0
            with watchdog.waiting(f"an answer of {self.name(process)}", interruptible=True):
                while not self._changed.wait_for(
                    lambda: is_over() or answers[process], timeout=_REPORT_AFTER_S
                ):
                    self._log(f"waiting for {self.name(process)}")
                    self._connections[process].send({"kind": "ask"})

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """See `ProcessGroup`."""
        try:
            yield
        except tf.errors.OpError as error:
            with self._changed:
                self._changed.wait_for(lambda: self._loss, timeout=_TENSORFLOW_S)
            found = _TASK.search(str(error))
            if self._loss is None and found and int(found[1]) != self.process:
                self._lose(int(found[1]), "was lost: TensorFlow can no longer reach it")
            if self._loss is None and not _is_of_connections(error):
                raise
            self._noticed.set()
            reason = str(error).partition("\n")[0]
            loss = self._loss or f"a process was lost; TensorFlow reports: {reason}"
            raise LostProcessError(loss) from error

    # --- detecting lost processes ---

    def _listen(self, process: int, connection: Connection) -> None:
        while _is_valid(message := connection.receive(), self.size):
            self._take(process, message)
        if process not in self._left and not self._closing.is_set():
            self._lose(process, "was lost: its connection broke (was it killed?)")

    def _take(self, process: int, message: Any) -> None:
        if message["kind"] == "lost":
            self._lose(message["process"], message["how"])
        with self._changed:
            if message["kind"] == "ask":
                self._connections[process].send({"kind": "answer"})
            elif message["kind"] == "answer":
                self._answers[process] += 1
            elif message["kind"] == "value":
                self._inbox[process, message["exchange"]].append(message["value"])
            elif message["kind"] == "bye":
                self._left.add(process)
            self._changed.notify_all()

    def _lose(self, process: int, how: str) -> None:
        """Records the first loss, and sends it to processes that may not detect it."""
        with self._changed:
            if self._loss is not None:
                return
            self._loss = f"{self.name(process)} {how}"
            # Send it before a thread of this process sees the loss and sends "bye".
            for connection in self._connections.values():
                connection.send({"kind": "lost", "process": process, "how": how})
            self._changed.notify_all()
        if process != self.process:
            _thread(self._end_if_hanging)

    def _end_if_hanging(self) -> None:
        if not self._noticed.wait(_GRACE_S):
            self._last_words(str(self._loss))
            os._exit(ExitCode.PROCESS_LOST)


def _is_valid(message: Message | None, size: int) -> bool:
    """Whether a message is one that `ConnectedProcessGroup` sends in a group of a size."""
    match message:
        case {"kind": "value", "exchange": str(), "value": _} | {"kind": "bye" | "ask" | "answer"}:
            return True
        case {"kind": "lost", "process": int(process), "how": str()}:
            return 0 <= process < size
    return False


def _is_of_connections(error: tf.errors.OpError) -> bool:
    return isinstance(error, _OF_CONNECTIONS) or "/job:worker/" in str(error)


def _thread(target: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=target, args=args, daemon=True, name=f"group{target.__name__}").start()
