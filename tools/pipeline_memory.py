"""Prints the predicted and the measured peak memory of pipelines by stages and micro-batches.

    python -m tekso.tools.pipeline_memory                            AmoebaNet-D (3, 32), 512 images
    python -m tekso.tools.pipeline_memory 'lm.python_source.Tiny input.batch_size=32'

Every measurement is a process of tekso-benchmark, and every prediction one of
`--mode=inspect_pipeline`, with the same settings: K stages, M micro-batches, the schedule `gpipe`,
with and without rematerialization. Stages on a CPU share the memory of one process, so the figures
are those of all stages together, at the same time: weights, slots, sums of gradients, saved
activations and the tensors of the backward passes that run. Measured is the largest memory of
TensorFlow's tensors during a step. With oneDNN, TensorFlow's statistics leave out all tensors below
256 KiB, so the prediction is compared without these ("counted"). Without oneDNN, there are no
statistics, and "-" is printed.
"""

from __future__ import annotations

import itertools
import shlex
import subprocess
import sys
from collections.abc import Sequence

from tekso.framework.tables import table
from tekso.tools import command_flags
from tekso.tools.command_errors import FAILED, OK, UsageError
from tekso.tools.tool_processes import record_of, why_failed

AMOEBANET = (
    "image.digits.Cnn task.model=tekso.models.amoebanet:AmoebaNet task.model.num_layers=3 "
    "task.model.filters=32 input.image_size=64 input.batch_size=512"
)
STAGES, MICRO_BATCHES, REMATERIALIZE = (1, 2, 4), (1, 4, 16), ("none", "all")

_HEADER = ("rematerialize", "K", "M", "predicted MB", "counted MB", "measured MB", "off")


def main(argv: Sequence[str]) -> int:
    """Prints the table; returns the exit code."""
    return command_flags.run_words("pipeline_memory", argv, _compare, text=__doc__)


def _compare(words: Sequence[str]) -> int:
    if len(words) > 1:
        raise UsageError(f"{words[1]!r} is too much: put an experiment and its settings in quotes")
    key, *settings = shlex.split(words[0] if words else AMOEBANET)
    rows = []
    for again, stages, parts in itertools.product(REMATERIALIZE, STAGES, MICRO_BATCHES):
        try:
            rows.append(_row(key, settings, again, stages, parts))
        except subprocess.CalledProcessError as error:
            print(f"{key}: {why_failed(error)}", file=sys.stderr)
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
    found = record_of("trainer", "--mode=inspect_pipeline", *flags)
    counted = found["counted_bytes"]
    measured = record_of("benchmark", *flags, "--warmup=1", "--steps=2")["step_memory_bytes"]
    shown = (f"{found['shared_bytes'] / 1e6:.0f}", f"{counted / 1e6:.0f}")
    compared = ("-", "-")
    if measured:
        compared = (f"{measured / 1e6:.0f}", f"{100 * (counted / measured - 1):+.0f} %")
    return again, str(stages), str(parts), *shown, *compared


if __name__ == "__main__":
    sys.exit(main(sys.argv))
