"""tekso-benchmark: measures the training steps of a registered experiment.

It trains a few steps as tekso-trainer does, and waits for the end of each. It reports tokens per
second, the time to the first step and the peak memory. For a pipeline, it also simulates the
schedule with the measured times. Start a new process for each measurement: earlier work in the
process changes time and memory. Nothing is evaluated, saved or decoded.
"""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
from absl import flags

from tekso.framework.commands import typed
from tekso.framework.json_text import to_json
from tekso.tools import command_flags, experiment_flags
from tekso.tools.command_errors import UsageError

if TYPE_CHECKING:  # slow to import
    from tekso.framework.experiment import Tree
    from tekso.framework.planning.measured_step import MeasuredStep
    from tekso.framework.run.assembly import Assembly

PROGRAM = "tekso-benchmark"
USAGE = "--model=lm.benchmark.Small --steps=20 --format=json"

_STATUS = Path("/proc/self/status")
_WAITING_STEPS = 4

FLAGS: Any = flags.FlagValues()  # type: ignore[no-untyped-call]


def _define() -> None:
    f = FLAGS
    flags.DEFINE_string("model", None, "Key of the experiment.", flag_values=f)
    flags.DEFINE_integer("steps", 20, "Number of measured steps.", lower_bound=1, flag_values=f)
    flags.DEFINE_integer(
        "warmup",
        3,
        "Number of steps before the measured ones, including the first step.",
        lower_bound=1,
        flag_values=f,
    )
    flags.DEFINE_multi_string("set", [], "path=value, as for tekso-trainer.", flag_values=f)
    flags.DEFINE_multi_string("import", [], "Package with your own experiments.", flag_values=f)
    flags.DEFINE_string("execution", None, "As for tekso-trainer.", flag_values=f)
    flags.DEFINE_integer("cpu_devices", None, "As for tekso-trainer.", flag_values=f)
    flags.DEFINE_integer(
        "cores", None, "Number of CPU cores to use. By default all.", lower_bound=1, flag_values=f
    )
    flags.DEFINE_string("tpu", None, "As for tekso-trainer.", flag_values=f)
    flags.DEFINE_string(
        "assets_dir",
        None,
        "Folder to keep learned tokenizers in. By default they are deleted.",
        flag_values=f,
    )
    flags.DEFINE_enum("format", "text", ("text", "json"), "Output format.", flag_values=f)
    command_flags.define_common(f)


_define()


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
    print(to_json(record, indent=1) if FLAGS.format == "json" else text(record))


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
    """Measures an experiment; returns the figures as a dict that JSON can represent.

    Args:
      tree: Params of the experiment.
      model: key of the experiment.
      steps: number of measured steps.
      warmup: number of steps before the measured ones, at least 1.
      assets_dir: folder for what the input learns, such as tokenizers.
      tpu: name or address of a TPU.
      cpu_devices: number of logical CPU devices.
    """
    from tekso.framework import task_results
    from tekso.framework.run.assembly import assemble
    from tekso.framework.run.software_versions import versions

    begin = time.perf_counter()
    tree = tree.copy().set(eval_inputs={})
    parts = assemble(tree, assets_dir=assets_dir, tpu=tpu, cpu_devices=cpu_devices)
    process = memory_bytes("VmRSS")
    parts.program.initialize()
    built = time.perf_counter()
    first = _step(parts, 0)
    first_done = time.perf_counter()
    since_start = time.time() - psutil.Process().create_time()

    for step in range(1, warmup):
        _step(parts, step)
    _forget_peak()
    timed = [_step(parts, step) for step in range(warmup, warmup + steps)]
    step_s = [one.step_s for one in timed]
    state = sum(spec.size_bytes for spec in parts.program.specs().values())
    peak = peak_memory_bytes()
    units, unit = task_results.count(parts.task, parts.input.batch(warmup))
    input_s = [one.input_s for one in timed]
    return {
        "model": model,
        f"{unit}_per_second": units / statistics.median(step_s),
        f"{unit}_per_step": units,
        "step_ms": _spread(step_s),
        "cpu_ms": _spread([one.cpu_s for one in timed]),
        "input_ms": _spread(input_s),
        f"input_{unit}_per_second": units / max(statistics.median(input_s), 1e-9),
        "wait_ms": _spread(_waits(parts, warmup + steps)),
        "time_to_first_step_s": since_start,
        "build_s": built - begin,
        "first_step_s": first_done - built,
        "peak_memory_bytes": peak,
        "state_bytes": state,
        "step_memory_bytes": _tensor_peak_bytes(),
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
    """Times of a training step in seconds, its loss and the trace of a pipeline.

    Attributes:
      step_s: time of the step.
      cpu_s: CPU time of all threads during the step.
      input_s: time to make the batch.
      loss: loss of the step.
      trace: measured timeline; None without a pipeline.
    """

    step_s: float
    cpu_s: float
    input_s: float
    loss: float
    trace: MeasuredStep | None


def _step(parts: Assembly, step: int) -> _Step:
    """Trains and measures one step."""
    from tekso.framework.planning.measured_step import measured_step_of

    begin = time.perf_counter()
    batch = parts.input.batch(step)
    ready, busy = time.perf_counter(), time.process_time()
    loss = float(parts.program.train_step(batch, step)["loss"])
    step_s, cpu_s = time.perf_counter() - ready, time.process_time() - busy
    return _Step(step_s, cpu_s, ready - begin, loss, measured_step_of(parts.program))


def _waits(parts: Assembly, start: int) -> list[float]:
    """Returns how long further steps wait for batches that are prefetched, as in training."""
    from tekso.framework.input.prefetch import Prefetch

    waits = []
    with Prefetch(parts.input.batch, start=start, stop=start + _WAITING_STEPS) as batches:
        for step in range(start, start + _WAITING_STEPS):
            begin = time.perf_counter()
            batch = next(batches)
            waits.append(time.perf_counter() - begin)
            float(parts.program.train_step(batch, step)["loss"])
    return waits[1:]  # nothing was computed while the first batch was prepared


def _pipeline_figures(traces: Sequence[Any]) -> dict[str, Any]:
    """Returns the measured and the simulated time of the forward and backward passes."""
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
    """Restricts this process, and the threads that it starts, to the first `count` cores."""
    if count is None:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise UsageError("--cores: this system cannot restrict a process to some of its cores")
    available = sorted(os.sched_getaffinity(0))
    if count > len(available):
        raise UsageError(
            f"--cores={count}: must be at most {len(available)}, the number of cores available"
        )
    os.sched_setaffinity(0, available[:count])


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    """Returns median, minimum and maximum, in milliseconds."""
    chosen = {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}
    return {name: 1000.0 * value for name, value in chosen.items()}


def peak_memory_bytes() -> int:
    """Returns the peak memory of this process."""
    if _STATUS.exists():  # on Linux, getrusage includes the memory of the parent process
        return memory_bytes("VmHWM")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _forget_peak() -> None:
    """Makes the peak memory of tensors begin anew."""
    import tensorflow as tf

    for device in tf.config.list_logical_devices():
        with contextlib.suppress(ValueError):  # without statistics
            tf.config.experimental.reset_memory_stats(device.name)


def _tensor_peak_bytes() -> int | None:
    """Returns the largest memory of tensors on a device since `_forget_peak`; None: unknown.

    With oneDNN on a CPU, TensorFlow leaves out tensors of fewer than 256 KiB.
    """
    import tensorflow as tf

    found = []
    for device in tf.config.list_logical_devices():
        with contextlib.suppress(ValueError):
            found.append(int(tf.config.experimental.get_memory_info(device.name)["peak"]))
    return max(found, default=None)


def memory_bytes(name: str) -> int:
    """Returns the memory of this process: "VmRSS" for the current one, "VmHWM" for the peak."""
    if not _STATUS.exists():
        return int(psutil.Process().memory_info().rss)
    return 1024 * int(_STATUS.read_text().partition(f"{name}:")[2].split()[0])


def machine() -> dict[str, Any]:
    """Returns a description of the machine."""
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


def _spread_text(step_ms: Mapping[str, float], steps: int) -> str:
    """Returns how many steps a time is of, and from where to where they are."""
    if steps == 1:
        return "of a single step, without a spread"
    return f"the median of {steps} steps ({step_ms['min']:.1f} to {step_ms['max']:.1f})"


def text(record: dict[str, Any]) -> str:
    """Returns the figures as readable text."""
    unit = next(name for name in record if name.endswith("_per_second"))
    step, input, name = record["step_ms"], record["input_ms"], unit.removesuffix("_per_second")
    lines = [
        f"{record['model']}: {record['total_weights']:,} weights, {record['execution']}",
        f"{record[unit]:,.0f} {name}/s",
        f"step {step['median']:.1f} ms, {_spread_text(step, record['steps'])}",
        f"input {input['median']:.2f} ms, {record[f'input_{unit}']:,.0f} {name}/s; "
        f"with prefetching a step waits {record['wait_ms']['median']:.2f} ms",
        f"first step {record['time_to_first_step_s']:.1f} s after the start of the process "
        f"(build {record['build_s']:.1f} s, step {record['first_step_s']:.1f} s)",
        f"peak memory {record['peak_memory_bytes'] / 2**20:,.0f} MiB, "
        f"{record['peak_above_state_bytes'] / 2**20:,.0f} MiB above weights and slots",
        ", ".join(f"{name} {version}" for name, version in record["versions"].items()),
        f"{record['machine']['processor']}, {record['machine']['cores']} cores",
    ]
    if "pipeline" in record:
        took = record["pipeline"]
        lines.insert(
            3,
            f"forward and backward passes {took['measured_ms']:.1f} ms, simulated "
            f"{took['simulated_ms']:.1f} ms, ratio {took['measured_by_simulated']:.3f}",
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
