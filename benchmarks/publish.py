"""Stores results of `make benchmarks`, and writes the tables of README.md and docs/speed.md.

    python -m benchmarks.publish runs/benchmarks/2026-01-02_03-04.json

Without a file, it only writes the tables again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import documents, stored, table

ROOT = Path(__file__).resolve().parent.parent


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Runs the command and returns the exit code: 0 success, 1 nothing was written."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.publish", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "results", nargs="*", metavar="RESULT.json", help="what `make benchmarks` wrote"
    )
    try:
        written = publish([Path(name) for name in parser.parse_args(argv).results], root)
    except (stored.StoreError, documents.MarkerError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    for path, text in written.items():
        path.parent.mkdir(exist_ok=True)  # the folder of the first result
        path.write_text(text)
        print(f"Written: {path.relative_to(root)}")
    return 0


def publish(new: Sequence[Path], root: Path) -> dict[Path, str]:
    """Returns {file: its text} for the stored results with new ones, and for the documents.

    Args:
      new: results that run.py wrote.
      root: the checkout.

    Raises:
      StoreError: a new result cannot be stored.
      MarkerError: a document has no place for its tables.
    """
    folder = root / stored.FOLDER
    results = {path: stored.read(path) for path in sorted(folder.glob("*.json"))}
    changed: dict[Path, str] = {}
    for path in new:
        result = _read(path)
        target = folder / f"{stored.name_of(result['machine'], result['isa'])}.json"
        results[target] = stored.added(results.get(target), result)
        changed[target] = stored.text(results[target])
    return changed | documents.written([results[path] for path in sorted(results)], root)


def _read(path: Path) -> stored.Result:
    """Returns a result that can be stored; warns if the machine was not idle."""
    try:
        result: stored.Result = json.loads(path.read_text())
        stored.check(result)
    except (OSError, ValueError, stored.StoreError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise stored.StoreError(f"{path} cannot be stored: {reason}") from None
    load = result["machine"]["load_before"]
    if load > table.BUSY:
        print(f"benchmarks: warning: {path}: the load average was {load:.1f}", file=sys.stderr)
    return result


if __name__ == "__main__":
    sys.exit(main())
