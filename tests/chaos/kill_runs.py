"""Kills runs under every execution at random moments, and reports whether they lose anything.

    python tests/chaos/kill_runs.py --kills=50 --seed=1
    python tests/chaos/kill_runs.py --kills=10 --only=mesh,two_processes --no_damage

See killer.py. The exit code is 1 if any run differs from the one that nothing interrupts.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
HERE = Path(__file__).resolve().parent


def main() -> int:
    sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]
    importlib.import_module("conftest")  # of the root: it registers this checkout
    import killer
    import processes

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=10, help="kills of each way to execute")
    parser.add_argument("--seed", type=int, default=1, help="chooses all moments and all damage")
    ways = ", ".join(killer.FORMS)
    parser.add_argument("--only", default=",".join(killer.FORMS), help=f"with commas: {ways}")
    parser.add_argument("--no_damage", action="store_true", help="damages no files")
    parser.add_argument("--phases", default="", help="with commas: only these, such as save")
    flags = parser.parse_args()
    names = flags.only.split(",")
    if unknown := [name for name in names if name not in killer.FORMS]:
        parser.error(f"--only has {', '.join(unknown)}; expected some of {ways}")
    failed = False
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            one = killer.Killer(
                killer.FORMS[name],
                Path(folder),
                seed=flags.seed,
                damaged_part=0.0 if flags.no_damage else killer.DAMAGED_PART,
                phases=tuple(filter(None, flags.phases.split(","))),
            )
            try:
                one.run(flags.kills)
                result = "the same to the last bit"
            except killer.ChaosError as error:
                result, failed = f"FAILED\n{error}", True
        phases = collections.Counter(life.plan["phase"] for life in one.lives if life.is_killed)
        counts = ", ".join(f"{phase} {count}" for phase, count in sorted(phases.items()))
        damaged = sum(bool(life.damaged) for life in one.lives)
        print(
            f"{name}: {one.kills} kills ({counts}), {damaged} damaged files: {result}", flush=True
        )
    processes.stop()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
