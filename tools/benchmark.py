"""tekso-benchmark: measures the training steps of a registered experiment.

It trains a few steps as the trainer would, one after the other, each waited for, and tells tokens a
second, the time to the first step and the peak of memory; of a pipeline also how long its schedule
would take by what its work took (`measured_step`). A fresh process a measurement: what ran
before in a process changes both. Nothing is evaluated, saved or decoded.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
from absl import flags

from tekso.framework.commands import typed
from tekso.tools import command_flags, experiment_flags
from tekso.tools.command_errors import UsageError

if TYPE_CHECKING:  # slow to import
    from tekso.framework.experiment import Tree
    from tekso.framework.planning.measured_step import MeasuredStep
    from tekso.framework.run.assembly import Assembly

PROGRAM = "tekso-benchmark"
USAGE = "--model=lm.benchmark.Small --steps=20 --format=json"

_STATUS = Path("/proc/self/status")

FLAGS: Any = flags.FlagValues()  # type: ignore[no-untyped-call]


def _define() -> None:
    f = FLAGS
    flags.DEFINE_string("model", None, "Key of the experiment.", flag_values=f)
    flags.DEFINE_integer("steps", 20, "Steps that are measured.", lower_bound=1, flag_values=f)
    flags.DEFINE_integer(
        "warmup", 3, "Steps before those, the first among them.", lower_bound=1, flag_values=f
    )
    flags.DEFINE_multi_string("set", [], "path=value, as for tekso-trainer.", flag_values=f)
    flags.DEFINE_multi_string("import", [], "Package with experiments of your own.", flag_values=f)
    flags.DEFINE_string("execution", None, "As for tekso-trainer.", flag_values=f)
    flags.DEFINE_integer("cpu_devices", None, "As for tekso-trainer.", flag_values=f)
    flags.DEFINE_integer(
        "cores", None, "Cores that may be used; None: all.", lower_bound=1, flag_values=f
    )
    flags.DEFINE_string("tpu", None, "As for tekso-trainer.", flag_values=f)
    flags.DEFINE_string(
        "assets_dir",
        None,
        "Folder where tokenizers that are learned are kept; None forgets them.",
        flag_values=f,
    )
    flags.DEFINE_enum("format", "text", ("text", "json"), "What is printed.", flag_values=f)
    command_flags.define_common(f)


_define()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code: 0 done, 1 an error, 2 a wrong command line."""
    return command_flags.run(PROGRAM, FLAGS, argv, _run, help_text=_help)


def _usage() -> str:
    return f"{typed(PROGRAM)} {USAGE}"


def _help() -> str:
    names = {"set": "path=value", "import": "package", "model": "key"}
    purpose = " ".join((__doc__ or "").partition(": ")[2].split())
    return command_flags.help_text(FLAGS, usage=_usage(), purpose=purpose, value_names=names)


def _run(words: list[str]) -> None:
    if words:
        raise UsageError(f"{words[0]!r} is no flag: flags begin with --")
    if not FLAGS.model:
        raise UsageError(f"--model is missing, as in {_usage()}")

    _use_cores(FLAGS.cores)
    experiment_flags.load(FLAGS.model, FLAGS["import"].value or [])
    tree = experiment_flags.experiment(FLAGS.model)().tree()
    experiment_flags.change(tree, execution=FLAGS.execution, settings=FLAGS.set)
    with tempfile.TemporaryDirectory() as folder:
        record = measure(
            tree,
            model=FLAGS.model,
            steps=FLAGS.steps,
            warmup=FLAGS.warmup,
            assets_dir=FLAGS.assets_dir or folder,
            tpu=FLAGS.tpu,
            cpu_devices=FLAGS.cpu_devices,
        )
    print(json.dumps(record, indent=1) if FLAGS.format == "json" else text(record))


def measure(
    tree: Tree.Params,
    *,
    model: str,
    steps: int = 20,
    warmup: int = 3,
    assets_dir: str,
    tpu: str | None = None,
    cpu_devices: int | None = None,
) -> dict[str, Any]:
    """Returns the figures of an experiment, in a form that JSON can hold.

    Args:
      tree: its Params.
      model: its key.
      steps: how many are measured.
      warmup: how many come before, at least 1.
      assets_dir: where its input keeps what it learns.
      tpu: name or address of a TPU.
      cpu_devices: number of logical CPU devices.
    """
    from tekso.framework import task_results
    from tekso.framework.run.assembly import assemble
    from tekso.framework.run.checkpoint_files import versions

    begin = time.perf_counter()
    tree = tree.copy().set(eval_inputs={})
    parts = assemble(tree, assets_dir=assets_dir, tpu=tpu, cpu_devices=cpu_devices)
    process = memory_bytes("VmRSS")
    parts.program.initialize()
    built = time.perf_counter()
    first = _step(parts, 0)
    first_done = time.perf_counter()
    since_start = time.time() - psutil.Process().create_time()

    timed = [_step(parts, step) for step in range(1, warmup + steps)][warmup - 1 :]
    step_s = [one.step_s for one in timed]
    state = sum(spec.size_bytes for spec in parts.program.specs().values())
    peak = peak_memory_bytes()
    units, unit = task_results.count(parts.task, parts.input.batch(warmup))
    return {
        "model": model,
        f"{unit}_per_second": units / statistics.median(step_s),
        f"{unit}_per_step": units,
        "step_ms": _spread(step_s),
        "cpu_ms": _spread([one.cpu_s for one in timed]),
        "input_ms": _spread([one.input_s for one in timed]),
        "time_to_first_step_s": since_start,
        "build_s": built - begin,
        "first_step_s": first_done - built,
        "peak_memory_bytes": peak,
        "state_bytes": state,
        "peak_above_state_bytes": peak - process - state,
        **_pipeline_figures([one.trace for one in timed if one.trace is not None]),
        "steps": steps,
        "warmup": warmup,
        "first_loss": first.loss,
        "last_loss": timed[-1].loss,
        "total_weights": sum(spec.size for spec in parts.task.specs().values()),
        "execution": type(parts.tree.execution).owner.__name__,
        "execution_params": parts.tree.execution.to_text(),
        "versions": versions(),
        "machine": machine(),
    }


class _Step(NamedTuple):
    """What a step took: seconds of the step, of all threads in it, and of its batch."""

    step_s: float
    cpu_s: float
    input_s: float
    loss: float
    trace: MeasuredStep | None


def _step(parts: Assembly, step: int) -> _Step:
    """Trains one step."""
    from tekso.framework.planning.measured_step import measured_step_of

    begin = time.perf_counter()
    batch = parts.input.batch(step)
    ready, busy = time.perf_counter(), time.process_time()
    loss = float(parts.program.train_step(batch, step)["loss"])
    step_s, cpu_s = time.perf_counter() - ready, time.process_time() - busy
    return _Step(step_s, cpu_s, ready - begin, loss, measured_step_of(parts.program))


def _pipeline_figures(traces: Sequence[Any]) -> dict[str, Any]:
    """Forwards and backwards of a pipeline: as measured, and simulated from their mean times."""
    if not traces:
        return {}
    measured = [max(one.makespan for one in trace.measured) for trace in traces]
    return {
        "pipeline": {
            "measured_ms": statistics.median(measured),
            "simulated_ms": statistics.median(trace.predicted.makespan for trace in traces),
            "measured_by_simulated": statistics.median(trace.ratio for trace in traces),
        }
    }


def _use_cores(count: int | None) -> None:
    """Lets this process, and the threads that it will start, use so many cores."""
    if count is None:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise UsageError("--cores: this system cannot keep a process to some of its cores")
    there = sorted(os.sched_getaffinity(0))
    if count > len(there):
        raise UsageError(f"--cores={count}: this process may use {len(there)}")
    os.sched_setaffinity(0, there[:count])


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest, in milliseconds."""
    chosen = {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}
    return {name: 1000.0 * value for name, value in chosen.items()}


def peak_memory_bytes() -> int:
    """The most memory that this process held at once."""
    if _STATUS.exists():  # what getrusage says there includes the process that started this one
        return memory_bytes("VmHWM")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def memory_bytes(name: str) -> int:
    """Returns what the system says of the memory of this process: "VmRSS" now, "VmHWM" at most."""
    if not _STATUS.exists():
        return int(psutil.Process().memory_info().rss)
    return 1024 * int(_STATUS.read_text().partition(f"{name}:")[2].split()[0])


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity")
        else psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
    }  # fmt: skip


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


def text(record: dict[str, Any]) -> str:
    """Returns the figures as lines for people."""
    unit = next(name for name in record if name.endswith("_per_second"))
    step, input = record["step_ms"], record["input_ms"]
    lines = [
        f"{record['model']}: {record['total_weights']:,} weights, {record['execution']}",
        f"{record[unit]:,.0f} {unit.removesuffix('_per_second')}/s",
        f"step {step['median']:.1f} ms median of {record['steps']} ({step['min']:.1f} to "
        f"{step['max']:.1f}), its batch {input['median']:.2f} ms",
        f"first step {record['time_to_first_step_s']:.1f} s after the start of the process "
        f"(building {record['build_s']:.1f} s, the step {record['first_step_s']:.1f} s)",
        f"peak memory {record['peak_memory_bytes'] / 2**20:,.0f} MiB, "
        f"{record['peak_above_state_bytes'] / 2**20:,.0f} MiB above the state",
        ", ".join(f"{name} {version}" for name, version in record["versions"].items()),
        f"{record['machine']['processor']}, {record['machine']['cores']} cores",
    ]
    if "pipeline" in record:
        took = record["pipeline"]
        lines.insert(
            3,
            f"forwards and backwards {took['measured_ms']:.1f} ms, simulated "
            f"{took['simulated_ms']:.1f} ms, ratio {took['measured_by_simulated']:.3f}",
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
