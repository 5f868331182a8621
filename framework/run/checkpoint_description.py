"""The description of a checkpoint: the content of its JSON file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from tekso.framework import bounded, files
from tekso.framework.run import comparable
from tekso.framework.run.checkpoint_errors import DamagedCheckpointError, first_line
from tekso.framework.run.lease import DESCRIPTION
from tekso.framework.run.skipped_batches import SkippedBatches

FORMAT = 1
_NUMBER = (int, float)
_TYPES: Mapping[str, Any] = {
    "step": int, "model": str, "params": str, "task": str, "metrics": dict, "input": dict,
    "tensors": dict, "versions": dict, "conditions": dict, "created": str, "files": dict,
    "averaged": list, "goal": str,
}  # fmt: skip
_INSIDE: Mapping[str, Any] = {"metrics": _NUMBER, "tensors": dict, "files": dict}
_NAMES = {int: "an integer", str: "a text", dict: "an object", list: "a list", _NUMBER: "a number"}


@dataclasses.dataclass(frozen=True)
class Description:
    """The content of checkpoint.json.

    Attributes:
      step: training steps done.
      model: key of the experiment.
      params: text of the whole Params tree.
      task: text of the Params of the task, completed with the sizes from the data; "" if an earlier
        version wrote the checkpoint.
      metrics: figures of the evaluations at this step, {"evaluation/metric": value}.
      input: seed and position of the training input, the batches that the run has skipped (see
        `SkippedBatches`), and which evaluations can be compared (see `comparable`).
      tensors: {key: {"shape", "dims", "dtype"}} of every tensor in the file; and "scale", if its
        weight has one (see `WeightSpec`).
      versions: versions of the software that wrote the checkpoint.
      conditions: what the order of sums depends on besides the Params; see `reproducibility.py`.
      created: time of writing, UTC.
      files: {name: {"size_bytes", "sha256"}} of the tensor files.
      averaged: the checkpoints of which this one is the average; empty for a checkpoint of a
        training run.
      goal: "min" or "max": whether the smallest or the largest value of the metric of
        `run.keep_best` is best; "" if an earlier version wrote the checkpoint, or if the run keeps
        no best checkpoint.
    """

    step: int
    model: str
    params: str
    task: str = ""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    input: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tensors: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    conditions: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    created: str = ""
    files: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    averaged: Sequence[str] = ()
    goal: str = ""

    def at(self, step: int, metrics: Mapping[str, float]) -> Description:
        """Returns the description of a checkpoint of the same run at a step.

        Args:
          step: training steps done.
          metrics: {"evaluation/metric": value} of the evaluations at this step.
        """
        position = {**self.input, "position": self.position(step)}
        return dataclasses.replace(self, step=step, metrics=metrics, input=position)

    def position(self, step: int) -> int:
        """Returns the number of the batch that a step of the run trains on."""
        return SkippedBatches.of(self.input).position(step)

    def to_json(self) -> str:
        """Returns the text of the JSON file."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> Description:
        """Reads what `to_json` wrote.

        Raises:
          ValueError: the text is not a description, or has a later format.
        """
        fields = bounded.parse_json(text)
        if not isinstance(fields, dict) or fields.pop("format", None) != FORMAT:
            raise ValueError(f"not the description of a checkpoint of format {FORMAT}")
        known = {field.name for field in dataclasses.fields(Description)}
        if missing := {"step", "model", "params", "files"} - fields.keys():
            raise ValueError(f"the description lacks {', '.join(sorted(missing))}")
        for name in known & fields.keys():
            _check_type(name, fields[name])
        _check_input(fields.get("input", {}))
        return Description(**{name: value for name, value in fields.items() if name in known})


def describe(path: str) -> Description:
    """Reads only the description of a checkpoint.

    Raises:
      DamagedCheckpointError: there is no description, or it cannot be read.
    """
    try:
        return Description.from_json(bounded.read(files.join(path, DESCRIPTION)).decode("utf-8"))
    except FileNotFoundError:
        raise DamagedCheckpointError(
            f"it has no {DESCRIPTION}: writing it was interrupted"
        ) from None
    except (ValueError, TypeError, OSError) as error:
        raise DamagedCheckpointError(f"{DESCRIPTION} is damaged: {first_line(error)}") from error


def _check_type(name: str, value: Any) -> None:
    """Raises a ValueError unless a field has the type that `to_json` writes."""
    wanted = _TYPES[name]
    inside = _INSIDE.get(name)
    if not _is_of(value, wanted):
        raise ValueError(f"{name} must be {_NAMES[wanted]}")
    for key, part in value.items() if inside is not None else ():
        if not _is_of(part, inside):
            raise ValueError(f"{name}: {key} must be {_NAMES[inside]}")
        if name == "files" and not _is_of(part.get("size_bytes"), int):
            raise ValueError(f"{name}: {key} has no size_bytes")
        if name == "files" and files.base_name(key) != key:  # it would be outside of the folder
            raise ValueError(f"{name}: {key} is not the name of a file in the folder")


def _check_input(input: Mapping[str, Any]) -> None:
    """Raises a ValueError unless the position in the input is described as `at` does."""
    for name in ("seed", "position"):
        if name in input and not _is_of(input[name], int):
            raise ValueError(f"input: {name} must be an integer")
    SkippedBatches.of(input)
    comparable.check(input)


def _is_of(value: Any, wanted: Any) -> bool:
    return isinstance(value, wanted) and not isinstance(value, bool)
