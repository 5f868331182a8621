"""tekso-compare: compares runs, and groups of runs that differ in the seed."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from absl import flags

from tekso.framework import files
from tekso.framework.commands import typed
from tekso.framework.counting import counted
from tekso.framework.spelling import close_matches
from tekso.tools import command_flags
from tekso.tools.command_errors import OK, UsageError
from tekso.tools.comparison.runs import Best

PROGRAM = "tekso-compare"
_MOST_FIELDS = 30  # that are printed
USAGE = "runs/a runs/b --output=comparison.html"

# A separate FlagValues, so that --help lists only these flags.
FLAGS: Any = flags.FlagValues()  # type: ignore[no-untyped-call]


def _define() -> None:
    flags.DEFINE_string(
        "metric",
        None,
        "The curve that is compared, such as dev/loss. By default bits per byte or the loss of the "
        "first evaluation.",
        flag_values=FLAGS,
    )
    flags.DEFINE_enum(
        "axis",
        None,
        ("step", "seen", "seconds"),
        "Compare at the last step that all runs have (the default), at the same number of tokens "
        "or examples seen, or at the same time.",
        flag_values=FLAGS,
    )
    flags.DEFINE_string(
        "output",
        "comparison.html",
        "File to write, one HTML file without scripts. The CSV file beside it has all curves.",
        flag_values=FLAGS,
    )
    command_flags.define_common(FLAGS)


_define()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool; returns the exit code, one of `ExitCode`."""
    return command_flags.run(PROGRAM, FLAGS, argv, _run, help_text=_help)


def _help() -> str:
    return command_flags.help_text(
        FLAGS,
        usage=f"{typed(PROGRAM)} {USAGE}",
        purpose="Compares runs: Params that differ and where each was set, curves, samples, cost. "
        "Runs that differ in the seed only are a group, with mean, spread and Welch's t test.",
        value_names={"metric": "curve", "output": "path"},
    )


def _run(words: list[str]) -> int:
    if not words:
        raise UsageError(f"a run is missing, as in {typed(PROGRAM)} {USAGE}")
    if "" in words:
        raise UsageError("an argument is empty: give the folder of a run")
    output = os.path.expanduser(FLAGS.output)
    if not output.endswith(".html") or files.is_folder(output):
        found = ", but this is a folder" if files.is_folder(output) else ""
        raise UsageError(f"--output={FLAGS.output}: expected a file that ends with .html{found}")
    return compare(words, output=output, metric=FLAGS.metric, axis=FLAGS.axis)


def compare(
    paths: Sequence[str],
    *,
    output: str,
    metric: str | None = None,
    best: Best | None = None,
    axis: str | None = None,
) -> int:
    """Prints a comparison of runs, and writes it as HTML and CSV; returns the exit code.

    Args:
      paths: logdirs of the runs.
      output: file to write, *.html.
      metric: the curve to compare; None: see `main_metric`.
      best: which values of the curve are best; None: those at one position are compared.
      axis: "step", "seen" or "seconds"; None: see `alignment.equal_positions`.

    Raises:
      UsageError: a folder has no run, or no run has the metric or the axis.
    """
    from tekso.framework.tables import table, terminal_width
    from tekso.tools.comparison import fields, page, runs, tables

    distinct: dict[str, str] = {}  # a run that is given twice is one run
    for path in paths:
        distinct.setdefault(os.path.realpath(os.path.expanduser(path)), path.rstrip("/"))
    found = [runs.read(path) for path in distinct.values()]
    metric = metric or runs.main_metric(found)
    known = list(dict.fromkeys(key for run in found for key in (*run.curves, *run.not_finite)))
    if metric not in known:
        close = close_matches(metric, known, count=1, cutoff=0.75)  # they begin alike
        hint = f"did you mean {close[0]}? The" if close else "the"
        damage = "".join(f"; {run.damage}" for run in found if run.damage)
        raise UsageError(
            f"no run has the curve {metric}; {hint} runs have: {', '.join(known) or 'none'}{damage}"
        )
    groups = runs.groups(found)
    ordered = [run for group in groups for run in group.runs]
    different = fields.to_show(runs.differences(ordered), ordered)
    shown = [tables.results(groups, metric, best, axis), tables.cost(groups)]
    width = terminal_width(sys.stdout)
    for one in shown:
        print(f"{one.title}\n")
        print("\n".join(table(one.header, one.rows, right=one.right, width=width)))
        print("".join(f"\n{note}" for note in one.notes[:-1]) + "\n" * bool(one.notes[:-1]))
    if different:
        print("Params that differ\n")
    for field in different[:_MOST_FIELDS]:
        print(fields.line(field, ordered))
    if len(different) > _MOST_FIELDS:
        more = counted(len(different) - _MOST_FIELDS, "field")
        print(f"… and {more} of Params that differ, in {output}")
    sheet = f"{output.removesuffix('.html')}.csv"
    texts = {output: page.page(groups, different, shown), sheet: tables.csv_text(groups)}
    for path, text in texts.items():  # the name of a folder may be no UTF-8
        files.write_atomically(path, text.encode("utf-8", "backslashreplace"))
    print(f"\nwrote {output} and {sheet}")
    return OK


if __name__ == "__main__":
    sys.exit(main())
