"""tekso-trainer: trains a registered experiment, evaluates it, decodes with it or shows it."""

from __future__ import annotations

import difflib
import json
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from absl import flags

from tekso.tools import command_errors
from tekso.tools.command_errors import OK, UsageError

if TYPE_CHECKING:  # slow to import: the functions below import what they need when they run
    from tekso.framework.experiment import Tree
    from tekso.framework.logdir import Logdir
    from tekso.framework.modes import Job

PROGRAM = "tekso-trainer"
MODES = ("train", "eval", "decode", "inspect_params", "inspect_model")
EXAMPLE = "--model=lm.python_source.Tiny"
_ON_RUNS = ("eval", "decode")

FLAGS = flags.FlagValues()  # of our own: --help shows these, and not those of libraries


def _define() -> None:
    f = FLAGS
    flags.DEFINE_string("model", None, "Key of the experiment; --list shows all.", flag_values=f)
    flags.DEFINE_string(
        "logdir",
        None,
        "Folder of the run. The same folder again goes on where the run stopped. By default "
        "runs/<model>.",
        flag_values=f,
    )
    flags.DEFINE_enum(
        "mode",
        "train",
        MODES,
        "train; eval: evaluate a checkpoint; decode: show samples and scores; inspect_params: the "
        "tree of parameters with docs; inspect_model: the table of weights, nothing is allocated.",
        flag_values=f,
    )
    flags.DEFINE_multi_string(
        "set",
        [],
        "path=value, as in --set learner.schedule.initial_value=0.01; can be repeated. A path may "
        "have wildcards: --set '*.dropout=0.1'.",
        flag_values=f,
    )
    flags.DEFINE_integer("steps", None, "Number of training steps: run.steps.", flag_values=f)
    flags.DEFINE_integer("seed", None, "Seed of everything random: run.seed.", flag_values=f)
    flags.DEFINE_integer(
        "log_every", None, "Steps between two lines: run.log_every_steps.", flag_values=f
    )
    flags.DEFINE_boolean(
        "deterministic", None, "The same run gives the same bits: run.deterministic.", flag_values=f
    )
    flags.DEFINE_string(
        "execution",
        None,
        "How a step is laid over devices: data_parallel, mesh_sharded or pipelined. By default as "
        "the experiment says.",
        flag_values=f,
    )
    flags.DEFINE_integer(
        "cpu_devices", None, "Make so many logical devices of the CPU.", flag_values=f
    )
    flags.DEFINE_string("tpu", None, "Name or address of a TPU to run on.", flag_values=f)
    flags.DEFINE_string(
        "checkpoint",
        None,
        "Step or path of the checkpoint for eval and decode; by default the newest good one.",
        flag_values=f,
    )
    flags.DEFINE_multi_string(
        "import", [], "Package with experiments of your own; can be repeated.", flag_values=f
    )
    flags.DEFINE_string(
        "list",
        None,
        "List the experiments whose keys match: --list, --list 'lm.*'.",
        flag_values=f,
    )
    flags.DEFINE_enum(
        "format", "text", ("text", "json"), "What --list and every mode but train print.",
        flag_values=f,
    )  # fmt: skip
    flags.DEFINE_boolean(
        "traceback", False, "Show the whole traceback of every error.", flag_values=f
    )
    flags.DEFINE_boolean("help", False, "Show this text.", short_name="h", flag_values=f)


_define()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the trainer; returns the exit code.

    0 is done, 1 an error, 2 a wrong command line, 130 or 143 stopped by SIGINT or SIGTERM after
    the state was saved.
    """
    argv = list(sys.argv if argv is None else argv)
    show_traceback = "--traceback" in argv
    return command_errors.run(PROGRAM, lambda: _run(argv), show_traceback=show_traceback)


def _run(argv: list[str]) -> int:
    _parse(argv)
    if FLAGS.help:
        print(_help())
        return OK
    _load()
    if FLAGS["list"].value is not None:
        return _list(FLAGS["list"].value)
    mode: str = FLAGS.mode
    actions: dict[str, Callable[[list[str]], int]] = {
        "train": _train,
        "eval": _eval,
        "decode": _decode,
        "inspect_params": _inspect_params,
        "inspect_model": _inspect_model,
    }
    return actions[mode](argv)


# --- flags ---


def _parse(argv: list[str]) -> None:
    """Parses the flags.

    Raises:
      UsageError: one is unknown or its value is wrong.
    """
    FLAGS.unparse_flags()
    for name in FLAGS:
        FLAGS[name].unparse()
    words = []
    for i, word in enumerate(argv):
        alone = word == "--list" and (i + 1 == len(argv) or argv[i + 1].startswith("-"))
        words.append("--list=*" if alone else word)
    try:
        rest = FLAGS(words)[1:]
    except flags.Error as error:
        raise UsageError(f"{_flag_error(error)}; --help lists the flags") from None
    if rest:
        hint = f"; did you mean --model={rest[0]}?" if not FLAGS.model and "." in rest[0] else ""
        raise UsageError(f"{rest[0]!r} is no flag: flags begin with --{hint}")


def _flag_error(error: flags.Error) -> str:
    if not isinstance(error, flags.UnrecognizedFlagError):
        return str(error).replace("\n", " ")
    close = difflib.get_close_matches(error.flagname, list(FLAGS), n=2)
    hint = f"; did you mean {' or '.join(f'--{name}' for name in close)}?" if close else ""
    return f"there is no flag --{error.flagname}{hint}"


def _help() -> str:
    lines = [
        f"usage: {PROGRAM} {EXAMPLE} --logdir=runs/tiny [--mode=train] [--set path=value …]",
        "",
        (sys.modules[__name__].__doc__ or "").partition(": ")[2].capitalize(),
        "",
    ]
    for name in FLAGS:
        flag = FLAGS[name]
        if name != flag.name:
            continue  # a short name
        shown = f"  --{name}" if flag.boolean else f"  --{name}={_value_name(flag)}"
        default = flag.default
        has_default = default not in (None, [], False)
        text = flag.help + (f" Default: {default}." if has_default else "")
        lines.append(shown)
        lines += textwrap.wrap(text, 92, initial_indent=" " * 6, subsequent_indent=" " * 6)
    lines += [
        "",
        "Exit codes: 0 done; 1 an error; 2 a wrong command line; 130 (SIGINT) or 143 (SIGTERM)",
        "stopped after the state was saved.",
    ]
    return "\n".join(lines)


def _value_name(flag: Any) -> str:
    values = getattr(flag.parser, "enum_values", None)
    if values:
        return "|".join(values)
    names = {"set": "path=value", "list": "glob", "import": "package", "model": "key"}
    return names.get(flag.name, "N" if "int" in flag.flag_type() else "text")


# --- from flags to a tree ---


def _load() -> None:
    """Imports TensorFlow and the packages that --import names."""
    from tekso.framework import registry
    from tekso.framework.quiet_tensorflow import import_tensorflow

    model = FLAGS.model
    packages = FLAGS["import"].value
    if model and not packages:
        _check_module(model)
    import_tensorflow()
    for package in packages:
        try:
            registry.import_package(package)
        except ModuleNotFoundError as error:
            if error.name and package.startswith(error.name):
                raise UsageError(
                    f"--import={package}: there is no package {error.name!r} in {os.getcwd()} or "
                    "among the installed ones"
                ) from None
            raise


def _check_module(model: str) -> None:
    """Tells a typo in the module of --model before anything slow is imported."""
    from tekso.framework import registry

    module = model.removeprefix(registry.PACKAGE + ".").rpartition(".")[0]
    if module not in registry._modules_on_disk():
        _experiment(model)


def _experiment(model: str) -> Any:
    from tekso.framework import registry

    try:
        return registry.get(model)
    except registry.UnknownExperimentError as error:
        raise UsageError(f"--model={model}: {error}") from None


def _registered(model: str) -> tuple[str, Tree.Params]:
    """Returns the key of an experiment and its tree."""
    from tekso.framework import registry

    experiment = _experiment(model)
    return registry.key_of(experiment), experiment().tree()


def _apply_flags(tree: Tree.Params) -> None:
    """Changes a tree as the flags say.

    Raises:
      UsageError: a path is unknown, a value has the wrong type or is out of range.
    """
    if FLAGS.execution is not None:
        _choose_execution(tree, FLAGS.execution)
    for text in FLAGS.set:
        path, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--set {text}: a setting reads path=value")
        _set_text(tree, path.strip(), value, flag=f"--set {text}", origin="--set")
    for flag, path in (
        ("steps", "run.steps"),
        ("seed", "run.seed"),
        ("log_every", "run.log_every_steps"),
        ("deterministic", "run.deterministic"),
    ):
        value = FLAGS[flag].value
        if value is not None:
            _set_text(tree, path, str(value), flag=f"--{flag}={value}", origin=f"--{flag}")
    try:
        tree.run.instantiate()
    except ValueError as error:
        raise UsageError(str(error)) from None


def _set_text(tree: Tree.Params, path: str, value: str, *, flag: str, origin: str) -> None:
    try:
        tree.set_text(path, value, origin=origin)
    except (AttributeError, ValueError, TypeError) as error:
        raise UsageError(f"{flag}: {error}") from None


def _choose_execution(tree: Tree.Params, name: str) -> None:
    from tekso.framework import execution

    try:
        chosen = execution.by_name(name)
    except execution.ExecutionError as error:
        raise UsageError(f"--execution={name}: {error}") from None
    if tree.execution.owner is not chosen:
        tree.execution = chosen.Params()


def _logdir(model: str | None) -> Logdir:
    from tekso.framework.logdir import Logdir

    path = FLAGS.logdir or (f"runs/{model}" if model else "")
    if not path:
        raise UsageError(f"--model is missing, as in {EXAMPLE}; --list shows all")
    return Logdir(os.path.expanduser(path))


def _tree_for(mode: str) -> tuple[str, Tree.Params, Tree.Params]:
    """Returns key, tree and defaults: of --model, or else of the run in --logdir."""
    if FLAGS.model:
        model, tree = _registered(FLAGS.model)
    else:
        model, tree = _tree_of_run(_logdir(None))
    defaults = _defaults(model, tree)
    _apply_flags(tree)
    return model, tree, defaults


def _tree_of_run(logdir: Logdir) -> tuple[str, Tree.Params]:
    model = logdir.model()
    if model is None:
        raise UsageError(
            f"--model is missing, and {logdir.path} has no run whose parameters could be taken"
        )
    return model, logdir.read_params()


def _defaults(model: str, tree: Tree.Params) -> Tree.Params:
    """The tree of an experiment as registered; `tree` itself if it is registered no more."""
    from tekso.framework import registry

    try:
        return registry.get(model)().tree()
    except registry.UnknownExperimentError:
        return tree.copy()


# --- modes ---


def _train(argv: list[str]) -> int:
    from tekso.framework import modes

    model, tree, defaults = _tree_for("train")
    return modes.train(_job(model, tree, defaults, _logdir(model), argv))


def _job(
    model: str, tree: Tree.Params, defaults: Tree.Params, logdir: Logdir, argv: list[str]
) -> Job:
    from tekso.framework import modes
    from tekso.framework.report_console import console_for

    is_json = FLAGS.format == "json"
    return modes.Job(
        model=model,
        tree=tree,
        defaults=defaults,
        logdir=logdir,
        console=console_for(sys.stderr if is_json else sys.stdout),
        command=[PROGRAM, *argv[1:]],
        imports=FLAGS["import"].value,
        tpu=FLAGS.tpu,
        cpu_devices=FLAGS.cpu_devices,
    )


def _job_of_checkpoint(argv: list[str]) -> tuple[Job, Any]:
    """Returns the job and the checkpoint: its tree is that of the checkpoint, then the flags."""
    from tekso.framework import modes
    from tekso.framework.report_console import console_for

    logdir = _logdir(FLAGS.model)
    if FLAGS.model and FLAGS.checkpoint is None:
        logdir.check_model(_registered(FLAGS.model)[0])
    checkpoint = modes.open_checkpoint(logdir, FLAGS.checkpoint, console_for(sys.stderr))
    model, tree = modes.tree_of(checkpoint)
    _apply_flags(tree)
    return _job(model, tree, tree.copy(), logdir, argv), checkpoint


def _eval(argv: list[str]) -> int:
    from tekso.framework import modes

    job, checkpoint = _job_of_checkpoint(argv)
    figures = modes.evaluate_checkpoint(job, checkpoint)
    if FLAGS.format == "json":
        _print_json(figures)
    return OK


def _decode(argv: list[str]) -> int:
    from tekso.framework import modes

    job, checkpoint = _job_of_checkpoint(argv)
    decoded = modes.decode(job, checkpoint)
    if FLAGS.format == "json":
        _print_json(
            {
                "model": job.model,
                "checkpoint": checkpoint.path,
                "step": checkpoint.step,
                "records": decoded.records,
            }
        )
    else:
        print(decoded.text)
    return OK


def _inspect_params(argv: list[str]) -> int:
    from tekso.framework import inspection

    model, tree, _ = _tree_for("inspect_params")
    record = inspection.params_record(model, tree)
    _print(record, inspection.params_text)
    return OK


def _inspect_model(argv: list[str]) -> int:
    from tekso.framework import inspection

    model, tree, _ = _tree_for("inspect_model")
    record = inspection.model_record(model, inspection.task_of(tree))
    _print(record, inspection.model_text)
    return OK


def _list(pattern: str) -> int:
    from tekso.framework import inspection, registry

    entries = registry.list_experiments(pattern)
    if not entries:
        known = ", ".join(entry.key for entry in registry.list_experiments())
        raise UsageError(f"--list={pattern}: no experiment matches; there are: {known or 'none'}")
    rows = [inspection.list_record(entry) for entry in entries]
    if FLAGS.format == "json":
        _print_json(rows)
    else:
        print(inspection.list_text(rows))
    return OK


def _print(record: dict[str, Any], to_text: Callable[[dict[str, Any]], str]) -> None:
    if FLAGS.format == "json":
        _print_json(record)
    else:
        print(to_text(record))


def _print_json(record: Any) -> None:
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    sys.exit(main())
