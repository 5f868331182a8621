"""Runs jobs of a test program in processes of their own: a process has one execution."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any


def run_all(run: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Runs the jobs that stand on the command line, as JSON, each in a process of its own.

    The processes are forks of this one, which has imported everything and started nothing. Prints
    a list: what a job returned, or {"error": …}.
    """
    jobs = json.loads(sys.argv[1])
    outputs = [tempfile.TemporaryFile("w+") for _ in jobs]  # noqa: SIM115
    running: dict[int, int] = {}
    codes = [0] * len(jobs)
    for number, job in enumerate(jobs):
        if len(running) == 2:
            _wait(running, codes)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                outputs[number].write(json.dumps(run(job)))
                code = 0
            except BaseException as error:
                outputs[number].write(f"{type(error).__name__}: {error}"[:3000])
            outputs[number].flush()
            os._exit(code)
        running[child] = number
    while running:
        _wait(running, codes)
    results = []
    for output, code in zip(outputs, codes, strict=True):
        output.seek(0)
        text = output.read()
        results.append({"error": f"exit code {code}: {text}"} if code else json.loads(text))
    print(json.dumps(results))


def _wait(running: dict[int, int], codes: list[int]) -> None:
    child, status = os.wait()
    codes[running.pop(child)] = os.waitstatus_to_exitcode(status)
