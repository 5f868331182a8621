"""Runs Python programs in separate processes, without importing TensorFlow in each of them.

An execution needs a separate process, and importing TensorFlow takes seconds of CPU time. The first
call therefore starts a server, which imports TensorFlow and Tekso and runs no ops. Every program is
a fork of the server:

    test ── command, cwd, environment, 3 file descriptors ──► server ── fork ──► program
         ◄────────── process id; later exit status and CPU time ──────────

The fork runs the program as `python` would, with its own `sys.argv`, `sys.path`, environment and
files. Uncaught errors, `sys.exit` and `atexit` work as usual. Environment variables that TensorFlow
reads during its import (TF_CPP_MIN_LOG_LEVEL, TF_ENABLE_ONEDNN_OPTS) have the values of the server.
Use `subprocess` for a program that needs other values, or whose imports are tested.

At its end, a fork waits for its threads, runs what is registered with `atexit`, frees the objects
of the program, and runs the destructors of C++. It does not take the modules of the server apart,
as `python` does at last: that takes 0.3 s of CPU time, and is the same for each program.

With `optimized=False`, or `GRAPH_OPTIMIZER_OFF` in its environment, a program runs without
TensorFlow's graph optimizer, which takes longer than a few steps of a small model. With
`op_by_op=True`, or `OP_BY_OP`, it computes its functions op by op, because tracing takes longer
than both, and draws no pixels. Exported functions are traced in any case. A program of several
devices cannot do so.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn, cast

DEFAULT_TIMEOUT_S = 600

GRAPH_OPTIMIZER_OFF = {"TEKSO_TESTS_GRAPH_OPTIMIZER": "off"}
"""Variables of the environment of a program that tests no numbers of an optimized graph."""

OP_BY_OP = {**GRAPH_OPTIMIZER_OFF, "TEKSO_TESTS_OP_BY_OP": "on"}
"""Variables of the environment of a program on one device that traces nothing but exports."""

MODULES = (
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "tensorflow.experimental.dtensor",
    "tekso.framework.costs.measured_costs",
    "tekso.framework.execution",
    "tekso.framework.execution.data_parallel",
    "tekso.framework.execution.mesh_sharded",
    "tekso.framework.execution.parameter_servers",
    "tekso.framework.execution.pipelined",
    "tekso.framework.execution.spmd_pipelined",
    "tekso.framework.learner",
    "tekso.framework.registry",
    "tekso.framework.run.modes",
    "tekso.models.encoder_decoder",
    "tekso.models.lstm_lm",
    "tekso.models.transformer_lm",
    "tekso.tasks.lm.input",
    "tekso.tasks.lm.task",
    "tekso.tasks.mt.task",
    "tekso.tools.experiment_flags",
    "tekso.tools.list_mode",
    "tekso.tools.trainer_flags",
)
"""Modules that the server imports besides TensorFlow, because most programs need them."""


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

    def __del__(self) -> None:
        self._close()

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

    def _close(self) -> None:
        self.stdout.close()
        if self.stderr is not None:
            self.stderr.close()

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
      optimized: whether TensorFlow optimizes graphs.
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
    client = [sys.executable, "-S", "-E", __file__, "forward", _Server.instance().address]
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
                [sys.executable, __file__, "serve", *map(str, fds)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                env={
                    **os.environ,
                    "TF_CPP_MIN_LOG_LEVEL": "3",
                },  # tests compare the output of Tekso
            )

    def fork(self, request: dict[str, Any], files: list[int]) -> int:
        _send(self._socket, request, files)
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


def _send(connection: socket.socket, request: dict[str, Any], files: list[int]) -> None:
    with tempfile.TemporaryFile("w+") as file:  # an environment may be larger than a packet
        json.dump(request, file)
        file.flush()
        socket.send_fds(connection, [b"fork"], [file.fileno(), *files])


def _serve(parent: socket.socket, listener: socket.socket) -> dict[str, Any]:
    """Forks a process for each request until the parent ends; returns the request in each fork."""
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C, the parent ends the server
    selector = selectors.DefaultSelector()
    for source in (parent, listener, wake):
        selector.register(source, selectors.EVENT_READ)
    running: dict[int, socket.socket] = {}  # process id -> client that asked for it
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                selector.register(listener.accept()[0], selectors.EVENT_READ)
            elif key.fd == wake:
                os.read(wake, 4096)
                _report_ended(running, parent)
            else:
                connection = cast(socket.socket, key.fileobj)
                packet, files, _, _ = socket.recv_fds(connection, 16, 4)
                if not packet:  # the client ended: end its programs
                    for pid, asked in running.items():
                        if asked is connection or connection is parent:
                            os.kill(pid, signal.SIGKILL)
                    if connection is parent:
                        for _ in running:
                            os.wait()
                        os._exit(0)
                    selector.unregister(connection)
                    connection.close()
                elif pid := os.fork():
                    running[pid] = connection
                    for fd in files:
                        os.close(fd)
                    connection.send(json.dumps({"forked": pid}).encode())
                else:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                    for source in [key.fd for key in selector.get_map().values()]:
                        os.close(source)
                    os.close(woken)
                    for source in (parent, listener, connection):
                        source.detach()
                    return _received(files)


def _report_ended(running: dict[int, socket.socket], parent: socket.socket) -> None:
    """Reports ended programs to their clients, and to the parent, which sums CPU times."""
    while running:
        pid, status, usage = os.wait4(-1, os.WNOHANG)
        if not pid:
            return
        code, cpu_s = os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
        message = json.dumps({"ended": pid, "code": code, "cpu_s": cpu_s}).encode()
        asked = running.pop(pid)
        with contextlib.suppress(OSError):  # the client may have ended
            asked.send(message)
        if asked is not parent:
            with contextlib.suppress(OSError):
                parent.send(message, socket.MSG_DONTWAIT)


def _received(files: list[int]) -> dict[str, Any]:
    """Replaces stdin, stdout and stderr by the files of a request; returns the request."""
    with open(files[0]) as file:
        file.seek(0)
        request: dict[str, Any] = json.load(file)
    for target, fd in enumerate(files[1:]):
        os.dup2(fd, target)
        os.close(fd)
    return request


def _become(request: dict[str, Any]) -> None:
    """Runs the requested program as `__main__`."""
    os.chdir(request["cwd"])
    for name in set(os.environ) - set(request["env"]):
        del os.environ[name]
    os.environ.update(request["env"])
    if GRAPH_OPTIMIZER_OFF.items() <= request["env"].items():
        import tensorflow as tf

        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
        if OP_BY_OP.items() <= request["env"].items():
            tf.config.run_functions_eagerly(True)
            draw_no_pixels()
    # Set sys.path from PYTHONPATH and the command, as `python` does; keep the rest of the server.
    added = [path for path in request["env"].get("PYTHONPATH", "").split(os.pathsep) if path]
    kept = [path for path in sys.path[1:] if path not in added]
    program, *arguments = request["args"]
    if program == "-m":
        sys.path[:] = [os.getcwd(), *added, *kept]
        module, *arguments = arguments
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    elif program == "-c":
        sys.path[:] = ["", *added, *kept]
        code, *arguments = arguments
        sys.argv = ["-c", *arguments]
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path[:] = [str(Path(program).resolve().parent), *added, *kept]
        sys.argv = [program, *arguments]
        runpy.run_path(program, run_name="__main__")


def draw_no_pixels() -> None:
    """Saves figures as a picture of one pixel in this process: drawing takes longer than a step."""
    from matplotlib import image
    from matplotlib.figure import Figure

    def savefig(figure: Figure, file: Any, **options: Any) -> None:
        image.imsave(file, [[0.0]], format="png")

    Figure.savefig = savefig


def collect_less() -> None:
    """Collects garbage rarely in this process and its forks.

    Tracing creates many objects that stay. With Python's thresholds, searching them for garbage
    takes a tenth of the time of a short training.
    """
    gc.set_threshold(50_000, 5, 5)


def _serve_and_become(parent: str, listener: str) -> None:
    from tekso.framework.run import quiet_tensorflow

    quiet_tensorflow.import_tensorflow()
    with quiet_tensorflow.without_collecting():  # a collection in a fork would copy all pages
        for module in MODULES:
            importlib.import_module(module)
    collect_less()
    request = _serve(socket.socket(fileno=int(parent)), socket.socket(fileno=int(listener)))
    try:
        _become(request)
        code = 0
    except SystemExit as error:
        code = _exit_code(error)
    except Exception:
        sys.excepthook(*sys.exc_info())
        code = 1
    _end(code)


def _exit_code(error: SystemExit) -> int:
    """Returns the exit code of `sys.exit`, which also prints what is not a number."""
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def _end(code: int) -> NoReturn:
    """Ends a fork as the interpreter does, except that it clears no modules."""
    threads: Any = threading
    threads._shutdown()
    atexit._run_exitfuncs()
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BrokenPipeError):
            stream.flush()
    ctypes.PyDLL(None).exit(code)  # keeps the GIL, so that daemon threads run no more
    raise AssertionError("the process has ended")


def _forward(address: str, *args: str) -> int:
    """Runs a program in a fork of the server, with the files and environment of this process."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(address)
        request = {"args": args, "cwd": os.getcwd(), "env": dict(os.environ)}
        _send(server, request, [0, 1, 2])
        while message := json.loads(server.recv(4096)):
            if "ended" in message:
                code: int = message["code"]
                return code if code >= 0 else 128 - code


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        _serve_and_become(*sys.argv[2:])
    else:
        sys.exit(_forward(*sys.argv[2:]))
