"""Which evaluations of a run can be compared: those of the same metrics on the same data.

Every checkpoint describes the evaluation data. If a run resumes with other data, or with another
definition of the metric that decides (`metric_changes.py`), its best checkpoint and its early
stopping use only evaluations after that step. The step is in every later checkpoint, in the field
`input` of its description.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from tekso.framework.input.data_digests import digest_of

if TYPE_CHECKING:  # it is slow to import, and commands that only read checkpoints do not need it
    from tekso.framework.input.input import Input

_DATA, _SINCE = "eval_data", "comparable_since"
_NEVER_CHANGED = -1


def described(eval_inputs: Mapping[str, Input]) -> dict[str, Any]:
    """Returns entries of a description: digests of the evaluation data, {evaluation: digest}.

    A digest covers what `Input.excerpt` returns, which does not depend on the batch size.
    """
    digests = {name: digest_of(one.excerpt()) for name, one in eval_inputs.items()}
    return {_DATA: digests} if digests else {}


def resumed(before: Mapping[str, Any], now: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Returns the field `input` of the descriptions of a run that resumes.

    Args:
      before: the field in the checkpoint.
      now: the field that describes the inputs of this process.
      step: of the checkpoint.
    """
    since = step if changed(before, now) else comparable_since(before)
    rest = {name: value for name, value in now.items() if name != _SINCE}
    return {**rest, _SINCE: since} if since != _NEVER_CHANGED else rest


def not_before(input: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Returns the field `input` with figures that are comparable after a step at the earliest."""
    return {**input, _SINCE: max(step, comparable_since(input))} if step >= 0 else dict(input)


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns the evaluations in both descriptions whose data differ."""
    old, new = before.get(_DATA, {}), now.get(_DATA, {})
    return [name for name in new if name in old and old[name] != new[name]]


def comparable_since(input: Mapping[str, Any]) -> int:
    """Returns the step after which figures are comparable; -1 if all are."""
    return int(input.get(_SINCE, _NEVER_CHANGED))


def check(input: Mapping[str, Any]) -> None:
    """Checks the entries of a description.

    Raises:
      ValueError: they do not have the form that this module writes.
    """
    since = input.get(_SINCE, 0)
    if not isinstance(since, int) or isinstance(since, bool):
        raise ValueError(f"input: {_SINCE} must be an integer")
    if not isinstance(input.get(_DATA, {}), dict):
        raise ValueError(f"input: {_DATA} must be an object")


def warning(names: Iterable[str], step: int) -> str:
    """Returns the warning of a run that resumes with other evaluation data."""
    return (
        f"the data of {', '.join(names)} changed after step {step}: the best checkpoint and the "
        "patience of early stopping start again from that step; the checkpoint that was best stays"
    )
