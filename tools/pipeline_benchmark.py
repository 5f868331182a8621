"""tekso-pipeline-benchmark: compares an experiment on one device and in pipelines.

It measures one device with one core, and then pipelines with each schedule, with and without
rematerialization. Each measurement runs in a separate process (tekso-benchmark), one after the
other. All measurements are repeated --turns times. It reports medians of the step time, the CPU
time of all cores, the measured and simulated time of the forward and backward passes, and the peak
memory above weights and slots, each also as a ratio.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from absl import flags

from tekso.framework.commands import typed
from tekso.framework.json_text import to_json
from tekso.framework.tables import table
from tekso.tools import command_flags
from tekso.tools.command_errors import UsageError

PROGRAM = "tekso-pipeline-benchmark"
USAGE = "--model=lm.benchmark.Small --num_stages=2 --num_micro_batches=16"

FLAGS: Any = flags.FlagValues()  # type: ignore[no-untyped-call]


def _define() -> None:
    f = FLAGS
    flags.DEFINE_string("model", None, "Key of the experiment.", flag_values=f)
    flags.DEFINE_integer(
        "num_stages",
        2,
        "Number of devices of a pipeline: execution.num_stages.",
        lower_bound=1,
        flag_values=f,
    )
    flags.DEFINE_integer(
        "num_micro_batches", 16, "Number of micro-batches.", lower_bound=1, flag_values=f
    )
    flags.DEFINE_list(
        "schedules", ["gpipe", "1f1b", "zero_bubble_h1"], "Schedules to measure.", flag_values=f
    )
    flags.DEFINE_list(
        "rematerialize",
        ["none", "all"],
        "Values of execution.rematerialize to measure.",
        flag_values=f,
    )
    flags.DEFINE_integer(
        "turns", 1, "Repetitions of all measurements.", lower_bound=1, flag_values=f
    )
    flags.DEFINE_integer("steps", 10, "Number of measured steps.", lower_bound=1, flag_values=f)
    flags.DEFINE_integer(
        "warmup", 3, "Number of steps before the measured ones.", lower_bound=1, flag_values=f
    )
    flags.DEFINE_multi_string("set", [], "path=value, for all measurements.", flag_values=f)
    flags.DEFINE_multi_string("import", [], "Package with your own experiments.", flag_values=f)
    flags.DEFINE_enum("format", "text", ("text", "json"), "Output format.", flag_values=f)
    command_flags.define_common(f)


_define()


class Case(NamedTuple):
    """A measurement: a name and the flags for `tekso-benchmark`."""

    name: str
    flags: tuple[str, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code: 0 success, 1 error, 2 wrong command line."""
    return command_flags.run(PROGRAM, FLAGS, argv, _run, help_text=_help)


def _usage() -> str:
    return f"{typed(PROGRAM)} {USAGE}"


def _help() -> str:
    purpose = " ".join((__doc__ or "").partition(": ")[2].split())
    return command_flags.help_text(FLAGS, usage=_usage(), purpose=purpose, value_names={})


def _run(words: list[str]) -> None:
    if words:
        raise UsageError(f"{words[0]!r} is not a flag: flags begin with --")
    if not FLAGS.model:
        raise UsageError(f"--model is missing, as in {_usage()}")
    _check_pipelines()
    common = [f"--model={FLAGS.model}", f"--steps={FLAGS.steps}", f"--warmup={FLAGS.warmup}"]
    common += [f"--set={plan}" for plan in FLAGS.set]
    common += [f"--import={package}" for package in FLAGS["import"].value or []]
    found: dict[str, list[dict[str, Any]]] = {}
    for _ in range(FLAGS.turns):
        for case in cases():
            found.setdefault(case.name, []).append(_measured(case, common))
    record = {
        "model": FLAGS.model,
        "num_stages": FLAGS.num_stages,
        "num_micro_batches": FLAGS.num_micro_batches,
        "turns": FLAGS.turns,
        "steps": FLAGS.steps,
        "rows": rows({name: [figures(one) for one in each] for name, each in found.items()}),
        "versions": next(iter(found.values()))[0]["versions"],
        "processor": next(iter(found.values()))[0]["machine"]["processor"],
    }
    print(to_json(record, indent=1) if FLAGS.format == "json" else text(record))


def _check_pipelines() -> None:
    """Checks the flags of the pipelines before the measurements, which take minutes.

    Raises:
      UsageError: a schedule or a rematerialization is unknown, or a schedule does not support the
        number of stages and micro-batches.
    """
    from tekso.framework.execution.pipeline.schedule import schedule_of
    from tekso.framework.execution.pipeline.schedule_check import checked_actions
    from tekso.framework.execution.pipelined import Pipelined

    sizes = {"num_devices": FLAGS.num_stages, "num_micro_batches": FLAGS.num_micro_batches}
    try:
        for again in FLAGS.rematerialize:
            Pipelined.Params(rematerialize=again)
        for schedule in FLAGS.schedules:
            checked_actions(schedule_of(schedule), **sizes)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error


def cases() -> list[Case]:
    """Returns all measurements, one device first."""
    alone = ("data_parallel", "execution.towers=1", "execution.xla=none")
    found = [Case("one device", ("--cores=1", *_execution(*alone)))]
    for again in FLAGS.rematerialize:
        for schedule in FLAGS.schedules:
            settings = (
                f"execution.num_stages={FLAGS.num_stages}",
                f"execution.num_micro_batches={FLAGS.num_micro_batches}",
                f"execution.schedule={schedule}",
                f"execution.rematerialize={again}",
            )
            name = schedule if again == "none" else f"{schedule}, rematerialize {again}"
            found.append(Case(name, _execution("pipelined", *settings)))
    return found


def _execution(name: str, *settings: str) -> tuple[str, ...]:
    return (f"--execution={name}", *(f"--set={plan}" for plan in settings))


def _measured(case: Case, common: Sequence[str]) -> dict[str, Any]:
    """Runs tekso-benchmark in a new process; returns its figures.

    Raises:
      UsageError: tekso-benchmark failed; the message is the last line of its output.
    """
    command = [sys.executable, "-m", "tekso.tools.benchmark", "--format=json", *common]
    done = subprocess.run([*command, *case.flags], capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise UsageError(f"{case.name}: {said[-1] if said else f'exit code {done.returncode}'}")
    record: dict[str, Any] = json.loads(done.stdout)
    return record


def figures(record: dict[str, Any]) -> dict[str, float | None]:
    """Returns those figures of a measurement that the table compares."""
    pipeline = record.get("pipeline", {})
    return {
        "step_ms": record["step_ms"]["median"],
        "cpu_ms": record["cpu_ms"]["median"],
        "pipeline_ms": pipeline.get("measured_ms"),
        "simulated_ms": pipeline.get("simulated_ms"),
        "measured_by_simulated": pipeline.get("measured_by_simulated"),
        "peak_above_state_bytes": record["peak_above_state_bytes"],
    }


def rows(found: dict[str, list[dict[str, float | None]]]) -> list[dict[str, Any]]:
    """Returns the medians over all repetitions, and ratios to one device and to GPipe.

    Args:
      found: {name: figures of every repetition}, one device first.
    """
    result: list[dict[str, Any]] = []
    for name, turns in found.items():
        row: dict[str, Any] = {"name": name}
        for key in turns[0]:
            values = [turn[key] for turn in turns]
            row[key] = None if None in values else statistics.median(values)  # type: ignore[type-var]
        result.append(row)
    first = result[0]
    gpipe = next((row for row in result if row["name"] == "gpipe"), None)
    for row in result:
        row["times_as_fast"] = first["step_ms"] / row["step_ms"]
        row["memory_by_one_device"] = _ratio(row, first)
        row["memory_by_gpipe"] = None if gpipe is None else _ratio(row, gpipe)
    return result


def _ratio(row: dict[str, Any], other: dict[str, Any]) -> float | None:
    below = other["peak_above_state_bytes"]
    ratio: float | None = row["peak_above_state_bytes"] / below if below > 0 else None
    return ratio


_COLUMNS = {
    "step ms": ("step_ms", "{:.1f}"),
    "cpu ms": ("cpu_ms", "{:.1f}"),
    "pipeline ms": ("pipeline_ms", "{:.1f}"),
    "simulated": ("simulated_ms", "{:.1f}"),
    "ratio": ("measured_by_simulated", "{:.3f}"),
    "speedup": ("times_as_fast", "{:.2f}"),
    "memory MiB": ("peak_above_state_bytes", "{:,.0f}"),
    "/ one": ("memory_by_one_device", "{:.2f}"),
    "/ gpipe": ("memory_by_gpipe", "{:.2f}"),
}


def text(record: dict[str, Any]) -> str:
    """Returns the figures as a readable table."""
    rows = []
    for row in record["rows"]:
        cells = [row["name"]]
        for key, form in _COLUMNS.values():
            value = row[key] if key != "peak_above_state_bytes" else row[key] / 2**20
            cells.append("" if value is None else form.format(value))
        rows.append(cells)
    lines = table(["", *_COLUMNS], rows, right=range(1, 1 + len(_COLUMNS)))
    heading = (
        f"{record['model']}: {record['num_stages']} stages, {record['num_micro_batches']} "
        f"micro-batches; medians of {record['turns']} × {record['steps']} steps"
    )
    notes = [
        "pipeline ms: forward and backward passes of a step; simulated: from their mean times",
        "memory: peak of the process, minus weights, slots and its memory before their creation",
        record["processor"],
    ]
    return "\n".join([heading, "", *lines, "", *notes])


if __name__ == "__main__":
    sys.exit(main())
