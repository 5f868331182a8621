"""Prints the planned and the measured time and memory of training steps, side by side.

    python -m tekso.tools.plan_accuracy                       small experiments, and changed ones
    python -m tekso.tools.plan_accuracy lm.python_source.Tiny 'lm.python_source.Tiny *.num_layers=2'
    python -m tekso.tools.plan_accuracy several_devices       meshes and data-parallel execution
    python -m tekso.tools.plan_accuracy pipelines
    python -m tekso.tools.plan_accuracy stages_on_meshes
    python -m tekso.tools.plan_accuracy 'image.digits.Mlp --execution=data_parallel --devices=2'

Every measurement is a process of tekso-benchmark, and every plan one of `--mode=plan`, with the
same settings. Arguments are a key, settings, --execution and --devices: logical devices of the CPU,
which share its cores and its memory, so the memory is that of all of them. Of the time, the CPU
time of all cores is compared too: unlike the time that passes, it hardly depends on other programs
on the machine. Of the memory, tensors of 256 KiB and more are compared, because TensorFlow's
statistics leave out smaller ones.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from tekso.framework.tables import table
from tekso.tools import command_flags
from tekso.tools.command_errors import FAILED, OK
from tekso.tools.tool_processes import record_of, why_failed

REGISTERED = (
    "lm.python_source.Tiny",
    "lm.python_source.TinyLstm",
    "lm.python_source.TinyMoe",
    "lm.benchmark.Small",
    "mt.cldr.EnDe",
    "mt.cldr.EnDeLstm",
    "image.digits.Mlp",
    "image.digits.Cnn",
    "image.unet.Digits",
)

CHANGED = (
    "lm.python_source.Tiny task.model.stack.num_layers=8",
    "lm.python_source.Tiny input.length=512 input.batch_size=8",
    "lm.python_source.Tiny task.model.dim=256 task.model.stack.layer.feed_forward.hidden_dim=512",
    "image.digits.Mlp task.model.hidden_dims=[2048,1024]",
    "image.digits.Cnn input.batch_size=256",
)
"""Models that are not registered."""

_TENSOR = "mlp:x;heads:x;vocab:x"
_SHARDED = {
    "image.digits.Mlp": "execution.rules=mlp:x",
    "image.digits.Cnn": "execution.rules=batch:x execution.weights_axis=x",
    "lm.python_source.Tiny": f"execution.rules={_TENSOR}",
    "mt.cldr.EnDe": f"execution.rules={_TENSOR}",
}
"""Layouts on the axis "x" that shard weights."""

SEVERAL_DEVICES = tuple(
    f"{key} --devices={n} --execution={execution}"
    for key, sharded in _SHARDED.items()
    for n in (2, 4)
    for execution in (
        f"mesh_sharded execution.mesh=x:{n} execution.rules=batch:x",
        f"mesh_sharded execution.mesh=x:{n} {sharded}",
        *(["data_parallel"] if n == 2 else []),
    )
)
"""Steps on several devices of this machine."""

PIPELINES = tuple(
    f"{key} --execution=pipelined execution.num_stages=2 execution.num_micro_batches=4"
    for key in (
        "image.digits.Mlp",
        "image.digits.Cnn",
        "lm.python_source.Tiny",
        "lm.python_source.TinyLstm",
        "mt.cldr.EnDe",
        "lm.benchmark.Small",
    )
)

STAGES_ON_MESHES = tuple(
    f"lm.python_source.TinyMeshPipeline --devices=4 {settings}"
    for settings in (
        "",
        "execution.num_micro_batches=2",
        "execution.stages_on.rules=batch:model",
        "input.length=512",
    )
)
"""Two stages, each on a mesh of two devices."""

_GROUPS = {
    "several_devices": SEVERAL_DEVICES,
    "pipelines": PIPELINES,
    "stages_on_meshes": STAGES_ON_MESHES,
}
_LEAST_WARMUP, _MOST_WARMUP, _WARMUP_S = 3, 100, 5.0  # steps, steps, seconds

_HEADER = ("model", "step planned", "measured", "", "CPU planned", "measured", "", "memory planned",
           "measured", "")  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Prints the table; returns the exit code."""
    return command_flags.run_words("plan_accuracy", argv, _compare, text=__doc__)


def _compare(words: Sequence[str]) -> int:
    rows, failed = [], False
    wanted = [text for word in words for text in _GROUPS.get(word, (word,))]
    for text in wanted or [*REGISTERED, *CHANGED]:
        key, *rest = shlex.split(text)
        try:
            rows.append((text, *_figures(key, rest)))
        except subprocess.CalledProcessError as error:
            print(f"{text}: {why_failed(error)}", file=sys.stderr)
            failed = True
    print("\n".join(table(_HEADER, rows, right=tuple(range(1, 10)))))
    return FAILED if failed else OK


def _figures(key: str, words: Sequence[str]) -> tuple[str, ...]:
    flags = [f"--model={key}", "--format=json"]
    flags += [word if word.startswith("--") else f"--set={word}" for word in words]
    with tempfile.TemporaryDirectory() as folder:
        planned = record_of("trainer", "--mode=plan", f"--logdir={folder}/run", *flags)["step"]
    warmup = f"--warmup={_warmup_steps(planned['seconds'])}"
    devices = [f.replace("--devices=", "--cpu_devices=") for f in flags]
    measured = record_of("benchmark", *devices, "--steps=15", warmup)
    memory = measured["step_memory_bytes"]
    return (
        *_compared(planned["seconds"], measured["step_ms"]["median"] / 1e3, 1e3, "ms"),
        *_compared(planned["core_seconds"], measured["cpu_ms"]["median"] / 1e3, 1e3, "ms"),
        *_compared(planned["counted_bytes"], memory, 1e-6, "MB"),
    )


def _compared(
    planned: float | None, measured: float | None, scale: float, unit: str
) -> tuple[str, str, str]:
    """Returns the columns of a planned and a measured figure.

    An execution may lack one, such as the memory of stages on meshes.

    Args:
      planned: the planned figure.
      measured: the measured one.
      scale: of the unit that is printed.
      unit: this unit.
    """
    texts = ["-" if x is None else f"{scale * x:.4g} {unit}" for x in (planned, measured)]
    if planned is None or not measured:
        return texts[0], texts[1], "-"
    return texts[0], texts[1], f"{100 * (planned / measured - 1):+.0f} %"


def _warmup_steps(step_s: float) -> int:
    """Returns the number of steps before the measured ones: 5 seconds of them, at most 100.

    TensorFlow first hands every op to another thread. It learns in some 90 steps which ops are too
    short for that.
    """
    return min(_MOST_WARMUP, max(_LEAST_WARMUP, int(_WARMUP_S / max(step_s, 1e-9))))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
