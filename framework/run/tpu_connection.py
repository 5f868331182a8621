"""Limits the time to connect to a TPU.

TensorFlow waits for a TPU forever, in C++ code that neither an exception nor Ctrl-C can interrupt.
So another thread ends the process after a time limit; training has not started yet then.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

from tekso.framework.exit_codes import ExitCode

LIMIT_S = 600.0  # a large pod takes minutes


@contextlib.contextmanager
def connecting(tpu: str | None, *, limit_s: float = LIMIT_S) -> Iterator[None]:
    """Ends the process if the block, which connects to a TPU, takes too long.

    Args:
      tpu: name or address of the TPU; None: no TPU is used, and there is no limit.
      limit_s: maximum duration of the block in seconds.
    """
    if tpu is None:
        yield
        return

    def give_up() -> None:
        text = f"TPU {tpu!r} has not answered for {limit_s:.0f} s: is its name or address right?"
        print(f"{os.path.basename(sys.argv[0])}: {text}", file=sys.stderr, flush=True)
        os._exit(ExitCode.FAILED)

    print(f"connecting to TPU {tpu!r}, at most {limit_s:.0f} s …", file=sys.stderr, flush=True)
    timer = threading.Timer(limit_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
