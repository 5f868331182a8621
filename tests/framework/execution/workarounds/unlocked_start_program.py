"""Waits in TensorFlow for a second process that never comes; ends if other threads can run.

Started by tests in a process of its own, with the word "avoided" to use the workaround.
"""

from __future__ import annotations

import os
import sys
import threading
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from tensorflow.experimental import dtensor

from tekso.framework import port_filter
from tekso.framework.cluster import Cluster
from tekso.framework.execution import runtime

THREADS_RUN = 7  # exit code


def end_if_running(waits: threading.Event) -> None:
    """Ends the process after a second in which the main thread waits and this one runs."""
    waits.wait()
    for _ in range(50):
        time.sleep(0.02)
    os._exit(THREADS_RUN)


def main() -> None:
    """Starts the runtime as the first of two processes."""
    addresses = tuple(f"localhost:{port_filter.free_port()}" for _ in range(2))
    cluster = Cluster(addresses, process=0)
    runtime.describe(cluster)
    waits = threading.Event()
    threading.Thread(target=end_if_running, args=[waits], daemon=True).start()
    waits.set()
    if "avoided" in sys.argv:
        runtime.start("CPU", cluster)
    else:
        dtensor.initialize_accelerator_system("CPU")


if __name__ == "__main__":
    main()
