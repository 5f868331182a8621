"""Defines which flags of tekso-trainer each mode uses, and rejects the others."""

from __future__ import annotations

from typing import Any

from tekso.tools.command_errors import UsageError

MODES = (
    "train",
    "eval",
    "follow",
    "decode",
    "export",
    "replay",
    "inspect_params",
    "inspect_model",
    "inspect_sharding",
    "inspect_pipeline",
    "plan",
)
LIST = "list"
"""Stands for --list, which replaces the mode."""

_PROCESSES = ("train", "eval", "decode")
_RUN = ("train", "eval", "follow", "decode")
_ALL = (*MODES, LIST)
_EXPERIMENT = tuple(mode for mode in MODES if mode != "replay")

USED_IN: dict[str, tuple[str, ...]] = {
    "model": _EXPERIMENT,
    "logdir": _EXPERIMENT,
    "mode": MODES,
    "set": _EXPERIMENT,
    "steps": ("train", "inspect_params", "plan"),
    "seed": (*_RUN, "export", "inspect_params"),
    "log_every": ("train", "inspect_params"),
    "deterministic": (*_RUN, "inspect_params"),
    "warm_start": ("train", "inspect_params", "plan"),
    "execution": (*_RUN, "inspect_params", "inspect_sharding", "inspect_pipeline", "plan"),
    "cpu_devices": (*_RUN, "inspect_sharding"),
    "auto": ("inspect_sharding", "plan"),
    "devices": ("inspect_sharding", "plan"),
    "device": ("inspect_sharding", "plan"),
    "output": ("inspect_pipeline", "export"),
    "litert": ("export",),
    "export_batch_size": ("export",),
    "export_lengths": ("export",),
    "trace_pipeline": ("train",),
    "profile_steps": ("train",),
    "tpu": _RUN,
    "cluster": _PROCESSES,
    "process": _PROCESSES,
    "allow_unauthenticated_network": _PROCESSES,
    "cluster_token_file": _PROCESSES,
    "cluster_timeout_s": _PROCESSES,
    "wait_limit_s": _PROCESSES,
    "supervise": ("train",),
    "restarts": ("train",),
    "checkpoint": ("eval", "decode", "export"),
    "incident": ("replay",),
    "import": _ALL,
    "list": (LIST,),
    "format": tuple(mode for mode in _ALL if mode != "follow"),
    "traceback": _ALL,
    "help": _ALL,
}
"""{flag: modes that use it}, for every flag."""

_INSTEAD = {
    ("cpu_devices", "plan"): "use --devices={}",
    ("logdir", "replay"): "use --incident={}/incidents/step_…, the folder of the step",
    ("checkpoint", "train"): "training continues from the newest good checkpoint of its "
    "--logdir. To start a new run from the weights of another, at step 0 and with a new optimizer, "
    "use --warm_start=RUN. To continue another run in a new logdir, copy its "
    "checkpoint to NEW/checkpoints/step_… and train with --logdir=NEW: it continues at that step, "
    "with the state of its optimizer, to --steps",
}
"""{(flag, mode): what to do instead}; {} is the value of the flag."""


def check(values: Any) -> None:
    """Checks that the chosen mode uses every flag that was given.

    Args:
      values: the parsed flags.

    Raises:
      UsageError: it does not use one; the message names the modes that use it.
    """
    mode = LIST if values["list"].value is not None else values.mode
    given = {name for name in USED_IN if is_given(values[name])}
    for name in (name for name in USED_IN if name in given and mode not in USED_IN[name]):
        if mode == LIST:
            raise UsageError(f"--list shows the experiments and does not use --{name}")
        instead = _INSTEAD.get((name, mode), "").format(values[name].value)
        text = f"--{name} works only with {_listed(USED_IN[name])}, not with {mode}"
        raise UsageError(f"{text}: {instead}" if instead else text)
    if "restarts" in given and not values.supervise:
        raise UsageError("--restarts requires --supervise, which restarts a run that ended")
    if mode == "inspect_sharding":
        _check_auto(given, auto=values.auto)
    if mode == "inspect_params" and {"model", "logdir"} <= given:
        raise UsageError(
            "--mode=inspect_params shows an experiment (--model) or a run (--logdir): give only one"
        )


def check_device(name: str) -> None:
    """Raises a UsageError if --device is no device type."""
    from tekso.framework.costs import device_types
    from tekso.framework.costs.this_machine import THIS_MACHINE
    from tekso.framework.execution.errors import ExecutionError

    if name != THIS_MACHINE:
        try:
            device_types.find(name, also=(THIS_MACHINE,))
        except ExecutionError as error:
            raise UsageError(f"--device={name}: {error}") from None


def is_given(flag: Any) -> bool:
    """Returns whether a flag was given, except as its default (such as --noauto)."""
    return bool(flag.present) and not (flag.boolean and flag.value == flag.default)


def _check_auto(given: set[str], *, auto: bool) -> None:
    """Checks the flags of inspect_sharding that depend on --auto."""
    if not auto and (name := next((n for n in ("devices", "device") if n in given), None)):
        raise UsageError(
            f"--{name} requires --auto; without --auto, set the number of devices by --cpu_devices"
        )
    if auto and "cpu_devices" in given:
        raise UsageError("--cpu_devices does not work with --auto: use --devices")


def _listed(modes: tuple[str, ...]) -> str:
    *first, last = modes
    return "--mode=" + (f"{', '.join(first)} or {last}" if first else last)
