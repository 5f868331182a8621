"""Compares synchronous, hybrid and asynchronous updates when one of four workers is slow.

    python tests/hybrid_demonstration.py

It starts four workers and a parameter server on this machine. One worker is suspended half of the
time. Each mode trains a small model to map tokens to those of a permutation, until the mean loss of
some updates is below a limit; the program prints how long this took.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "framework" / "execution")]

import conftest  # noqa: E402, F401  registers the packages of this checkout

LIMIT, MEAN_OF, PER_CALL, MOST = 1.2, 12, 12, 600
SUSPENDED_S, RUNNING_S = 0.2, 0.2
WORKER = "import conftest, sys; from tekso.tools.worker import main; sys.exit(main())"


def train(addresses: list[str], groups: int, slow: int) -> None:
    """Trains in this process, and prints the result as JSON."""
    import numpy as np
    import steps_program as steps

    from tekso.framework.execution import DataParallel, Hybrid
    from tekso.framework.execution.base import signature_of
    from tekso.framework.learner import Learner
    from tekso.framework.optimizers.adam import Adam
    from tekso.framework.schedules import Constant

    updates = Hybrid.Params(
        parameter_servers=addresses[:1], workers=addresses[1:], num_groups=groups
    )
    execution = DataParallel.Params(updates=updates, towers=1, xla="none").instantiate()
    execution.setup_devices()
    learner = Learner.Params(optimizer=Adam.Params(), schedule=Constant.Params(value=0.01))
    task = steps.ToyTask.Params(num_blocks=2).instantiate()
    permutation = np.random.default_rng(0).permutation(steps.VOCAB).astype(np.int32)

    def batch(step: int) -> dict[str, np.ndarray]:
        found = steps.batch(step)
        return {**found, "labels": permutation[found["ids"]]}

    program = execution.build(task, learner.instantiate(), seed=7, batch=signature_of(batch(0)))
    program.initialize()
    program.train_steps([batch(i) for i in range(PER_CALL)], 0)  # compiles
    program.initialize()
    threading.Thread(target=slow_down, args=(slow,), daemon=True).start()
    begin, losses = time.perf_counter(), [float("inf")] * MEAN_OF
    while np.mean(losses[-MEAN_OF:]) > LIMIT and len(losses) - MEAN_OF < MOST:
        first = len(losses) - MEAN_OF
        call = [batch(first + i) for i in range(PER_CALL)]
        losses += [float(found["loss"]) for found in program.train_steps(call, first)]
    result = {
        "seconds": time.perf_counter() - begin,
        "updates": len(losses) - MEAN_OF,
        "loss": float(np.mean(losses[-MEAN_OF:])),
        "staleness": program.summary()[0],
    }
    print(json.dumps(result), flush=True)
    os._exit(0)


def slow_down(process: int) -> None:
    """Suspends a process for half of the time."""
    while True:
        time.sleep(RUNNING_S)
        os.kill(process, signal.SIGSTOP)
        time.sleep(SUSPENDED_S)
        os.kill(process, signal.SIGCONT)


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return f"localhost:{found.getsockname()[1]}"


def main() -> None:
    """Runs all modes, each in a process of its own, with the same workers."""
    addresses = [free_address() for _ in range(5)]
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, f"--address={address}"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for address in addresses
    ]
    try:
        for worker in workers:
            assert worker.stdout is not None
            worker.stdout.readline()  # it listens
        for name, groups in (("synchronous", 1), ("hybrid", 2), ("asynchronous", 4)):
            command = [sys.executable, __file__, json.dumps([addresses, groups, workers[-1].pid])]
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
            workers[-1].send_signal(signal.SIGCONT)
            found = json.loads(done.stdout.strip().splitlines()[-1])
            print(
                f"{name:12} {found['seconds']:6.1f} s  {found['updates']:4} updates  "
                f"loss {found['loss']:.3f}  {found['staleness']}",
                flush=True,
            )
    finally:
        for worker in workers:
            worker.kill()
            worker.wait(60)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(*json.loads(sys.argv[1]))
    else:
        main()
