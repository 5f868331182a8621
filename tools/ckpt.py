"""tekso-ckpt: averages or lists the checkpoints of a run, or shows the weights of one."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from absl import flags

from tekso.framework import files
from tekso.framework.commands import typed
from tekso.tools import command_flags
from tekso.tools.command_errors import UsageError

if TYPE_CHECKING:  # slow to import, so the functions below import these modules when they run
    from tekso.framework.run.checkpoints import Checkpoint, Checkpoints
    from tekso.framework.run.logdir import Logdir
    from tekso.framework.run.opened import OpenedRun

PROGRAM = "tekso-ckpt"
USAGE = "average --logdir=runs/tiny --last=5 --output=runs/tiny/averaged"
COMMANDS = ("average", "list", "inspect")

# A separate FlagValues, so that --help lists only these flags.
FLAGS: Any = flags.FlagValues()  # type: ignore[no-untyped-call]


def _define() -> None:
    f = FLAGS
    flags.DEFINE_string("logdir", None, "Folder of the run.", flag_values=f)
    flags.DEFINE_integer(
        "last",
        None,
        "With average: number of newest checkpoints to average.",
        lower_bound=1,
        flag_values=f,
    )
    flags.DEFINE_list(
        "steps", [], "With average: steps of the checkpoints, such as 800,900,1000.", flag_values=f
    )
    flags.DEFINE_string(
        "output",
        None,
        "With average: folder of the new checkpoint. To continue training from it, write it to the "
        "checkpoints of a new logdir, named after its step: runs/new/checkpoints/step_00001000.",
        flag_values=f,
    )
    flags.DEFINE_string(
        "checkpoint",
        None,
        "With inspect: step or path of the checkpoint, or best. By default the newest good one.",
        flag_values=f,
    )
    flags.DEFINE_string(
        "match",
        "weights/*",
        "With inspect: pattern of tensor names; '*' matches all, including those of the learner.",
        flag_values=f,
    )
    flags.DEFINE_enum("format", "text", ("text", "json"), "Output format.", flag_values=f)
    command_flags.define_common(f)


_define()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool; returns the exit code: 0 success, 1 error, 2 wrong command line."""
    return command_flags.run(PROGRAM, FLAGS, argv, _run, help_text=_help)


def _run(words: list[str]) -> None:
    actions: dict[str, Callable[[list[str]], None]] = {
        "average": _average,
        "list": _list,
        "inspect": _inspect,
    }
    if not words or words[0] not in actions:
        given = f"{words[0]!r} is not a command" if words else "a command is missing"
        raise UsageError(f"{given}: expected {', '.join(COMMANDS)}, as in {_usage()}")
    _check(*words)
    from tekso.framework.run import quiet_tensorflow

    quiet_tensorflow.import_tensorflow()
    actions[words[0]](words[1:])


def _usage() -> str:
    return f"{typed(PROGRAM)} {USAGE}"


def _help() -> str:
    purpose = (
        "average: writes a checkpoint with the mean of the weights of several checkpoints and the "
        "learner of the last one; it can be evaluated, decoded and restored as any other. To "
        "average checkpoints of several runs, give their paths. list: prints the checkpoints, and "
        "whether each is good or damaged. inspect: prints the tensors of one, with their norms."
    )
    names = {"logdir": "folder", "output": "folder", "steps": "steps", "match": "glob"}
    return command_flags.help_text(FLAGS, usage=_usage(), purpose=purpose, value_names=names)


def _check(command: str, *paths: str) -> None:
    """Checks the flags before anything is read.

    Raises:
      UsageError: a flag is missing, or the command does not use it.
    """
    given = {name: value for name in ("last", "steps", "output") if (value := FLAGS[name].value)}
    if command != "average":
        if given:
            raise UsageError(f"--{next(iter(given))} works only with average, not with {command}")
        if paths:
            raise UsageError(f"unexpected argument {paths[0]!r}: {command} takes --logdir")
    elif not FLAGS.output:
        raise UsageError(f"--output is missing, as in {_usage()}")
    elif (FLAGS.last is not None) + bool(FLAGS.steps) + bool(paths) != 1:
        raise UsageError(
            "average requires either --last=N, or --steps=800,900, or paths of checkpoints, as in "
            f"{_usage()}"
        )
    elif files.exists(os.path.expanduser(FLAGS.output)):
        raise UsageError(f"--output={FLAGS.output} exists: give another name")
    if not FLAGS.logdir and not paths and FLAGS.checkpoint is None:
        raise UsageError(f"--logdir is missing, as in {_usage()}")
    for step in FLAGS.steps:
        if not (step.strip().isascii() and step.strip().isdigit()):
            raise UsageError(
                f"--steps: {step!r} is not a step; expected numbers, as in --steps=800,900"
            )


# --- commands ---


def _average(paths: list[str]) -> None:
    from tekso.framework.run import averaging

    chosen = [_open(path).checkpoint for path in paths] if paths else _chosen()
    seen = [os.path.abspath(one.path) for one in chosen]
    if twice := sorted({path for path in seen if seen.count(path) > 1}):
        raise UsageError(f"{twice[0]} is given twice")
    chosen.sort(key=lambda one: one.step)
    output = _output(chosen[-1].step)
    averaging.check_same_tensors(chosen)
    for text in averaging.differences(chosen):
        _warn(text)
    files.make_folder(os.path.dirname(output))
    averaging.write_average(output, chosen)
    _report(output, chosen)


def _chosen() -> list[Checkpoint]:
    """Returns the checkpoints of the run that --last or --steps selects."""
    checkpoints = _checkpoints()
    if FLAGS.steps:
        return [checkpoints.open(step.strip()) for step in FLAGS.steps]
    from tekso.framework.run.checkpoints import CheckpointError

    good: list[Checkpoint] = []
    for step in reversed(checkpoints.steps()):
        try:
            good.append(checkpoints.open(str(step)))
        except CheckpointError as error:
            _warn(f"skipped: {error}")
        if len(good) == FLAGS.last:
            return good
    count = f"{len(good)} good checkpoints" if len(good) != 1 else "one good checkpoint"
    cure = f": give --last={len(good)}" if good else ": train first, or give another --logdir"
    raise UsageError(
        f"--last={FLAGS.last}, but {checkpoints.directory} has {count if good else 'none'}{cure}; "
        "run.keep_last_checkpoints sets how many checkpoints training keeps"
    )


def _open(path: str, which: str | None = None) -> OpenedRun:
    from tekso.framework.run.opened import open_run

    return open_run(path, which, warn=_warn)


def _output(step: int) -> str:
    """Returns the absolute path to write to.

    Raises:
      UsageError: the path is named after another step.
    """
    from tekso.framework.run.checkpoints import Checkpoints

    path: str = os.path.expanduser(FLAGS.output).rstrip("/")
    path = os.path.abspath(path) if files.is_local(path) else path
    above, name = os.path.split(path)
    wanted = os.path.basename(Checkpoints(above).path(step))
    if re.fullmatch(r"step_\d+", name) and name != wanted:
        raise UsageError(
            f"--output={FLAGS.output}: the average has the step of the last checkpoint, {step}: "
            f"its name must be {wanted}, or not start with step_"
        )
    return path


def _report(output: str, chosen: Sequence[Checkpoint]) -> None:
    from tekso.framework.run.report.lines import size

    steps = ", ".join(str(one.step) for one in chosen)
    written = sum(files.size_bytes(files.join(output, name)) for name in files.names(output))
    logdir = FLAGS.logdir or _open(chosen[-1].path).logdir.path
    if FLAGS.format == "json":
        used = [one.path for one in chosen]
        _print_json({"output": output, "step": chosen[-1].step, "averaged": used})
        return
    print(f"averaged {len(chosen)} checkpoints, of steps {steps}: {output} ({size(written)})")
    print("the state of the learner is copied from the last of them")
    flags = shlex.join(["--mode=eval", f"--logdir={logdir}", f"--checkpoint={output}"])
    print(f"evaluate it:\n  {typed('tekso-trainer')} {flags}")


def _list(paths: list[str]) -> None:
    from tekso.framework.run import checkpoint_tables
    from tekso.framework.tables import terminal_width

    folder = _checkpoints().directory
    if not files.is_folder(folder):
        raise UsageError(f"--logdir={FLAGS.logdir} has no checkpoints: there is no {folder}")
    rows = list(checkpoint_tables.records(folder))
    if FLAGS.format == "json":
        _print_json(rows)
    else:
        width = terminal_width()
        print(checkpoint_tables.list_text(rows, width=width) if rows else f"{folder} is empty")


def _inspect(paths: list[str]) -> None:
    from tekso.framework.run import checkpoint_tables
    from tekso.framework.tables import terminal_width

    run = _open(FLAGS.logdir, FLAGS.checkpoint) if FLAGS.logdir else _open(FLAGS.checkpoint)
    checkpoint = run.checkpoint
    keys = sorted(fnmatch.filter(checkpoint.keys, FLAGS.match))
    if not keys:
        first = ", ".join(sorted(checkpoint.keys)[:3])
        raise UsageError(f"--match={FLAGS.match}: no tensor matches; there are {first}, …")
    rows = list(checkpoint_tables.tensor_records(checkpoint, keys))
    if FLAGS.format == "json":
        _print_json({"checkpoint": checkpoint.path, "step": checkpoint.step, "tensors": rows})
    else:
        print(checkpoint_tables.tensors_text(checkpoint, rows, width=terminal_width()))


def _logdir() -> Logdir:
    from tekso.framework.run.logdir import Logdir

    return Logdir(os.path.expanduser(FLAGS.logdir))


def _checkpoints() -> Checkpoints:
    from tekso.framework.run.checkpoints import Checkpoints

    return Checkpoints(_logdir().checkpoints, warn=_warn)


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


def _print_json(record: Any) -> None:
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    sys.exit(main())
