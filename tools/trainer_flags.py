"""The flags of tekso-trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from absl import flags

from tekso.framework.commands import typed
from tekso.tools import command_flags, flag_modes
from tekso.tools.command_errors import UsageError
from tekso.tools.flag_modes import MODES

PROGRAM = "tekso-trainer"
EXAMPLE = "--model=lm.python_source.Tiny"
LITERT = ("float32", "int8")

# Of our own: --help shows these, and not those of libraries.
FLAGS: Any = flags.FlagValues()  # type: ignore[no-untyped-call]


def _define_run(f: flags.FlagValues) -> None:
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
        "train; eval: evaluate a checkpoint; decode: show samples and scores; export: a SavedModel "
        "that needs no Tekso; inspect_params: the tree of parameters with docs; "
        "inspect_model: the table of weights, nothing is allocated; "
        "inspect_sharding: what each device of a mesh holds and exchanges, without the devices; "
        "inspect_pipeline: the stages of a pipeline and its schedule, without the devices.",
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


def _define_devices(f: flags.FlagValues) -> None:
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
    flags.DEFINE_boolean(
        "auto",
        False,
        "With inspect_sharding: search meshes and rules for those whose step is the fastest by a "
        "cost model, and rank them.",
        flag_values=f,
    )
    flags.DEFINE_integer(
        "devices",
        None,
        "With --auto: all meshes over so many devices. By default the mesh of the experiment.",
        lower_bound=1,
        flag_values=f,
    )
    flags.DEFINE_string(
        "device",
        "tpu_v3",
        "With --auto: their type: tpu_v2, tpu_v3 (cores), tpu_v4, v100, a100, h100 or cpu.",
        flag_values=f,
    )


def _define_outputs(f: flags.FlagValues) -> None:
    flags.DEFINE_string(
        "output",
        None,
        "With inspect_pipeline: a file for the picture of the schedule, as schedule.png. With "
        "export: the folder to write; by default export in the logdir.",
        flag_values=f,
    )
    flags.DEFINE_list(
        "litert",
        [],
        "With export: LiteRT files besides, of float32, int8 or float32,int8 weights; each takes "
        "one example of the longest length.",
        flag_values=f,
    )
    flags.DEFINE_integer(
        "export_batch_size",
        8,
        "With export: examples that are computed together.",
        lower_bound=1,
        flag_values=f,
    )
    flags.DEFINE_list(
        "export_lengths",
        [],
        "With export: rows are filled up to the next of these lengths, as 16,64. By default a few "
        "up to what the model sees at once.",
        flag_values=f,
    )
    flags.DEFINE_boolean(
        "trace_pipeline",
        False,
        "With train: show when each device of a pipeline did what in a step, beside what is "
        "predicted; pipeline.png in the logdir.",
        flag_values=f,
    )


def _define_processes(f: flags.FlagValues) -> None:
    flags.DEFINE_string("tpu", None, "Name or address of a TPU to run on.", flag_values=f)
    flags.DEFINE_string(
        "cluster",
        None,
        "Addresses of the processes that run this together (host:port,host:port), the same in "
        "each; none: this one alone. By default as TF_CONFIG says, or else SLURM.",
        flag_values=f,
    )
    flags.DEFINE_integer(
        "process", None, "Index of this process among those of --cluster.", flag_values=f
    )
    flags.DEFINE_float(
        "cluster_timeout_s",
        120.0,
        "Seconds to wait for all processes to come.",
        lower_bound=1.0,
        flag_values=f,
    )
    flags.DEFINE_string(
        "warm_start",
        None,
        "With train: begin a new run with the weights of this run or checkpoint, at step 0 and "
        "with a new optimizer. Rules for weights of other names or shapes: run.warm_start.",
        flag_values=f,
    )
    flags.DEFINE_string(
        "checkpoint",
        None,
        "Step or path of the checkpoint for eval, decode and export, or best; by default the "
        "newest good one.",
        flag_values=f,
    )


def _define_command(f: flags.FlagValues) -> None:
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


for _define in (_define_run, _define_devices, _define_outputs, _define_processes, _define_command):
    _define(FLAGS)


def parse(argv: Sequence[str]) -> None:
    """Parses the flags.

    Raises:
      UsageError: one is unknown, its value is wrong, or the mode does not use it.
    """
    words = []
    for i, word in enumerate(argv):
        alone = word == "--list" and (i + 1 == len(argv) or argv[i + 1].startswith("-"))
        words.append("--list=*" if alone else word)
    rest = command_flags.parse(FLAGS, words)
    flag_modes.check(FLAGS)
    if wrong := [kind for kind in FLAGS.litert if kind not in LITERT]:
        raise UsageError(f"--litert: there is no {wrong[0]!r}; want float32 or int8")
    if rest:
        hint = f"; did you mean --model={rest[0]}?" if not FLAGS.model and "." in rest[0] else ""
        raise UsageError(f"{rest[0]!r} is no flag: flags begin with --{hint}")


def help_text() -> str:
    """Returns the text of --help."""
    text = command_flags.help_text(
        FLAGS,
        usage=f"{typed(PROGRAM)} {EXAMPLE} --logdir=runs/tiny [--set path=value …]",
        purpose="Trains a registered experiment, evaluates it, decodes with it or shows it.",
        value_names={
            "set": "path=value",
            "list": "glob",
            "import": "package",
            "model": "key",
            "cluster": "addresses",
            "output": "path",
        },
    )
    return (
        f"{text}\n\nExit codes: 0 done; 1 an error; 2 a wrong command line; 130 (SIGINT) or 143 "
        "(SIGTERM)\nstopped after the state was saved."
    )
