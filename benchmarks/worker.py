"""Measures one workload in one framework and prints the figures as a line of JSON.

run.py starts it with the Python of the framework's environment:

    python -m benchmarks.worker --framework=pytorch --variant=eager --workload=lstm

Other output of libraries goes to the standard error.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import workloads
from benchmarks.frameworks import UnsupportedError

STARTED = "BENCHMARK_STARTED"
"""Environment variable: when the process was started, in seconds since the epoch."""

NUM_LOSSES = 3  # reported and compared
LATER_TOLERANCES = {"amoebanet": 0.2}
"""{workload: largest relative difference of all losses but the first}. In PyTorch, an input of
`amoebanet` multiplied by 1 + 1e-6 changes the third loss by 9 %, and float64 changes it by 4 %;
`image_gradients.py` compares the models in float64."""


def main(argv: list[str] | None = None) -> int:
    """Runs the worker; returns the exit code."""
    parser = argparse.ArgumentParser(prog="benchmarks.worker")
    parser.add_argument("--framework", required=True)
    parser.add_argument("--variant", default="")
    parser.add_argument("--workload", required=True, choices=list(workloads.WORKLOADS))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--weights", help="file of the initial weights")
    parser.add_argument("--export", help="file to write the initial weights to")
    parser.add_argument("--tiny", action="store_true", help="sizes that only check the code")
    options = parser.parse_args(argv)
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no result
    record = measure(options)
    output.write(json.dumps(record) + "\n")
    output.flush()
    return 0


def measure(options: Any) -> dict[str, Any]:
    """Returns the figures."""
    workload = (workloads.TINY if options.tiny else workloads.WORKLOADS)[options.workload]
    weights: dict[str, Any] = {}
    if options.weights:
        with np.load(options.weights) as stored:
            weights = {name: stored[name] for name in stored.files}
    framework = importlib.import_module(f"benchmarks.frameworks.of_{options.framework}")
    try:
        built = framework.build(workload, weights, options.variant)
    except UnsupportedError as error:
        return {"skipped": str(error)}
    if options.export:
        if built.weights is None:
            raise ValueError(f"{options.framework} exports no weights")
        target = Path(options.export)
        part = target.with_suffix(".part.npz")
        np.savez(part, **built.weights())
        part.replace(target)
    losses = [built.step()]
    first_s = time.time() - float(os.environ.get(STARTED, time.time()))
    losses += [built.step() for _ in range(max(options.warmup, NUM_LOSSES) - 1)]
    times, busy = [], []
    for _ in range(options.steps):
        begin, cpu = time.perf_counter(), time.process_time()
        built.step()
        times.append(1000.0 * (time.perf_counter() - begin))
        busy.append(1000.0 * (time.process_time() - cpu))
    return {
        "step_ms": times,
        "cpu_ms": busy,
        "time_to_first_step_s": first_s,
        "peak_memory_bytes": _peak_memory_bytes(),
        "losses": losses[:NUM_LOSSES],
        "later_tolerance": LATER_TOLERANCES.get(options.workload),
        "num_weights": built.num_weights,
        "expected_weights": workload.num_weights,
        "versions": {"python": sys.version.split()[0], **built.versions},
    }


def _peak_memory_bytes() -> int:
    status = Path("/proc/self/status")
    if status.exists():  # on Linux, getrusage includes the memory of the parent process
        return 1024 * int(status.read_text().partition("VmHWM:")[2].split()[0])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


if __name__ == "__main__":
    sys.exit(main())
