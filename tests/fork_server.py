"""The server that forks the programs of `processes.py`, so that none imports TensorFlow itself.

A fork runs a program as `python` would, with its own `sys.argv`, `sys.path`, environment and files.
Uncaught errors, `sys.exit` and `atexit` work as usual. Environment variables that TensorFlow reads
during its import (TF_CPP_MIN_LOG_LEVEL, TF_ENABLE_ONEDNN_OPTS) have the values of the server.

At its end, a fork waits for its threads, runs what is registered with `atexit`, frees the objects
of the program, and runs the destructors of C++. It does not take the modules of the server apart,
as `python` does at last: that takes 0.3 s of CPU time, and is the same for each program.

    fork_server.py serve PARENT LISTENER     answers requests of a socket, and of new connections
    fork_server.py forward ADDRESS PROGRAM…  asks a server to run a program with its own files
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
import signal
import socket
import sys
import tempfile
import threading
import types
from pathlib import Path
from typing import Any, NoReturn, cast

GRAPH_OPTIMIZER_OFF = {"TEKSO_TESTS_GRAPH_OPTIMIZER": "off"}
"""Variables of the environment of a program that tests no numbers of an optimized graph."""

OP_BY_OP = {**GRAPH_OPTIMIZER_OFF, "TEKSO_TESTS_OP_BY_OP": "on"}
"""Variables of the environment of a program on one device that traces nothing but exports."""

UNCHECKED = {"TEKSO_TESTS_CHECKS": "off"}
"""Variables of the environment of a program that trains an experiment which other tests check."""

MODULES = (
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "sklearn.datasets",
    "tensorflow.experimental.dtensor",
    "tekso.framework.costs.piece_costs",
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


def send(connection: socket.socket, request: dict[str, Any], files: list[int]) -> None:
    """Sends a request and file descriptors over a connection."""
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
        draw_no_pixels()
        if OP_BY_OP.items() <= request["env"].items():
            tf.config.run_functions_eagerly(True)
    if UNCHECKED.items() <= request["env"].items():
        check_no_task()
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


def check_no_task() -> None:
    """Checks no loss and no functions of a task in this process: it takes longer than two steps."""
    from tekso.framework.run import assembly, loss_check

    def nothing_found(*_: Any, **__: Any) -> loss_check.Findings:
        return loss_check.Findings()

    assembly._check_functions = lambda *_: None
    loss_check.check = loss_check.check_restored = nothing_found


def leave_out_keras() -> None:
    """Leaves out the Keras layers of `tensorflow_text` when this process and its forks import it.

    Exports of texts import the package for its ops. Its layers import Keras, with scikit-learn and
    scipy.stats, which takes longer than such an export.
    """
    name = "tensorflow_text.python.keras"
    sys.modules.setdefault(name, types.ModuleType(name))


def collect_less() -> None:
    """Collects garbage rarely in this process and its forks.

    Tracing creates many objects that stay. With Python's thresholds, searching them for garbage
    takes a tenth of the time of a short training.
    """
    gc.set_threshold(400_000, 5, 5)


def _serve_and_become(parent: str, listener: str) -> None:
    from tekso.framework.run import quiet_tensorflow

    quiet_tensorflow.import_tensorflow()
    with quiet_tensorflow.without_collecting():  # a collection in a fork would copy all pages
        for module in MODULES:
            importlib.import_module(module)
    collect_less()
    leave_out_keras()
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
        send(server, request, [0, 1, 2])
        while message := json.loads(server.recv(4096)):
            if "ended" in message:
                code: int = message["code"]
                return code if code >= 0 else 128 - code


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        _serve_and_become(*sys.argv[2:])
    else:
        sys.exit(_forward(*sys.argv[2:]))
