"""Prints the predicted and the measured peak memory of pipelines by stages and micro-batches.

    python -m tekso.tools.pipeline_memory                            AmoebaNet-D (3, 16), 128 images
    python -m tekso.tools.pipeline_memory 'lm.python_source.Tiny input.batch_size=32'

Every measurement is a process of tekso-benchmark, and every prediction one of
`--mode=inspect_pipeline`, with the same settings: K stages, M micro-batches, the schedule `gpipe`,
with and without rematerialization. Stages on a CPU share the memory of one process, so the figures
are those of all stages together: weights, slots, sums of gradients and saved activations. Measured
is the largest memory of TensorFlow's tensors during a step. It includes tensors that an op needs
while it runs, which are not predicted.
"""

from __future__ import annotations

import itertools
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from tekso.framework.tables import table
from tekso.tools.command_errors import FAILED, OK

AMOEBANET = (
    "image.digits.Cnn task.model=tekso.models.amoebanet:AmoebaNet task.model.num_layers=3 "
    "task.model.filters=16 input.image_size=64 input.batch_size=128"
)
STAGES, MICRO_BATCHES, REMATERIALIZE = (1, 2, 4), (1, 4, 16), ("none", "all")

_HEADER = ("rematerialize", "K", "M", "predicted MB", "activations", "measured MB", "off")


def main(argv: Sequence[str]) -> int:
    """Prints the table; returns the exit code."""
    key, *settings = shlex.split(argv[1] if len(argv) > 1 else AMOEBANET)
    rows = []
    for again, stages, parts in itertools.product(REMATERIALIZE, STAGES, MICRO_BATCHES):
        try:
            rows.append(_row(key, settings, again, stages, parts))
        except subprocess.CalledProcessError as error:
            print(f"{key}: {error.stderr.strip().splitlines()[-1]}", file=sys.stderr)
            return FAILED
        print(*rows[-1], file=sys.stderr, flush=True)
    print("\n".join(table(_HEADER, rows, right=tuple(range(1, len(_HEADER))))))
    return OK


def _row(key: str, settings: Sequence[str], again: str, stages: int, parts: int) -> tuple[str, ...]:
    own = (
        f"num_stages={stages}",
        f"num_micro_batches={parts}",
        "schedule=gpipe",
        f"rematerialize={again}",
    )
    flags = [f"--model={key}", "--format=json", *(f"--set={s}" for s in settings)]
    flags += ["--execution=pipelined", *(f"--set=execution.{s}" for s in own)]
    found = _run("trainer", "--mode=inspect_pipeline", *flags)
    kept = sum(found["held_bytes"])
    sizes = ("weight_bytes", "copy_bytes", "optimizer_bytes", "gradient_bytes")
    predicted = kept + sum(stage[name] for stage in found["stages"] for name in sizes)
    measured = _run("benchmark", *flags, "--warmup=1", "--steps=2")["step_memory_bytes"]
    shown = (f"{size / 1e6:.0f}" for size in (predicted, kept, measured))
    return again, str(stages), str(parts), *shown, f"{100 * (predicted / measured - 1):+.0f} %"


def _run(tool: str, *words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", f"tekso.tools.{tool}", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    record: dict[str, Any] = json.loads(done.stdout)
    return record


if __name__ == "__main__":
    sys.exit(main(sys.argv))
