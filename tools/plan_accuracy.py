"""Prints the planned and the measured time and memory of training steps, side by side.

    python -m tekso.tools.plan_accuracy                       small experiments, and changed ones
    python -m tekso.tools.plan_accuracy lm.python_source.Tiny 'lm.python_source.Tiny *.num_layers=2'
    python -m tekso.tools.plan_accuracy several_devices       meshes and data-parallel execution
    python -m tekso.tools.plan_accuracy pipelines
    python -m tekso.tools.plan_accuracy stages_on_meshes
    python -m tekso.tools.plan_accuracy 'image.digits.Mlp --execution=data_parallel --devices=2'

Every measurement is a process of tekso-benchmark, and every plan one of `--mode=plan`, with the
same settings. A machine that others share, such as a virtual one, changes its speed from minute to
minute. So each step is measured in three rounds, all steps in each; the median is compared, and the
least and the most are beside it. --rounds=N sets another number.

Arguments are a key, settings, --execution and --devices: logical devices of the CPU, which share
its cores and its memory, so the memory is that of all of them. Of the time, the CPU time of all
cores is compared too: unlike the time that passes, it hardly depends on other programs on the
machine. Of the memory, tensors of 256 KiB and more are compared, because TensorFlow's statistics
leave out smaller ones.
"""

from __future__ import annotations

import itertools
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

from absl import flags

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
_LEAST_STEPS, _MOST_STEPS, _STEPS_S = 15, 300, 1.5  # the same of the measured steps
_TIME_GOAL, _MEMORY_GOAL = 0.25, 0.15

_HEADER = (
    "model", "step planned", "measured", "least", "most", "", "CPU planned", "measured", "",
    "memory planned", "measured", "",
)  # fmt: skip

FLAGS: Any = flags.FlagValues()  # type: ignore[no-untyped-call]


def _define() -> None:
    flags.DEFINE_integer(
        "rounds", 3, "How often each step is measured.", lower_bound=1, flag_values=FLAGS
    )
    command_flags.define_common(FLAGS)


_define()


class _Figures(NamedTuple):
    """Planned or measured figures of a step; None: there is none, such as of stages on meshes."""

    seconds: float
    core_seconds: float | None
    memory_bytes: float | None


def main(argv: Sequence[str]) -> int:
    """Prints the table; returns the exit code."""
    return command_flags.run(
        "plan_accuracy", FLAGS, argv, _compare, help_text=lambda: (__doc__ or "").strip()
    )


def _compare(words: Sequence[str]) -> int:
    wanted = [text for word in words for text in _GROUPS.get(word, (word,))]
    texts = dict.fromkeys(wanted or [*REGISTERED, *CHANGED])
    planned: dict[str, _Figures] = {}
    measured: dict[str, list[_Figures]] = {text: [] for text in texts}
    failed: set[str] = set()
    for number, text in itertools.product(range(FLAGS.rounds), texts):
        if text in failed:
            continue
        key, *rest = shlex.split(text)
        try:
            if text not in planned:
                planned[text] = _planned(key, rest)
            measured[text].append(_measured(key, rest, planned[text].seconds))
        except subprocess.CalledProcessError as error:
            print(f"{text}: {why_failed(error)}", file=sys.stderr)
            failed.add(text)
            continue
        step = f"planned {_text(planned[text].seconds, 1e3, 'ms')}, measured "
        step += _text(measured[text][-1].seconds, 1e3, "ms")
        print(f"round {number + 1} of {FLAGS.rounds}: {text}: {step}", file=sys.stderr, flush=True)
    complete = [text for text in texts if text not in failed]
    rows = [(text, *_columns(planned[text], measured[text])) for text in complete]
    print("\n".join(table(_HEADER, rows, right=tuple(range(1, len(_HEADER))))))
    middles = [_middle(measured[text]) for text in complete]
    for name, goal, at in (("time", _TIME_GOAL, 0), ("memory", _MEMORY_GOAL, 2)):
        both = zip(complete, middles, strict=True)
        found = [_error(planned[text][at], middle[at]) for text, middle in both]
        errors = [abs(one) for one in found if one is not None]
        within = sum(error <= goal for error in errors)
        print(f"{name} within {100 * goal:.0f} %: {within} of {len(errors)}")
    return FAILED if failed else OK


def _planned(key: str, words: Sequence[str]) -> _Figures:
    with tempfile.TemporaryDirectory() as folder:
        given = ["--mode=plan", f"--logdir={folder}/run", *_flags(key, words)]
        step = record_of("trainer", *given)["step"]
    return _Figures(step["seconds"], step["core_seconds"], step["counted_bytes"])


def _measured(key: str, words: Sequence[str], planned_s: float) -> _Figures:
    devices = [f.replace("--devices=", "--cpu_devices=") for f in _flags(key, words)]
    counts = f"--steps={_measured_steps(planned_s)}", f"--warmup={_warmup_steps(planned_s)}"
    found = record_of("benchmark", *devices, *counts)
    step_s, core_s = (found[name]["median"] / 1e3 for name in ("step_ms", "cpu_ms"))
    return _Figures(step_s, core_s, found["step_memory_bytes"] or None)


def _flags(key: str, words: Sequence[str]) -> list[str]:
    settings = [word if word.startswith("--") else f"--set={word}" for word in words]
    return [f"--model={key}", "--format=json", *settings]


def _middle(rounds: Sequence[_Figures]) -> _Figures:
    """Returns the median of each figure."""
    seconds, cores, memory = zip(*rounds, strict=True)
    return _Figures(statistics.median(seconds), _median(cores), _median(memory))


def _median(figures: Sequence[float | None]) -> float | None:
    known = [figure for figure in figures if figure is not None]
    return statistics.median(known) if known else None


def _columns(planned: _Figures, measured: Sequence[_Figures]) -> tuple[str, ...]:
    middle, steps = _middle(measured), [one.seconds for one in measured]
    seconds, found, error = _compared(planned.seconds, middle.seconds, 1e3, "ms")
    return (
        *(seconds, found, *(_text(step, 1e3, "ms") for step in (min(steps), max(steps))), error),
        *_compared(planned.core_seconds, middle.core_seconds, 1e3, "ms"),
        *_compared(planned.memory_bytes, middle.memory_bytes, 1e-6, "MB"),
    )


def _compared(
    planned: float | None, measured: float | None, scale: float, unit: str
) -> tuple[str, str, str]:
    """Returns the columns of a planned and a measured figure.

    Args:
      planned: the planned figure.
      measured: the measured one.
      scale: of the unit that is printed.
      unit: this unit.
    """
    error = _error(planned, measured)
    shown = "-" if error is None else f"{100 * error:+.0f} %"
    return _text(planned, scale, unit), _text(measured, scale, unit), shown


def _text(figure: float | None, scale: float, unit: str) -> str:
    return "-" if figure is None else f"{scale * figure:.4g} {unit}"


def _error(planned: float | None, measured: float | None) -> float | None:
    return None if planned is None or not measured else planned / measured - 1


def _measured_steps(step_s: float) -> int:
    """Returns the number of measured steps: 1.5 seconds of them, at least 15 and at most 300.

    Steps of 2 ms take 1 to 5 ms one by one, because their threads wait for each other.
    """
    return min(_MOST_STEPS, max(_LEAST_STEPS, int(_STEPS_S / max(step_s, 1e-9))))


def _warmup_steps(step_s: float) -> int:
    """Returns the number of steps before the measured ones: 5 seconds of them, at most 100.

    TensorFlow first hands every op to another thread. It learns in some 90 steps which ops are too
    short for that.
    """
    return min(_MOST_WARMUP, max(_LEAST_WARMUP, int(_WARMUP_S / max(step_s, 1e-9))))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
