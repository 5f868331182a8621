"""Defines and parses the flags of tekso-trainer."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any

from absl import flags

from tekso.framework.commands import typed
from tekso.framework.spelling import close_matches
from tekso.tools import command_flags, flag_modes, other_frameworks
from tekso.tools.command_errors import UsageError
from tekso.tools.flag_modes import MODES

PROGRAM = "tekso-trainer"
EXAMPLE = "--model=lm.python_source.Tiny"
LITERT = ("float32", "int8")

# A separate FlagValues, so that --help lists only these flags.
FLAGS: Any = flags.FlagValues()  # type: ignore[no-untyped-call]


def _define_run(f: flags.FlagValues) -> None:
    flags.DEFINE_string("model", None, "Key of the experiment; --list shows all.", flag_values=f)
    flags.DEFINE_string(
        "logdir",
        None,
        "Folder of the run. If it contains a run, training resumes from the last checkpoint. By "
        "default runs/<model>.",
        flag_values=f,
    )
    flags.DEFINE_enum(
        "mode",
        "train",
        MODES,
        "train; eval: evaluate a checkpoint; follow: evaluate the checkpoints of a run as they "
        "appear, during training; decode: print samples and scores; export: write a "
        "SavedModel that runs without Tekso; replay: run a step that was not finite again, "
        "layer by layer; inspect_params: print all Params with their docs; "
        "inspect_model: print the table of weights, without allocating them; inspect_sharding: "
        "print what each device of a mesh stores and exchanges; inspect_pipeline: print the stages "
        "and the schedule of a pipeline; plan: print whether the run fits into memory and on the "
        "disk, the estimated time of a step, and what it would resume; exit code 1 if it would "
        "fail. The inspect modes and plan need no devices.",
        flag_values=f,
    )
    flags.DEFINE_multi_string(
        "set",
        [],
        "path=value, as in --set learner.schedule.initial_value=0.01; can be repeated. A path may "
        "contain wildcards: --set '*.dropout=0.1'.",
        flag_values=f,
    )
    flags.DEFINE_integer("steps", None, "Number of training steps: run.steps.", flag_values=f)
    flags.DEFINE_integer("seed", None, "Seed of all random numbers: run.seed.", flag_values=f)
    flags.DEFINE_integer(
        "log_every", None, "Steps between two log lines: run.log_every_steps.", flag_values=f
    )
    flags.DEFINE_boolean(
        "deterministic",
        None,
        "Make runs reproducible bit for bit: run.deterministic.",
        flag_values=f,
    )


def _define_devices(f: flags.FlagValues) -> None:
    flags.DEFINE_string(
        "execution",
        None,
        "How a step is distributed over devices: data_parallel, mesh_sharded, pipelined or "
        "spmd_pipelined. By default the execution of the experiment.",
        flag_values=f,
    )
    flags.DEFINE_integer(
        "cpu_devices",
        None,
        "Number of devices to divide the CPU into, to try a mesh or a pipeline on one machine. By "
        "default as many as the execution needs.",
        flag_values=f,
    )
    flags.DEFINE_boolean(
        "auto",
        False,
        "With inspect_sharding: search meshes and rules for the fastest step, estimated by a cost "
        "model, and rank them. With plan: rank executions over --devices.",
        flag_values=f,
    )
    flags.DEFINE_integer(
        "devices",
        None,
        "With --auto: search all meshes over this number of devices. By default only the mesh of "
        "the experiment. With plan: number of devices.",
        lower_bound=1,
        flag_values=f,
    )
    flags.DEFINE_string(
        "device",
        "tpu_v3",
        "With --auto or plan: device type: tpu_v2, tpu_v3 (cores), tpu_v4, v100, a100, h100, "
        "cpu, or this_machine, whose speed is measured (the default of plan).",
        flag_values=f,
    )


def _define_outputs(f: flags.FlagValues) -> None:
    flags.DEFINE_string(
        "output",
        None,
        "With inspect_pipeline: file for the picture of the schedule, such as schedule.png. With "
        "export: folder to write; by default export in the logdir.",
        flag_values=f,
    )
    flags.DEFINE_list(
        "litert",
        [],
        "With export: also write LiteRT files with float32 weights, int8 weights or both "
        "(float32,int8); each takes one example of the longest length. Of images, int8 is "
        "calibrated with the training data.",
        flag_values=f,
    )
    flags.DEFINE_integer(
        "export_batch_size",
        8,
        "With export: number of examples computed together.",
        lower_bound=1,
        flag_values=f,
    )
    flags.DEFINE_list(
        "export_lengths",
        [],
        "With export: rows are padded to the next of these lengths, such as 16,64. By default a "
        "few lengths up to the longest input of the model.",
        flag_values=f,
    )
    flags.DEFINE_boolean(
        "trace_pipeline",
        False,
        "With train: draw the measured timeline of a step of a pipeline next to the predicted one, "
        "and save the picture as pipeline.png in the logdir.",
        flag_values=f,
    )


def _define_profile(f: flags.FlagValues) -> None:
    flags.DEFINE_string(
        "profile_steps",
        None,
        "With train: record TensorFlow's profile of these steps (10-14, or 10) in the folder "
        "profile of the logdir, for TensorBoard.",
        flag_values=f,
    )


def _define_processes(f: flags.FlagValues) -> None:
    flags.DEFINE_string(
        "tpu", None, "TPU to run on: a name, an address, or local; a mesh: local.", flag_values=f
    )
    flags.DEFINE_string(
        "cluster",
        None,
        "Addresses of all processes of the run (host:port,host:port), the same list in each "
        "process; none: only this process. By default from TF_CONFIG, or else from SLURM.",
        flag_values=f,
    )
    flags.DEFINE_integer("process", None, "Index of this process in --cluster.", flag_values=f)
    command_flags.define_network(f)
    flags.DEFINE_string(
        "cluster_token_file",
        None,
        "File with the secret that all processes share, which nobody else may read. By default the "
        "environment variable TEKSO_CLUSTER_TOKEN, or else a file that the first process creates "
        "in the logdir.",
        flag_values=f,
    )
    flags.DEFINE_float(
        "cluster_timeout_s",
        120.0,
        "Seconds to wait until all processes have joined.",
        lower_bound=1.0,
        flag_values=f,
    )
    flags.DEFINE_float(
        "wait_limit_s",
        300.0,
        "Seconds for which the process may wait for a step, another process, the input or the file "
        "system, and six times as long while something is compiled or prepared. Then it writes the "
        "stacks of all threads to the logdir and ends with exit code 60; 0: no limit.",
        lower_bound=0.0,
        flag_values=f,
    )
    flags.DEFINE_boolean(
        "supervise",
        False,
        "With train: restart the run from its last checkpoint if it crashes, if it is killed, if "
        "another process or a worker of it is lost, or if it stalls.",
        flag_values=f,
    )
    flags.DEFINE_integer(
        "restarts",
        10,
        "With --supervise: number of restarts without a new checkpoint, after which it gives up.",
        lower_bound=1,
        flag_values=f,
    )
    flags.DEFINE_string(
        "warm_start",
        None,
        "With train: start a new run from the weights of this run or checkpoint (RUN, RUN/best, "
        "RUN/STEP), at step 0 and with a new optimizer. run.warm_start has rules for weights of "
        "other names or shapes.",
        flag_values=f,
    )
    flags.DEFINE_string(
        "checkpoint",
        None,
        "Checkpoint for eval, decode and export: a step, a path, best or last. By default "
        "the newest good one.",
        flag_values=f,
    )


def _define_incident(f: flags.FlagValues) -> None:
    flags.DEFINE_string(
        "incident",
        None,
        "With replay: folder of the incident, LOGDIR/incidents/step_….",
        flag_values=f,
    )


def _define_command(f: flags.FlagValues) -> None:
    flags.DEFINE_multi_string(
        "import", [], "Package with your own experiments; can be repeated.", flag_values=f
    )
    flags.DEFINE_string(
        "list",
        None,
        "List the experiments whose keys match a pattern: --list, --list 'lm.*'.",
        flag_values=f,
    )
    flags.DEFINE_enum(
        "format",
        "text",
        ("text", "json"),
        "Output format of --list and all modes except train and follow.",
        flag_values=f,
    )
    flags.DEFINE_boolean(
        "traceback", False, "Print the whole traceback of every error.", flag_values=f
    )
    flags.DEFINE_boolean("help", False, "Print this text.", short_name="h", flag_values=f)


for _define in (
    _define_run, _define_devices, _define_outputs, _define_profile, _define_processes,
    _define_incident, _define_command,
):  # fmt: skip
    _define(FLAGS)


def parse(argv: Sequence[str]) -> None:
    """Parses the flags.

    Raises:
      UsageError: a flag is unknown, its value is wrong, or the mode does not use it.
    """
    words = []
    for i, word in enumerate(argv):
        alone = word == "--list" and (i + 1 == len(argv) or argv[i + 1].startswith("-"))
        words.append("--list=*" if alone else word)
    try:
        rest = command_flags.parse(FLAGS, words)
    except UsageError:
        if text := _setting_for_flag(words):
            raise UsageError(text) from None
        raise
    flag_modes.check(FLAGS)
    if wrong := [kind for kind in FLAGS.litert if kind not in LITERT]:
        raise UsageError(f"--litert: {wrong[0]!r} is unknown; expected float32 or int8")
    if rest:
        hint = f"; did you mean --model={rest[0]}?" if not FLAGS.model and "." in rest[0] else ""
        raise UsageError(f"{rest[0]!r} is not a flag: flags begin with --{hint}")


def profile_steps() -> tuple[int, int] | None:
    """Returns the first and the last step of --profile_steps; None if it is not given.

    Raises:
      UsageError: they are no steps.
    """
    text = FLAGS.profile_steps
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= first <= last:
        raise UsageError(
            f"--profile_steps={text}: expected the first and the last step, counted from 1, as in "
            "--profile_steps=10-14, or one step"
        )
    return first, last


def _setting_for_flag(words: Sequence[str]) -> str:
    """Returns an error for the first unknown flag if it resembles no flag, or ""; see `--set`."""
    for word in words[1:]:
        name, equals, value = word.removeprefix("--").partition("=")
        if word == "--":
            break
        if not word.startswith("--") or name in FLAGS or name.removeprefix("no") in FLAGS:
            continue
        if found := other_frameworks.hint(name):
            return f"there is no flag --{name}; {found}; --help lists the flags"
        is_value = command_flags.flags_with_value(FLAGS, name)
        if is_value or close_matches(name, list(FLAGS), count=1, cutoff=0.8):
            break
        start = f"there is no flag --{name}; settings of the experiment are set by --set"
        if name.replace("-", "_") in ("learning_rate", "lr"):
            return f"{start}; the learning rate is a field of learner.schedule, see inspect_params"
        setting = f"{name}={value}" if "." in name else f"*.{name}={value}"
        example = f", as in --set {shlex.quote(setting)}" if equals else " path=value"
        return f"{start}{example}; --help lists the flags"
    return ""


def help_text() -> str:
    """Returns the text of --help."""
    text = command_flags.help_text(
        FLAGS,
        usage=f"{typed(PROGRAM)} {EXAMPLE} --logdir=runs/tiny [--set path=value …]",
        purpose="Trains, evaluates, decodes, exports or inspects a registered experiment.",
        value_names={
            "list": "glob",
            "cluster": "addresses",
            "device": "type",
            "litert": "types",
            "export_lengths": "N,N",
            "cluster_token_file": "file",
            "warm_start": "run",
            "incident": "folder",
            "output": "path",
            "profile_steps": "first-last",
        },
    )
    return (
        f"{text}\n\nExit codes: 0 success; 1 error; 2 wrong command line; 129 (SIGHUP), 130\n"
        "(SIGINT) or 143 (SIGTERM) stopped by a signal, after the state was saved.\n"
        "docs/faults.md lists the others."
    )
