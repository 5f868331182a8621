"""tekso-benchmark: measures the training steps of a registered experiment.

It trains a few steps as the trainer would, one after the other, each waited for, and tells tokens a
second, the time to the first step and the peak of memory. A fresh process a measurement: what ran
before in a process changes both. Nothing is evaluated, saved or decoded.
"""

from __future__ import annotations

import json
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from absl import flags

from tekso.tools import command_errors, command_flags, experiment_flags
from tekso.tools.command_errors import OK, UsageError

if TYPE_CHECKING:  # slow to import
    from tekso.framework.experiment import Tree
    from tekso.framework.run.assembly import Assembly

PROGRAM = "tekso-benchmark"
USAGE = f"{PROGRAM} --model=lm.benchmark.Small --steps=20 --format=json"

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
    flags.DEFINE_string("tpu", None, "As for tekso-trainer.", flag_values=f)
    flags.DEFINE_string(
        "assets_dir",
        None,
        "Folder where tokenizers that are learned are kept; None forgets them.",
        flag_values=f,
    )
    flags.DEFINE_enum("format", "text", ("text", "json"), "What is printed.", flag_values=f)
    flags.DEFINE_boolean("traceback", False, "Show whole tracebacks.", flag_values=f)
    flags.DEFINE_boolean("help", False, "Show this text.", short_name="h", flag_values=f)


_define()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code: 0 done, 1 an error, 2 a wrong command line."""
    argv = list(sys.argv if argv is None else argv)
    return command_errors.run(PROGRAM, lambda: _run(argv), show_traceback="--traceback" in argv)


def _run(argv: list[str]) -> int:
    words = command_flags.parse(FLAGS, argv)
    if FLAGS.help:
        names = {"set": "path=value", "import": "package", "model": "key"}
        purpose = " ".join((__doc__ or "").partition(": ")[2].split())
        print(command_flags.help_text(FLAGS, usage=USAGE, purpose=purpose, value_names=names))
        return OK
    if words:
        raise UsageError(f"{words[0]!r} is no flag: flags begin with --")
    if not FLAGS.model:
        raise UsageError(f"--model is missing, as in {USAGE}")

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
    return OK


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
    from tekso.framework.run.assembly import assemble
    from tekso.framework.run.checkpoint_files import versions

    begin = time.perf_counter()
    tree = tree.copy().set(eval_inputs={})
    parts = assemble(tree, assets_dir=assets_dir, tpu=tpu, cpu_devices=cpu_devices)
    parts.program.initialize()
    built = time.perf_counter()
    _, _, first_loss = _step(parts, 0)
    first_done = time.perf_counter()
    since_start = time.time() - psutil.Process().create_time()

    timed = [_step(parts, step) for step in range(1, warmup + steps)][warmup - 1 :]
    step_s = [one for one, _, _ in timed]
    units, unit = parts.task.count(parts.input.batch(warmup))
    return {
        "model": model,
        f"{unit}_per_second": units / statistics.median(step_s),
        f"{unit}_per_step": units,
        "step_ms": _spread(step_s),
        "input_ms": _spread([one for _, one, _ in timed]),
        "time_to_first_step_s": since_start,
        "build_s": built - begin,
        "first_step_s": first_done - built,
        "peak_memory_bytes": peak_memory_bytes(),
        "steps": steps,
        "warmup": warmup,
        "first_loss": first_loss,
        "last_loss": timed[-1][2],
        "total_weights": sum(spec.size for spec in parts.task.specs().values()),
        "execution": type(parts.tree.execution).owner.__name__,
        "execution_params": parts.tree.execution.to_text(),
        "versions": versions(),
        "machine": machine(),
    }


def _step(parts: Assembly, step: int) -> tuple[float, float, float]:
    """Trains one step; returns seconds of the step, seconds of its batch, and the loss."""
    begin = time.perf_counter()
    batch = parts.input.batch(step)
    ready = time.perf_counter()
    loss = float(parts.program.train_step(batch, step)["loss"])
    return time.perf_counter() - ready, ready - begin, loss


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest, in milliseconds."""
    chosen = {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}
    return {name: 1000.0 * value for name, value in chosen.items()}


def peak_memory_bytes() -> int:
    """The most memory that this process held at once."""
    status = Path("/proc/self/status")
    if status.exists():  # what getrusage says there includes the process that started this one
        return 1024 * int(status.read_text().partition("VmHWM:")[2].split()[0])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


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
        f"peak memory {record['peak_memory_bytes'] / 2**20:,.0f} MiB",
        ", ".join(f"{name} {version}" for name, version in record["versions"].items()),
        f"{record['machine']['processor']}, {record['machine']['cores']} cores",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
