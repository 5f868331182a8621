"""Commands of the documents that tests/docs_test.py runs, and how."""

from __future__ import annotations

import re
from dataclasses import dataclass

from docs_commands_elsewhere import TESTED_ELSEWHERE, TestedBy


@dataclass(frozen=True)
class Run:
    """A command that the test runs unchanged, with further arguments that make it short.

    Attributes:
      arguments: arguments to append, which override earlier ones. "{steps}" is replaced by a number
        of steps that is larger for each command on the same logdir, so that each of them trains.
      prints: a regular expression that the output must contain.
      leaves: a glob for files in the folder, one of which must not be empty afterwards.
    """

    arguments: str = ""
    prints: str = r"\S"
    leaves: str = ""

    @property
    def trains(self) -> bool:
        return "{steps}" in self.arguments

    def is_op_by_op(self, command: str) -> bool:
        """Whether a command trains or uses a model on one device, which needs no tracing."""
        if re.fullmatch(BRIEF_SCRIPT, command):
            return True
        if self.trains:
            return "towers=1" in self.arguments_for(command, 0)
        on_one = "decode_on=mesh" not in command
        return on_one and re.search(r"--mode=(eval|decode|follow)\b", command) is not None

    def is_checked_elsewhere(self, command: str) -> bool:
        """Whether a command trains an experiment of Tekso, whose task another test checks."""
        own = "--import=" in command
        return self.trains and not own and re.search(OF_TEKSO, command) is not None

    def arguments_for(self, command: str, steps: int) -> str:
        """Returns the arguments for a command that trains up to a number of steps."""
        found = self.arguments.format(steps=steps)
        if not self.trains:
            return found
        if re.search(OTHER_EXECUTION, command):
            return found if re.search(RESUMED, command) else found.replace(BRIEFLY, NEVER)
        return found.replace("xla=none", "xla=none --set execution.towers=1")


STEPS = 2
"""Steps that each command trains."""
BRIEFLY = "eval_inputs.dev.max_batches=1"
"""A setting for a short evaluation."""
NEVER = "eval_inputs={} --set run.keep_best.eval_input=None"
"""The settings without evaluations, which are traced."""
# The test is about commands, not sizes: one layer is traced much faster than four.
SHORT = f"--steps={{steps}} --set run.decode_at_end=false --set {BRIEFLY} --set execution.xla=none"
SMALL = f"{SHORT} --set *.num_layers=1"
SMALL_LM = f"{SMALL} --set input.length=32"
OTHER_EXECUTION = r"--execution=|Pipeline\b|--import=my_(pipeline|mesh|stages)\b"
"""Commands that train, but not under `data_parallel`. All others train with one tower, so a step is
traced once; tests/tools/trainer_test.py has a run with several."""
OF_TEKSO = r"--model=(asr|image|lm|mt|multi)\."
"""Commands with an experiment of Tekso: tests/shrunk_runs_test.py checks its task."""
BRIEF_SCRIPT = r"python (session|lab|cell|fine_tune|predict_digits|forced)\.py"
"""Scripts of few steps; the others train longer, and are traced."""
RESUMED = r"runs/(fsdp|three)\b"
"""Runs under another execution that a later command resumes, and evaluates."""
PAIRS = f"{SMALL} --set task.scoring.pairs=4 --set input.bounds=[]"  # a single bucket
TWO_STAGES = f"{SHORT} --set *.num_layers=2 --set execution.num_stages=2 --set input.length=32"
THREE_STAGES = f"{SHORT} --set *.num_layers=3 --set input.length=32"  # a layer per stage
TESTS = "tests/packaging_test.py"
"""The tests that `pytest` commands of the documents collect; all tests would take long."""

RUN: list[tuple[str, Run]] = [
    (r"make train", Run(f"LOGDIR=runs/made ARGS='{SMALL_LM}'")),
    (r"make test", Run(prints=r"packaging_test\.py::test_")),
    (r"make install", Run(prints="up to date|Nothing to be done")),
    (
        r"tekso-trainer .*--model=my_tasks\.\w+ .*",
        Run("--steps={steps} --set execution.xla=none", prints="petals/accuracy"),
    ),
    (r"tekso-ckpt (convert|merge) .*", Run(prints=r"wrote|merged")),
    (r"tekso-ckpt list .*", Run(prints=rf"(?m)^step_0+{STEPS} ")),
    (r"tekso-ckpt verify .*", Run(prints=r": good")),
    (r"tekso-ckpt show .*", Run(prints=r"\(all\) .* 100\.0%")),
    (r"tekso-ckpt grep .*", Run(prints=r"weights/model/")),
    (r"tekso-ckpt stats .*", Run(prints=r"all numbers of \d+ tensors are finite")),
    (r"tekso-new-task my_task", Run(leaves="my_task/experiments.py", prints=r"wrote .*my_task")),
    (
        r"tekso-trainer .*--model=mt\.cldr\.\w+ --logdir=.*",
        Run(f"{PAIRS} --set input.corpus.num_pairs=2000"),
    ),
    (r"tekso-trainer --list='?image.*", Run(prints=r"(?m)^image\.imagenet\.ResNet50 .*25,610,152")),
    (
        r"tekso-trainer .*--mode=eval.*",
        Run(
            "--set eval_inputs.dev.max_batches=1",
            prints=r"loss \d+\.\d+",
            leaves="runs/*/evaluations.jsonl",
        ),
    ),
    (
        r"tekso-trainer .*--mode=follow",
        Run(prints=r"loss \d+\.\d+", leaves="runs/*/events_followed"),
    ),
    (
        r"tekso-trainer (?=.*--mode=decode).*(text_files\.Char|runs/(spread|python|bytes))\b.*",
        Run("--set task.decode.max_new_tokens=8", prints=r"\S+(\s+\S+){5}"),
    ),
    (
        r"tekso-trainer .*runs/shared --mode=decode .*",
        Run("--set task.tasks.lm.decode.max_new_tokens=8", prints=r"\S+(\s+\S+){5}"),
    ),
    (r"tekso-trainer .*--mode=decode.*", Run(prints=r"\S+(\s+\S+){5}")),
    (
        r"tekso-trainer .*--mode=export .*",
        Run(prints=r"exported ", leaves="runs/*/export/saved_model.pb"),
    ),
    (r"tekso-trainer .*--output=schedule\.png", Run(leaves="schedule.png")),
    (r"tekso-trainer .*--mode=plan .*", Run(prints=r"no problems were found")),
    (r"tekso-trainer .*--mode=inspect_.* --format=json", Run(prints=r"(?s)^\{\n.*\n\}$")),
    (r"tekso-trainer .*--mode=inspect_.*", Run(prints=r"(\n.*){5}")),
    (  # an experiment of the page's own, without an evaluation
        r"tekso-trainer .*--model=my_pipeline\..* --trace_pipeline",
        Run("--steps={steps}", leaves="runs/*/pipeline.png"),
    ),
    (r"tekso-trainer .*--trace_pipeline", Run(TWO_STAGES, leaves="runs/*/pipeline.png")),
    (r"tekso-trainer .*TinyPipeline --logdir.*", Run(TWO_STAGES)),
    (r"tekso-trainer .*runs/three.*", Run(THREE_STAGES)),
    (r"tekso-trainer .*--model=mt\..* --logdir=.*", Run(PAIRS)),
    (r"tekso-trainer .*--model=(lm|my_lab)\..* --logdir=.*", Run(SMALL_LM)),
    (r"tekso-trainer .*--logdir=.*", Run(SHORT)),
    (r"tekso-vocab .*--input=.*", Run(leaves="my_pieces.model")),
    (
        r"tekso-benchmark .*--model=.*",
        Run(
            f"--steps={STEPS} --warmup=1 --set *.num_layers=1 --set execution.xla=none "
            "--set execution.towers=1 --set task.model.dim=16 --set input.batch_size=2",
            prints=r"per second|/s\b",
        ),
    ),
    (r"tensorboard --logdir=\S+", Run("--inspect", prints=rf"last_step +{STEPS}\b")),
    (r"python make_pairs\.py", Run(prints="", leaves="train.en")),
    (r"python forced\.py", Run(prints="")),  # contains assertions
    (r"python \w+\.py", Run()),
    (
        r"(\.venv/bin/)?pytest( -n 2)?( --dist=loadfile)?( -m \"not slow\"| -k \w+)?",
        Run(prints=r"packaging_test\.py::test_"),
    ),
]
"""Regular expressions for complete commands; the first match is used."""
HOW: list[tuple[str, Run | TestedBy]] = [*TESTED_ELSEWHERE, *RUN]
