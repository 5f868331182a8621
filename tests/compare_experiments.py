"""Compares the registered experiments, made small, with one device; keeps the results in a file.

    python tests/compare_experiments.py --results=matrix.jsonl
    python tests/compare_experiments.py --results=matrix.jsonl --executions="compiled whole"
    python tests/compare_experiments.py --results=matrix.jsonl --not_run

This is what tests/shrunk_experiments_test.py tests, for a machine that is free at times only. Each
experiment has a process of its own, with which one line is added to the file for each execution.
Repeat the command to continue: it leaves out what has a line that passed. `--not_run` selects what
the test lists in NOT_RUN.

| outcome | meaning |
|---|---|
| equal | losses and gradient norms match one device; compiled steps have no op that a TPU lacks |
| rejected | an error before the first step, for the reason that the test expects |
| DIFFERENT | a number, an op or a reason is another one |
| CRASH | any other error, or the process ended |

The exit status is 1 if an experiment is DIFFERENT or a CRASH.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve()
PASSED = ("equal", "rejected")


def compare(key: str, executions: Sequence[str]) -> list[dict[str, Any]]:
    """Returns a record for each execution of an experiment, from a process of its own."""
    import shrunk_experiments_test as matrix

    try:
        found = matrix.results(key, [matrix.ALONE, *executions])
    except subprocess.TimeoutExpired as error:
        found = {name: {"crash": str(error)} for name in [matrix.ALONE, *executions]}
    records = []
    for name in executions:
        result = found[name]
        reason = matrix.difference(key, name, result, found[matrix.ALONE])
        if "crash" in result or "crash" in found[matrix.ALONE]:
            outcome = "CRASH"
        elif reason is not None:
            outcome = "DIFFERENT"
        else:
            outcome = "rejected" if "refused" in result else "equal"
        record = {"key": key, "execution": name, "outcome": outcome, "cpu_s": result.get("cpu_s")}
        records.append(record | {"reason": reason or result.get("refused", "")})
    return records


def left(results: Path, executions: dict[str, Sequence[str]]) -> dict[str, list[str]]:
    """Returns {experiment: executions without a line that passed}.

    Args:
      results: the file of the lines.
      executions: {experiment: executions to compare}.

    Raises:
      ValueError: a line is no JSON.
    """
    lines = results.read_text().splitlines() if results.exists() else []
    records = [json.loads(line) for line in lines]
    done = {(r["key"], r["execution"]) for r in records if r["outcome"] in PASSED}
    found = {key: [n for n in names if (key, n) not in done] for key, names in executions.items()}
    return {key: names for key, names in found.items() if names}


def main(arguments: Sequence[str]) -> int:
    """Compares experiments, and returns the exit status."""
    import shrunk_experiments_test as matrix

    others = [name for name in matrix.EXECUTIONS if name != matrix.ALONE]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("keys", nargs="*", metavar="EXPERIMENT", help="empty: all")
    parser.add_argument("--results", required=True, type=Path, help="file for the lines")
    parser.add_argument("--executions", default=",".join(others), help=f"some of: {others}")
    parser.add_argument("--not_run", action="store_true", help="what the test lists in NOT_RUN")
    options = parser.parse_args(arguments)
    names = options.executions.split(",")
    for given, allowed in ((names, others), (options.keys, matrix.GROUPS)):
        if unknown := [name for name in given if name not in allowed]:
            parser.error(f"unknown: {unknown}; allowed are {list(allowed)}")
    wanted = {
        key: [n for n in names if not options.not_run or key in matrix.NOT_RUN.get(n, ())]
        for key in options.keys or matrix.GROUPS
    }
    try:
        options.results.open("a").close()  # before the first training, not after it
        found = left(options.results, wanted)
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"--results={options.results} cannot be continued: {error!r}")
    has_failed = False
    for key, executions in found.items():
        for record in compare(key, executions):
            with options.results.open("a") as file:
                file.write(json.dumps(record) + "\n")
            has_failed |= record["outcome"] not in PASSED
            reason = f": {record['reason'][-1500:]}" if record["reason"] else ""
            print(f"{key}, {record['execution']} {record['outcome']}{reason}", flush=True)
    return int(has_failed)


if __name__ == "__main__":
    sys.path.insert(0, str(FILE.parents[1]))
    importlib.import_module("conftest")  # of the root: it registers this checkout
    sys.exit(main(sys.argv[1:]))
