"""Connecting to a TPU: told before it begins, and ended if nothing answers.

TensorFlow waits for a TPU without end and inside of C++, where neither an exception nor Ctrl-C
reaches it. So after a time the process is ended from another thread; nothing is trained yet then.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

LIMIT_S = 600.0  # a large pod takes minutes


@contextlib.contextmanager
def connecting(tpu: str | None, *, limit_s: float = LIMIT_S) -> Iterator[None]:
    """For the block that connects to a TPU; it ends the process if the block takes too long.

    Args:
      tpu: name or address of the TPU; None: there is nothing to connect to.
      limit_s: seconds that the block may take.
    """
    if tpu is None:
        yield
        return

    def give_up() -> None:
        text = f"TPU {tpu!r} has not answered for {limit_s:.0f} s: is its name or address right?"
        print(f"{os.path.basename(sys.argv[0])}: {text}", file=sys.stderr, flush=True)
        os._exit(1)

    print(f"connecting to TPU {tpu!r}, for {limit_s:.0f} s at most …", file=sys.stderr, flush=True)
    timer = threading.Timer(limit_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
