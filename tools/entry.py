"""Entry points of the commands. Ctrl-C ends a command without a traceback, even during imports.

    tekso-trainer  ->  trainer()  ->  handler for SIGINT  ->  import tekso.tools.trainer  ->  main()

Imports take seconds. If KeyboardInterrupt is raised during an import, some libraries catch it, and
the command would continue. Therefore the handler for SIGINT ends the process during an import, and
raises KeyboardInterrupt otherwise. `python -m tekso.tools.trainer` does not install this handler.
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
from types import FrameType

from tekso.framework.exit_codes import ExitCode


def _start(module: str) -> int:
    """Runs the `main` of a module of `tekso.tools`; returns the exit code."""
    command = f"tekso-{module.replace('_', '-')}"
    terminal = os.dup(2)  # stderr is redirected while TensorFlow is imported

    def interrupt(_: int, frame: FrameType | None) -> None:
        while frame is not None and "importlib._bootstrap" not in frame.f_code.co_filename:
            frame = frame.f_back
        if frame is None:  # nothing is being imported
            raise KeyboardInterrupt
        os.write(terminal, f"{command}: interrupted\n".encode())
        os._exit(ExitCode.INTERRUPTED)

    if (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):  # SIGINT is ignored in the background
        signal.signal(signal.SIGINT, interrupt)
    code: int = importlib.import_module(f"tekso.tools.{module}").main()
    return code


trainer = functools.partial(_start, "trainer")
vocab = functools.partial(_start, "vocab")
benchmark = functools.partial(_start, "benchmark")
pipeline_benchmark = functools.partial(_start, "pipeline_benchmark")
worker = functools.partial(_start, "worker")
ckpt = functools.partial(_start, "ckpt")
decode = functools.partial(_start, "decode")
compare = functools.partial(_start, "compare")
results = functools.partial(_start, "results")
sweep = functools.partial(_start, "sweep")
new_task = functools.partial(_start, "new_task")
