"""Results of finished runs, stored beside their experiments: results/KEY.json.

    run  ─►  checkpoint.json (evaluation, versions, processor, date), metrics.jsonl (time)
         ─►  result_of  ─►  results/KEY.json  ─►  --list, docs/catalogue.md

Every figure is one that the trainer wrote; nothing is computed again.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from tekso.framework import bounded, files
from tekso.framework.json_text import to_json
from tekso.framework.params import Params
from tekso.framework.run import machine_load, time_use
from tekso.framework.run.checkpoint_description import Description, describe
from tekso.framework.run.checkpoint_errors import DamagedCheckpointError
from tekso.framework.run.early_stopping import early_stopping_of
from tekso.framework.run.logdir import Logdir
from tekso.framework.run.metrics_log import (
    MACHINE,
    SECONDS,
    SEEN,
    SPLIT,
    STEP,
    TRAIN,
    MetricsLog,
    history,
)
from tekso.framework.run.report.lines import duration, magnitude

FOLDER = "results"
_MOST_FIGURES = 5
_LENGTH = (
    "run.log_every_steps",
    "run.decode_at_end",
    "run.keep_last_checkpoints",
    "run.checkpoint_buffer_mb",
)
"""Settings that change no figure."""


class NoResultError(ValueError):
    """A run has no final evaluation."""


def result_of(logdir: Logdir, registered: Params) -> dict[str, Any]:
    """Returns the result of a finished run, as JSON data.

    Args:
      logdir: its logdir.
      registered: Params of the experiment as registered.

    Raises:
      NoResultError: the run is not finished, or its last checkpoint has no evaluation.
      LogdirError: the logdir has no run.
    """
    model, tree = logdir.experiment()
    found = _last(logdir)
    records = [r for r in MetricsLog(logdir.metrics).read() if r[STEP] <= found.step]
    rule = early_stopping_of(tree)
    ended = rule is not None and rule.reason(history(records, rule.metric))
    if found.step < tree.run.steps and not ended:
        raise NoResultError(
            f"{logdir.path} is not finished: its last checkpoint is of step {found.step} of "
            f"{tree.run.steps}"
        )
    if not found.metrics:
        raise NoResultError(
            f"{logdir.path} has no evaluation at its last step {found.step}: the experiment needs "
            "eval_inputs"
        )
    spent: Mapping[str, Any] = next((r[SECONDS] for r in reversed(records) if SECONDS in r), {})
    seconds = {name: round(value, 1) for name, value in time_use.valid(spent).items()}
    progress = [r for r in MetricsLog(logdir.progress).read() if r[STEP] == found.step]
    unit, seen = _seen([*records, *progress])  # not every step is in the records
    tree = _portable(registered, tree)
    load = machine_load.longest(r.get(MACHINE) for r in records)
    training = seconds.get(time_use.STEP, 0.0) + seconds.get(time_use.INPUT, 0.0)
    return {
        "model": model,
        "step": found.step,
        "metrics": {name: float(f"{v:.6g}") for name, v in found.metrics.items()},
        "unit": unit,
        "seen": seen,
        "seen_per_second": float(f"{seen / training:.4g}") if training else None,
        "seconds": seconds,
        "machine": None if load is None else dataclasses.asdict(load),
        "conditions": dict(found.conditions),
        "versions": dict(found.versions),
        "date": found.created[:10],
        "changes": _changes(registered, tree),
        "params": tree.to_text().splitlines(),
    }


def write(result: Mapping[str, Any], folder: str) -> str:
    """Writes a result to a folder; returns the path of the file."""
    path = files.join(folder, f"{result['model']}.json")
    files.write_atomically(path, to_json(result, indent=1) + "\n")
    return path


def read(key: str, file: str) -> dict[str, Any] | None:
    """Returns the stored result of an experiment; None if there is none.

    It is in the folder `results` of the package of the experiment, or of a package above.

    Args:
      key: key of the experiment.
      file: the source file of the experiment.

    Raises:
      NoResultError: the file is damaged.
    """
    folder = os.path.dirname(os.path.realpath(file))
    while os.path.isfile(os.path.join(folder, "__init__.py")):
        path = os.path.join(folder, FOLDER, f"{key}.json")
        if os.path.isfile(path):
            return _parsed(path)
        folder = os.path.dirname(folder)
    return None


def _parsed(path: str) -> dict[str, Any]:
    try:
        found = bounded.parse_json(bounded.read(path))
        figures(found), cost(found), found["changes"], found["params"]
    except (ValueError, LookupError, TypeError, AttributeError, StopIteration):
        raise NoResultError(
            f"{path} is damaged: write it again with tekso-results, or remove it"
        ) from None
    return dict(found)


def figures(result: Mapping[str, Any]) -> str:
    """Returns the figures of the first evaluation as text: "dev: loss 1.23, accuracy 0.9"."""
    metrics: Mapping[str, float | None] = result["metrics"]  # null: not finite
    split = next(iter(metrics)).partition("/")[0]
    own = {n.partition("/")[2]: v for n, v in metrics.items() if n.startswith(f"{split}/")}
    shown = [f"{name} {math.nan if v is None else v:.4g}" for name, v in own.items()][
        :_MOST_FIGURES
    ]
    return f"{split}: {', '.join(shown)}"


def cost(result: Mapping[str, Any]) -> str:
    """Returns what the figures took: steps, time, speed, machine, its load and date, as text."""
    conditions = result["conditions"]
    parts = [f"{result['step']} steps", duration(math.fsum(result["seconds"].values()))]
    if result["seen_per_second"]:
        parts.append(f"{magnitude(result['seen_per_second'])} {result['unit']}/s")
    parts.append(f"{conditions.get('processor', 'unknown processor')}")
    parts.append(conditions.get("devices", "unknown devices"))
    load = machine_load.of_record(result.get("machine"))  # None of results of earlier versions
    if load is not None and (beside := load.text()):
        parts.append(beside)
    parts.append(f"TensorFlow {result['versions'].get('tensorflow', '?')}")
    parts.append(result["date"])
    return ", ".join(parts)


def is_current(result: Mapping[str, Any], registered: Params) -> bool:
    """Returns whether an experiment still has the Params that were measured."""
    try:
        measured = Params.from_text("\n".join(result["params"]))
    except (ValueError, ImportError):
        return False
    return _changes(registered, measured) == list(result["changes"])


def _portable(registered: Params, tree: Params) -> Params:
    """Returns a copy in which paths of a machine are only names: files outside of the folder.

    Values that are registered stay, as they are the same everywhere.
    """
    found, values = tree.copy(), {}

    def look(path: str, value: Any, field: Any) -> None:
        del field
        short = _shortened(value)
        if short != value and (path not in registered or registered.get(path) != value):
            values[path] = short

    found.visit(look)
    for path, value in values.items():
        found.set({path: value})
    return found


def _shortened(value: Any) -> Any:
    if isinstance(value, str):
        is_outside = value.startswith(("/", "~", "../")) and len(value) > 1
        return value.rstrip("/").rpartition("/")[2] if is_outside else value
    if isinstance(value, list):
        return [_shortened(one) for one in value]
    if isinstance(value, Mapping):
        return {name: _shortened(one) for name, one in value.items()}
    return value


def _last(logdir: Logdir) -> Description:
    """Returns the description of the newest checkpoint that can be read."""
    names = sorted(files.names(logdir.checkpoints)) if files.exists(logdir.checkpoints) else []
    for name in reversed(names):
        try:
            return describe(files.join(logdir.checkpoints, name))
        except DamagedCheckpointError:
            continue
    raise NoResultError(f"{logdir.path} has no checkpoint")


def _seen(records: Sequence[Mapping[str, Any]]) -> tuple[str, float]:
    """Returns the unit of the processed data, and how much of it the run has processed."""
    for record in reversed(records):
        for name, value in record.items() if record[SPLIT] == TRAIN else ():
            if name.endswith(SEEN) and isinstance(value, int | float):
                return name.removesuffix(SEEN), value
    return "", 0.0


def _changes(registered: Params, tree: Params) -> list[str]:
    """Returns the differences to the registered Params, without those that change no figure."""
    lines = registered.diff(tree).splitlines()
    return [line.partition("  # ")[0] for line in lines if not line.startswith(_LENGTH)]
