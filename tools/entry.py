"""Entry points of the commands: Ctrl-C ends them without a traceback, also while they import.

    tekso-trainer  ->  trainer()  ->  handler for SIGINT  ->  import tekso.tools.trainer  ->  main()

To import takes seconds, and libraries swallow a KeyboardInterrupt that comes up in an import: the
command would go on. So until TensorFlow is there, SIGINT ends the process in its handler.
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
import sys
from typing import Any

INTERRUPTED = 130


def _start(module: str) -> int:
    """Runs the `main` of a module of `tekso.tools`; returns the exit code."""
    command = f"tekso-{module.replace('_', '-')}"
    terminal = os.dup(2)  # what TensorFlow says while it is imported goes elsewhere

    def interrupt(*_: Any) -> None:
        tensorflow = sys.modules.get("tensorflow")
        if tensorflow is not None and not getattr(tensorflow.__spec__, "_initializing", False):
            raise KeyboardInterrupt
        os.write(terminal, f"{command}: interrupted\n".encode())
        os._exit(INTERRUPTED)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not in the background
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
new_task = functools.partial(_start, "new_task")
