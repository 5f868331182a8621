"""Reports on resume whether a run continues to the last bit, and if not, why.

The sums of a step have the same bits if nothing changes their order: the Params of the execution,
the number of devices, processes and cores, the processor, what computes large products, and
TensorFlow's version. Every checkpoint has these conditions. Under other ones, the figures are equal
up to rounding.
"""

from __future__ import annotations

import collections
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from tekso.framework.cores import num_cores
from tekso.framework.params import Params
from tekso.framework.primitives.products import compiles_products
from tekso.framework.run.checkpoint_description import Description
from tekso.framework.run.process_group import ProcessGroup

_CPUINFO = Path("/proc/cpuinfo")
_TENSORFLOW = "TensorFlow"
_EARLIER = {"products": _TENSORFLOW}  # of checkpoints without this condition


def conditions(group: ProcessGroup | None = None) -> dict[str, Any]:
    """Returns what decides the order of sums besides the Params; call it after the devices are set.

    Returns:
      {"devices": e.g. "2 CPU", "processes": their number, "processor": its model, "cores": those
      that the process may use, "products": what computes large ones if clusters are compiled}.
    """
    counts = collections.Counter(d.device_type for d in tf.config.list_logical_devices())
    if len(counts) > 1:
        del counts["CPU"]  # the host of other devices
    devices = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    processes = group.size if group is not None else 1
    return {
        "devices": devices,
        "processes": processes,
        "processor": _processor(),
        "cores": num_cores(),
        "products": "XLA" if compiles_products() else _TENSORFLOW,
    }


def line(before: Description, now: Description, tree: Any) -> str:
    """Returns a line for a run that resumes, or "" if nothing can be said.

    Nothing can be said if an earlier version wrote the checkpoint. If Params other than those of
    the execution changed, there is no uninterrupted run to compare with, and the line only names
    other devices and numbers of processes.

    Args:
      before: the description of the checkpoint.
      now: the description of the checkpoints that the run will write.
      tree: the Params of the run.
    """
    if not before.conditions:
        return ""
    try:
        changed = Params.from_text(before.params).diff(tree).splitlines()
    except (ValueError, ImportError, AttributeError, TypeError):
        return ""
    if any(not text.startswith("execution") for text in changed):
        moved = [n for n in ("devices", "processes") if n in before.conditions]
        moved = [r for n in moved for r in _change(n, before.conditions[n], now.conditions.get(n))]
        return f"changed since the checkpoint: {'; '.join(moved)}" if moved else ""
    if _overlaps_steps(tree):
        return (
            "the results depend on timing, as in every run in which groups of workers do not wait "
            "for each other"
        )
    reasons = ["changed Params of the execution"] if changed else []
    reasons += _changes(before.conditions, now.conditions)
    reasons += _change("TensorFlow", before.versions.get("tensorflow"), tf.__version__)
    if reasons:
        return (
            f"the results equal those of an uninterrupted run up to rounding: {'; '.join(reasons)}"
        )
    if not tree.run.deterministic:
        return (
            "the results equal those of an uninterrupted run, except for ops whose order "
            "TensorFlow does not fix; with --deterministic, to the last bit"
        )
    return "the results equal those of an uninterrupted run to the last bit"


def _overlaps_steps(tree: Any) -> bool:
    """Returns whether steps are computed with weights that lack the updates of earlier ones."""
    updates = tree.execution.get("updates") if "updates" in tree.execution else None
    return updates is not None and updates.instantiate().num_groups > 1


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [
        reason
        for name in now
        for reason in _change(name, before.get(name, _EARLIER.get(name, now[name])), now[name])
    ]


def _change(name: str, before: Any, now: Any) -> list[str]:
    return [f"{name} {before} -> {now}"] if before != now else []


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", _CPUINFO.read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.machine()
