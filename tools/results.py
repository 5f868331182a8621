"""tekso-results: copies the final evaluations of finished runs into results/KEY.json."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from absl import flags

from tekso.framework.commands import typed
from tekso.framework.json_text import to_json
from tekso.tools import command_flags, experiment_flags
from tekso.tools.command_errors import OK, UsageError

PROGRAM = "tekso-results"
USAGE = "runs/a runs/b --output=my_package/results"

FLAGS: Any = flags.FlagValues()  # type: ignore[no-untyped-call]


def _define() -> None:
    flags.DEFINE_string(
        "output",
        None,
        "Folder to write KEY.json to, a folder named results in the package of the experiment. "
        "By default the results are only printed.",
        flag_values=FLAGS,
    )
    flags.DEFINE_multi_string(
        "import", [], "Package with your own experiments; can be repeated.", flag_values=FLAGS
    )
    command_flags.define_common(FLAGS)


_define()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool; returns the exit code, one of `ExitCode`."""
    return command_flags.run(PROGRAM, FLAGS, argv, _run, help_text=_help)


def _help() -> str:
    return command_flags.help_text(
        FLAGS,
        usage=f"{typed(PROGRAM)} {USAGE}",
        purpose="Copies the evaluation at the last step of finished runs, with steps, seconds, "
        "processor, versions and date. --list and docs/catalogue.md show it.",
        value_names={"output": "folder"},
    )


def _run(words: list[str]) -> int:
    if not words:
        raise UsageError(f"a run is missing, as in {typed(PROGRAM)} {USAGE}")
    experiment_flags.load(None, FLAGS["import"].value or [])  # before the next imports
    from tekso.framework.run import results
    from tekso.framework.run.logdir import Logdir

    found: dict[str, dict[str, Any]] = {}
    for path in words:
        logdir = Logdir(os.path.expanduser(path))
        model = logdir.model()
        if model is None:
            raise UsageError(f"{path} has no run: there is no {logdir.file('params.txt')}")
        experiment_flags.load(model, FLAGS["import"].value or [])
        registered = experiment_flags.experiment(model)().tree()
        result = results.result_of(logdir, registered)
        if model in found:
            raise UsageError(f"{path} is a second run of {model}: an experiment has one result")
        found[model] = result
    for result in found.values():  # written only if all of them are good
        if FLAGS.output:
            print(f"wrote {results.write(result, os.path.expanduser(FLAGS.output))}")
        else:
            shown = {name: value for name, value in result.items() if name != "params"}
            print(to_json(shown, indent=1))
    return OK


if __name__ == "__main__":
    sys.exit(main())
