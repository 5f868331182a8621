"""Runs Python programs in separate processes, without importing TensorFlow in each of them.

An execution needs a separate process, and importing TensorFlow takes seconds of CPU time. The first
call therefore starts a server (`fork_server.py`), which imports TensorFlow and Tekso and runs no
ops. Every program is a fork of the server:

    test ── command, cwd, environment, 3 file descriptors ──► server ── fork ──► program
         ◄────────── process id; later exit status and CPU time ──────────

Use `subprocess` for a program that needs other values of the variables that TensorFlow reads during
its import, or whose imports are tested.

With `optimized=False`, or `GRAPH_OPTIMIZER_OFF` in its environment, a program runs without
TensorFlow's graph optimizer, which takes longer than a few steps of a small model, and draws no
pixels. With `op_by_op=True`, or `OP_BY_OP`, it also computes its functions op by op, because
tracing takes longer than both. Exported functions are traced in any case. A program of several
devices cannot do so.

With `fork_server.UNCHECKED` in its environment, a program does not check the task before the first
step. tests/shrunk_runs_test.py checks the experiments of Tekso.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import fork_server
from fork_server import GRAPH_OPTIMIZER_OFF, OP_BY_OP

DEFAULT_TIMEOUT_S = 600


def forks_cpu_s() -> float:
    """Returns the CPU time of all ended programs of `start` and `forwarding`."""
    server = _Server._instance
    if server is None:
        return 0.0
    while server.receive(timeout_s=0) is not None:
        pass
    return server.forks_cpu_s


def stop() -> None:
    """Ends the server and its programs; their CPU time then counts as that of child processes."""
    if _Server._instance is not None:
        _Server._instance.stop()
        _Server._instance = None


class Process:
    """A program that `start` started, with the interface of `subprocess.Popen`."""

    def __init__(self, args: list[str], pid: int, output: IO[str], errors: IO[str] | None) -> None:
        self.args, self.pid = args, pid
        self.stdout, self.stderr = output, errors  # files, which can be read at any time
        self.returncode: int | None = None
        # Unlike __del__, this is called before the files of a reference cycle are finalized. A
        # traceback makes such a cycle.
        self._close = weakref.finalize(self, _close, output, errors)

    def poll(self) -> int | None:
        """Returns the exit code, -N for signal N, or None while it runs."""
        if self.returncode is None:
            _Server.instance().receive(timeout_s=0)
        return self.returncode

    def wait(self, timeout: float = DEFAULT_TIMEOUT_S) -> int:
        """Waits for the end; kills the process after `timeout` seconds.

        Raises:
          subprocess.TimeoutExpired: the process ran longer than `timeout` seconds; the error has
            the end of its output.
        """
        end = time.monotonic() + timeout
        while self.poll() is None:
            left = end - time.monotonic()
            if left <= 0:
                self.send_signal(signal.SIGKILL)
                end = float("inf")  # until the server reports the end
                self._timed_out = True
                continue
            _Server.instance().receive(timeout_s=min(left, 60))
        if getattr(self, "_timed_out", False):
            words = "".join(f.read() for f in (self.stdout, self.stderr) if f is not None)
            raise subprocess.TimeoutExpired(self.args, timeout, output=words[-3000:])
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float = DEFAULT_TIMEOUT_S) -> tuple[str, str]:
        """Waits for the end, as `wait`; returns the unread rest of stdout and stderr."""
        self.wait(timeout)
        stdout, stderr = (f.read() if f is not None else "" for f in (self.stdout, self.stderr))
        self._close()
        return stdout, stderr

    def send_signal(self, number: int) -> None:
        """Sends a signal to the process if it is still running."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends the process at once."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Asks the process to end."""
        self.send_signal(signal.SIGTERM)


def _close(output: IO[str], errors: IO[str] | None) -> None:
    output.close()
    if errors is not None:
        errors.close()


def start(
    command: Sequence[str | Path],
    *,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    input: str | bytes = b"",
    merge: bool = False,
    live: bool = False,
    optimized: bool = True,
    op_by_op: bool = False,
) -> Process:
    """Starts `python <command>` in a separate process.

    Args:
      command: a file and its arguments, or "-m", a module and its arguments, or "-c" and code.
      env: the complete environment; None for the environment of the caller.
      input: the standard input of the program.
      merge: whether stderr is redirected to stdout.
      live: whether stdout is a pipe instead of a file, to read it while the program runs.
      optimized: whether TensorFlow optimizes graphs, and pictures have pixels.
      op_by_op: whether functions are computed op by op, instead of traced.
    """
    args = [str(word) for word in command]
    files: list[Any] = [tempfile.TemporaryFile() for _ in range(2 if merge else 3)]  # noqa: SIM115
    files[0].write(input.encode() if isinstance(input, str) else input)
    files[0].seek(0)
    pipe = None
    if live:
        reads, writes = os.pipe()
        files[1], pipe = os.fdopen(writes, "wb"), os.fdopen(reads)
    request = {
        "args": args,
        "cwd": str(cwd or os.getcwd()),
        "env": {
            **(os.environ if env is None else env),
            **({} if optimized else GRAPH_OPTIMIZER_OFF),
            **(OP_BY_OP if op_by_op else {}),
        },
    }
    pid = _Server.instance().fork(request, [f.fileno() for f in (*files, files[-1])[:3]])
    # Open the files again: the reader needs its own offset, which starts at 0.
    output = pipe or open(f"/proc/self/fd/{files[1].fileno()}")  # noqa: SIM115
    errors = None if merge else open(f"/proc/self/fd/{files[2].fileno()}")  # noqa: SIM115
    for file in files:
        file.close()
    process = Process(args, pid, output, errors)
    _Server.instance().running[pid] = process
    return process


def run(
    command: Sequence[str | Path],
    *,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    input: str | bytes = b"",
    merge: bool = False,
    optimized: bool = True,
    op_by_op: bool = False,
    timeout: float = DEFAULT_TIMEOUT_S,
) -> subprocess.CompletedProcess[str]:
    """Runs `python <command>` to its end; see `start` and `Process.wait`."""
    process = start(
        command,
        cwd=cwd,
        env=env,
        input=input,
        merge=merge,
        optimized=optimized,
        op_by_op=op_by_op,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except BaseException:  # for example, when the test times out
        process.kill()
        raise
    assert process.returncode is not None
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def forwarding(*command: str) -> str:
    """Returns a shell command that runs `python <command>` in a fork, as `start` does.

    The command accepts further arguments. Use it for programs that other programs start, such as
    scripts on a PATH.
    """
    address = _Server.instance().address
    client = [sys.executable, "-S", "-E", fork_server.__file__, "forward", address]
    return shlex.join([*client, *command])


def interpreter(path: Path) -> str:
    """Writes a program that runs like `python`, but in a fork; returns its path.

    Use it in place of `sys.executable`, for code that starts processes.
    """
    path.write_text(f'#!/bin/sh\nexec {forwarding()} "$@"\n')
    path.chmod(0o755)
    return str(path)


class _Server:
    """The client of the server; there is one for each test process."""

    _instance: _Server | None = None

    @classmethod
    def instance(cls) -> _Server:
        if cls._instance is None:
            cls._instance = cls()
            atexit.register(stop)
        return cls._instance

    def __init__(self) -> None:
        self.running: dict[int, Process] = {}
        self.forks_cpu_s = 0.0
        self._folder = tempfile.TemporaryDirectory(prefix="tekso-")
        self.address = f"{self._folder.name}/processes"
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(self.address)
        listener.listen()  # clients can connect before the server is ready
        with theirs, listener:
            fds = [theirs.fileno(), listener.fileno()]
            self._process = subprocess.Popen(
                [sys.executable, fork_server.__file__, "serve", *map(str, fds)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                env={
                    **os.environ,
                    "TF_CPP_MIN_LOG_LEVEL": "3",
                },  # tests compare the output of Tekso
            )

    def fork(self, request: dict[str, Any], files: list[int]) -> int:
        fork_server.send(self._socket, request, files)
        while True:
            message = self.receive(timeout_s=DEFAULT_TIMEOUT_S)
            if message is not None and "forked" in message:
                pid: int = message["forked"]
                return pid

    def receive(self, *, timeout_s: float) -> dict[str, Any] | None:
        """Handles one message of the server; returns it, or None if there is none."""
        self._socket.settimeout(timeout_s)
        try:
            packet = self._socket.recv(4096)
        except (BlockingIOError, TimeoutError):
            return None
        if not packet:
            raise RuntimeError(f"the server of processes ended with {self._process.wait()}")
        message: dict[str, Any] = json.loads(packet)
        if "ended" in message:
            self.forks_cpu_s += message["cpu_s"]
            if process := self.running.pop(message["ended"], None):  # None if it was forwarded
                process.returncode = message["code"]
        return message

    def stop(self) -> None:
        """Ends all running programs and the server."""
        for process in list(self.running.values()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        self._socket.close()
        self._process.wait()
        self._folder.cleanup()
