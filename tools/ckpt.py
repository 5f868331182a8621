"""tekso-ckpt: lists, shows, compares, averages, converts and merges checkpoints."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from absl import flags

from tekso.framework import files
from tekso.framework.commands import typed
from tekso.framework.json_text import to_json
from tekso.framework.spelling import close_matches
from tekso.tools import command_flags, reading_commands
from tekso.tools.command_errors import UsageError

if TYPE_CHECKING:  # slow to import, so the functions below import these modules when they run
    from tekso.framework.run.checkpoints import Checkpoint, Checkpoints
    from tekso.framework.run.logdir import Logdir
    from tekso.framework.run.opened import OpenedRun
    from tekso.tools.weight_commands import Done

PROGRAM = "tekso-ckpt"
USAGE = "average --logdir=runs/tiny --last=5 --output=runs/tiny/averaged"
WITH_TENSORFLOW = ("average", "list", "convert", "merge")
COMMANDS = (*WITH_TENSORFLOW, *reading_commands.COMMANDS)
TAKES = {
    "last": ("average",),
    "steps": ("average",),
    "output": ("average", "merge"),
    "logdir": ("average", "list", "merge"),
    "model": ("convert",),
    "match": ("convert",),
    "set": ("convert", "merge"),
    "layout": ("convert",),
    "checkpoint": ("merge",),
    "not_finite": ("stats",),
}
"""The commands that a flag works with; the other flags work with all."""
REPLACED = {
    "export": "convert RUN FILE.safetensors",
    "import": "convert FILE.safetensors RUN",
    "inspect": "show or stats",
}
"""{a former command: what to write instead}."""
READING_FLAGS = ("format", "traceback", "not_finite")

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
        "checkpoints of a new logdir, named after its step: runs/new/checkpoints/step_00001000. "
        "With merge: folder of the new run.",
        flag_values=f,
    )
    flags.DEFINE_string(
        "checkpoint",
        None,
        "With merge: step or path of the checkpoint, or best. By default the newest good one.",
        flag_values=f,
    )
    flags.DEFINE_string(
        "match",
        None,
        "With convert to a file: pattern of the paths of weights, such as '*_lora_?'.",
        flag_values=f,
    )
    flags.DEFINE_boolean(
        "not_finite", False, "With stats: only tensors with NaN or infinity.", flag_values=f
    )
    _define_experiment(f)
    flags.DEFINE_enum(
        "format",
        "text",
        ("text", "json"),
        "Output format.",
        flag_values=f,
    )
    command_flags.define_common(f)


def _define_experiment(f: flags.FlagValues) -> None:
    flags.DEFINE_string(
        "model",
        None,
        "With convert from a file: key of the experiment; by default the one it was written for.",
        flag_values=f,
    )
    flags.DEFINE_multi_string(
        "set", [], "With convert and merge: path=value, a setting of the new run.", flag_values=f
    )
    flags.DEFINE_multi_string(
        "import", [], "Your own package, which the experiment needs.", flag_values=f
    )
    flags.DEFINE_enum(
        "layout",
        None,
        ("gpt2",),
        "With convert: a public layout of the tensors in the file. By default they have the names "
        "and shapes of the weights.",
        flag_values=f,
    )


_define()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool; returns the exit code, one of `ExitCode`."""
    return command_flags.run(PROGRAM, FLAGS, argv, _run, help_text=_help)


def _run(words: list[str]) -> int | None:
    actions: dict[str, Callable[[list[str]], None]] = {
        "average": _average,
        "list": _list,
        "convert": _convert,
        "merge": _merge,
    }
    if not words or words[0] not in COMMANDS:
        if words and words[0] in REPLACED:
            raise UsageError(f"{words[0]} was replaced: {typed(PROGRAM)} {REPLACED[words[0]]}")
        given = f"{words[0]!r} is not a command" if words else "a command is missing"
        if words and (close := close_matches(words[0], COMMANDS, count=1)):
            given += f"; did you mean {close[0]}?"
        raise UsageError(f"{given}: expected {', '.join(COMMANDS)}, as in {_usage()}")
    if words[0] in reading_commands.COMMANDS:
        return _read(*words)
    if words[0] == "list" and len(words) == 2 and not FLAGS.logdir:
        FLAGS.logdir = words.pop()
    _check(*words)
    if words[0] != "list":  # which reads files only, so it starts fast
        from tekso.tools import experiment_flags

        experiment_flags.load(FLAGS.model, FLAGS["import"].value)
    actions[words[0]](words[1:])
    return None


def _usage() -> str:
    return f"{typed(PROGRAM)} {USAGE}"


def _help() -> str:
    purpose = """Lists, shows, compares, averages, converts and merges checkpoints.

  list --logdir=RUN: the checkpoints of a run, and whether each is good.
  verify PATH: whether a checkpoint, all checkpoints of a run, or safetensors files are damaged.
  show PATH: what a checkpoint is, with sizes by module.
  grep PATTERN PATH: the weights and slots that a regular expression matches.
  stats PATH [PATTERN]: mean, standard deviation, range and norm of each tensor.
  diff PATH PATH [PATTERN]: the tensors that differ.
  average: writes a checkpoint with the mean of the weights of several checkpoints, and the \
learner of the last one. To average checkpoints of several runs, give their paths.
  convert SOURCE DEST: writes weights to a safetensors file, or to a new run that begins with them.
  merge: writes a new run whose matrices contain the updates of the adapters of a run.

PATH is a run, a checkpoint, RUN/best, RUN/last, RUN/STEP, or safetensors."""
    names = {"output": "path", "steps": "steps", "match": "glob"}
    return command_flags.help_text(FLAGS, usage=_usage(), purpose=purpose, value_names=names)


def _check(command: str, *paths: str) -> None:
    """Checks the flags before anything is read.

    Raises:
      UsageError: a flag is missing, or the command does not use it.
    """
    for name, commands in TAKES.items():
        if FLAGS[name].value and command not in commands:
            raise UsageError(
                f"--{name} works only with {' and '.join(commands)}, not with {command}"
            )
    if command in TAKES["output"] and not FLAGS.output:
        raise UsageError(f"--output is missing, as in {_usage()}")
    if command in TAKES["output"] and files.exists(os.path.expanduser(FLAGS.output)):
        raise UsageError(f"--output={FLAGS.output} exists: give another name")
    if command == "convert":
        if len(paths) != 2:
            raise UsageError(f"convert takes SOURCE DEST, but {len(paths)} paths are given")
        if files.exists(os.path.expanduser(paths[1])):
            raise UsageError(f"{paths[1]} exists: give another name")
    elif command == "average":
        if (FLAGS.last is not None) + bool(FLAGS.steps) + bool(paths) != 1:
            raise UsageError(
                "average requires either --last=N, or --steps=800,900, or paths of checkpoints, as "
                f"in {_usage()}"
            )
    elif paths:
        raise UsageError(f"unexpected argument {paths[0]!r}: {command} takes --logdir")
    if not FLAGS.logdir and not paths and FLAGS.checkpoint is None:
        raise UsageError(f"--logdir is missing, as in {_usage()}")
    for step in FLAGS.steps:
        if not (step.strip().isascii() and step.strip().isdigit()):
            raise UsageError(
                f"--steps: {step!r} is not a step; expected numbers, as in --steps=800,900"
            )


def _read(command: str, *words: str) -> int:
    """Runs a command that only reads; returns the exit code."""
    if FLAGS.logdir and command in ("verify", "show"):  # --logdir=PATH is PATH
        words, FLAGS["logdir"].present = (FLAGS.logdir, *words), 0
    for name in FLAGS:
        is_used = name in READING_FLAGS and command in TAKES.get(name, (command,))
        if FLAGS[name].present and not is_used:
            raise UsageError(f"--{name} does not work with {command}")
    options = {"not_finite": True} if FLAGS.not_finite else {}
    found = reading_commands.run(command, words, **options)
    if FLAGS.format == "json":
        _print_json(found.record)
    else:
        print(found.text)
    return found.exit_code


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
    good = checkpoints.last(FLAGS.last)
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
    from tekso.framework.units import bytes_text

    steps = ", ".join(str(one.step) for one in chosen)
    written = sum(files.size_bytes(files.join(output, name)) for name in files.names(output))
    logdir = FLAGS.logdir or _open(chosen[-1].path).logdir.path
    if FLAGS.format == "json":
        used = [one.path for one in chosen]
        _print_json({"output": output, "step": chosen[-1].step, "averaged": used})
        return
    print(f"averaged {len(chosen)} checkpoints, of steps {steps}: {output} ({bytes_text(written)})")
    print("the state of the learner is copied from the last of them")
    packages = [f"--import={name}" for name in FLAGS["import"].value]
    given = [*packages, "--mode=eval", f"--logdir={logdir}", f"--checkpoint={output}"]
    flags = shlex.join(given)
    print(f"evaluate it:\n  {typed('tekso-trainer')} {flags}")


def _list(paths: list[str]) -> None:
    from tekso.framework.run import checkpoint_tables
    from tekso.framework.tables import terminal_width

    folder = _logdir().checkpoints
    if not files.is_folder(folder):
        raise UsageError(f"--logdir={FLAGS.logdir} has no checkpoints: there is no {folder}")
    rows = list(checkpoint_tables.records(folder))
    if FLAGS.format == "json":
        _print_json(rows)
    else:
        width = terminal_width()
        print(checkpoint_tables.list_text(rows, width=width) if rows else f"{folder} is empty")


def _convert(paths: list[str]) -> None:
    from tekso.tools import weight_commands

    source, output = map(os.path.expanduser, paths)
    done = weight_commands.convert(
        source,
        output,
        match=FLAGS.match,
        model=FLAGS.model,
        settings=FLAGS["set"].value,
        layout=FLAGS.layout,
        imports=FLAGS["import"].value,
        command=sys.argv,
        warn=_warn,
    )
    _print_done(done)


def _merge(paths: list[str]) -> None:
    from tekso.tools import weight_commands

    output = os.path.expanduser(FLAGS.output)
    settings = FLAGS["set"].value
    done = weight_commands.merge(
        _run_of_flags(),
        output,
        settings=settings,
        imports=FLAGS["import"].value,
        command=sys.argv,
    )
    _print_done(done)


def _print_done(done: Done) -> None:
    if FLAGS.format == "json":
        _print_json(done.record)
    else:
        print(done.text)


def _run_of_flags() -> OpenedRun:
    """Returns the run of --logdir and --checkpoint."""
    return _open(FLAGS.logdir, FLAGS.checkpoint) if FLAGS.logdir else _open(FLAGS.checkpoint)


def _logdir() -> Logdir:
    from tekso.framework.run.logdir import Logdir

    return Logdir(os.path.expanduser(FLAGS.logdir))


def _checkpoints() -> Checkpoints:
    from tekso.framework.run.checkpoints import Checkpoints

    return Checkpoints(_logdir().checkpoints, warn=_warn)


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


def _print_json(record: Any) -> None:
    print(to_json(record, indent=1))


if __name__ == "__main__":
    sys.exit(main())
