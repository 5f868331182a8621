"""Runs shrunk experiments through all modes of the trainer, as a user would; for tests.

Of each, it trains one step and saves, restores and trains another one, evaluates, decodes and
exports.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import shrunk_experiments

from tekso.framework import registry
from tekso.framework.exit_codes import ExitCode
from tekso.framework.params import references
from tekso.tools import trainer

MODULES = (
    "shrunk_experiments",
    "small_boxes",
    "small_captions",
    "small_masks",
    "small_pictures",
)


def register(key: str) -> str:
    """Registers the shrunk form of an experiment; returns its key."""
    name = f"Shrunk{key.title().replace('.', '').replace('_', '')}"
    original = registry.get(key)

    def tree(self: Any) -> Any:
        small = shrunk_experiments.shrunk(original.tree(self))
        small.set({"run.steps": 2, "run.decode_at_end": False})
        if "xla" in small.execution:
            small.execution.xla = "none"  # compiling costs more than the rest
        if "towers" in small.execution:
            small.execution.towers = 1  # so that a step is traced once
        small.run.warm_start = {}
        for _, input in shrunk_experiments.pairs(small):
            if "corpus" in input and "dev" in input.corpus:
                input.corpus.dev = input.corpus.train[:8]
        for one in small.eval_inputs.values():
            (one.input if "task" in one else one).set({"max_batches": 1})
        return small

    fields = {"__doc__": "Shrunk.", "__module__": "shrunk_run", "tree": tree}
    registry.register(type(name, (original,), fields))
    return f"shrunk_run.{name}"


def main() -> int:
    """Runs the modes for the experiments of the command line, in folders of its last argument."""
    *keys, folder = sys.argv[1:]
    for module in MODULES:
        references.allow_imports(module)
    for key in keys:
        code = _run(register(key), str(Path(folder) / key))
        if code != ExitCode.OK:
            return code
        print(f"== {key}: done", flush=True)
    return ExitCode.OK


def _run(model_key: str, logdir: str) -> int:
    """Runs the modes for an experiment; returns the exit code of the first that fails."""
    model = ["--model", model_key, "--logdir", logdir]
    for words in (
        [*model, "--steps=1"],
        [*model, "--steps=2"],
        ["--mode=eval", *model],
        ["--mode=decode", *model],
        ["--mode=export", *model, f"--output={Path(logdir) / 'export'}"],
    ):
        print(f"== {' '.join(words)}", flush=True)
        code = trainer.main(["tekso-trainer", *words])
        if code != ExitCode.OK:
            return int(code)
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
