"""Compares the speed of training steps and of a beam search with other frameworks.

Every measurement is a new process, one at a time. The frameworks take turns. Before the first
turn, the other frameworks are installed in virtual environments of their own.
"""

from __future__ import annotations

import argparse
import datetime
import difflib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import environments, instruction_sets, table, turns
from benchmarks.machine import machine
from benchmarks.peers import ENVIRONMENTS, PEERS, TEKSO
from benchmarks.workloads import TINY, WORKLOADS


class CommandError(Exception):
    """The command line is wrong; the message is one line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns the exit code.

    0 success, 1 a wrong model or a failure, 2 wrong command line, 130 interrupted.
    """
    options = _parser().parse_args(argv)
    try:
        workloads, peers = chosen(options.only)
        for name in ("turns", "steps"):
            if getattr(options, name) < 1:
                raise CommandError(f"--{name} is {getattr(options, name)}, must be at least 1")
        _check_target(_target(options, "date"))
    except CommandError as error:
        _say(f"benchmarks: {error}")
        return 2
    try:
        result = run(options, workloads, peers)
    except turns.ExportError as error:
        _say(f"benchmarks: {error}")
        return 1
    except KeyboardInterrupt:
        _say("benchmarks: interrupted; no figures were written")
        return 130
    target = _target(options, result["date"])
    target.write_text(json.dumps(result, indent=1) + "\n")
    page = target.with_suffix(".md")
    page.write_text(table.markdown(result))
    print(table.text(result))
    print(f"\nWritten to {target} and {page}.")
    for fault in table.faults(result):
        print(f"benchmarks: {fault}", file=sys.stderr)
    return 1 if table.faults(result) else 0


def _target(options: Any, date: str) -> Path:
    """Returns where the figures are written."""
    return Path(options.json or f"runs/benchmarks/{date.replace(' ', '_')}.json")


def _check_target(target: Path) -> None:
    """Creates the folder of the figures, before the measurements that they need.

    Raises:
      CommandError: they cannot be written.
    """
    if target.suffix == ".md":
        raise CommandError(f"--json={target}: the table gets this name; end the name in .json")
    if target.is_dir():
        raise CommandError(f"--json={target} is a folder: name a file")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"cannot write {target}: {error.strerror or error}") from None
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise CommandError(f"cannot write {target}: permission denied")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="NAMES",
        help="workloads and frameworks to measure, separated by commas. Without a workload all "
        "workloads, without a framework all frameworks. Workloads: "
        f"{', '.join(WORKLOADS)}. Frameworks: {', '.join(PEERS)}. Tekso is always measured.",
    )
    parser.add_argument("--turns", type=int, default=3, help="processes of each measurement")
    parser.add_argument("--steps", type=int, default=15, help="measured steps of a process")
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="where to write all figures; the table is written beside it as Markdown. Default: "
        "runs/benchmarks/<date>.json",
    )
    parser.add_argument(
        "--cache",
        metavar="FOLDER",
        default=str(environments.default_folder()),
        help="folder of the virtual environments (default: %(default)s)",
    )
    parser.add_argument(
        "--isa",
        choices=list(instruction_sets.VARIABLES),
        default=instruction_sets.OWN,
        help="instructions that the libraries may use: those of this processor, or as far as the "
        "libraries can be limited, those of another one (default: %(default)s)",
    )
    parser.add_argument(
        "--tiny", action="store_true", help="tiny sizes, which check only that everything runs"
    )
    return parser


def chosen(only: str) -> tuple[list[str], list[str]]:
    """Returns the workloads and the peers of `--only`.

    Raises:
      CommandError: a name is unknown, or there is none.
    """
    names = [name.strip() for name in only.split(",") if name.strip()]
    if only and not names:
        raise CommandError(f"--only={only} has no names; --help lists them")
    known = [*WORKLOADS, *PEERS]
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise CommandError(
                f"--only: {name!r} is neither a workload ({', '.join(WORKLOADS)}) nor a "
                f"framework ({', '.join(PEERS)}){hint}"
            )
    workloads = [name for name in WORKLOADS if name in names] or list(WORKLOADS)
    peers = [name for name in PEERS if name in names and name != TEKSO]
    if not peers and TEKSO not in names:
        peers = [name for name in PEERS if name != TEKSO]
    return workloads, [TEKSO, *peers]


def run(options: Any, workloads: Sequence[str], peers: Sequence[str]) -> dict[str, Any]:
    """Installs what is missing, measures, and returns the result, which JSON can represent."""
    before, commit = machine(), _commit()
    pythons, missing = _pythons(peers, Path(options.cache))
    sizes = TINY if options.tiny else WORKLOADS
    with tempfile.TemporaryDirectory() as folder:
        measured = turns.measured(
            peers, workloads, options.turns, _measure(options, pythons, missing, Path(folder)), _say
        )
    return {
        "date": datetime.datetime.now().strftime("%Y-%m-%d %H-%M"),
        "commit": commit,
        "machine": before,
        "turns": options.turns,
        "steps": options.steps,
        "isa": options.isa,
        "sizes": {name: table.sizes(sizes[name]) for name in workloads},
        "workloads": measured,
    }


def _pythons(peers: Sequence[str], cache: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """Returns {peer: its Python} and {peer: why it cannot be installed}."""
    pythons, missing = {}, {}
    for peer in peers:
        name = PEERS[peer].environment
        if name is None:
            pythons[peer] = Path(sys.executable)
            continue
        try:
            pythons[peer] = environments.python_of(cache / name, ENVIRONMENTS[name])
        except environments.InstallError as error:
            missing[peer] = f"cannot be installed: {error}"
            _say(f"{peer} {missing[peer]}")
    return pythons, missing


def _measure(
    options: Any, pythons: dict[str, Path], missing: dict[str, str], folder: Path
) -> Callable[[str, str], turns.Record]:
    """Returns the function that measures a peer and a workload in a new process."""
    common = ["--tiny"] if options.tiny else []

    def measure(peer: str, workload: str) -> turns.Record:
        if peer in missing:
            return {"skipped": missing[peer]}
        weights = folder / f"{workload}.npz"
        if not weights.exists():
            turns.export_weights(Path(sys.executable), workload, weights, common)
        flags = [*common, f"--steps={options.steps}", f"--weights={weights}"]
        limited = instruction_sets.limited(PEERS[peer], options.isa)
        return turns.process(pythons[peer], limited, workload, flags)

    return measure


def _commit() -> str:
    """Returns the commit of this checkout, such as "af5668a6" or "af5668a6-dirty"; "": unknown."""
    command = ["git", "-C", str(turns.ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
