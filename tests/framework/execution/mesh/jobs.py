"""Runs jobs of a test program in processes of their own: a process has one execution."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any


def run_all(run: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Runs the jobs that are on the command line, as JSON, each in a process of its own.

    The processes are forks of this one, which has imported everything and started nothing; one
    runs at a time, since the tests have as many processes as there are cores. Prints a list: what a
    job returned, or {"error": …}.
    """
    results = []
    for job in json.loads(sys.argv[1]):
        with tempfile.TemporaryFile("w+") as output:
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    output.write(json.dumps(run(job)))
                    code = 0
                except BaseException as error:
                    output.write(f"{type(error).__name__}: {error}"[:3000])
                output.flush()
                os._exit(code)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            output.seek(0)
            text = output.read()
        results.append({"error": f"exit code {code}: {text}"} if code else json.loads(text))
    print(json.dumps(results))
