"""Compares the scales of stored weights with those of a new model.

    y = x @ w + scale * x @ lora_a @ lora_b          scale = alpha / rank of an adapter

A setting determines the scale, not the weight: with another one, the same weights compute another
function. Checkpoints and exported files describe the scale of each weight that has one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tekso.framework.params import Params
from tekso.framework.run.weight_files import StoredWeights
from tekso.framework.state import WEIGHTS
from tekso.framework.weight_spec import WeightSpec

_MARGIN = 1e-6  # relative; the scale is a quotient of two numbers


def stored_scales(weights: StoredWeights) -> dict[str, float] | None:
    """Returns {path: scale} of stored weights that have a scale; None: unknown.

    Files of other programs do not describe scales. For files of earlier versions of Tekso, the task
    is built from its Params.
    """
    description = weights.description
    if description is None:
        return None
    scales = {
        key.removeprefix(WEIGHTS): float(about["scale"])
        for key, about in description.tensors.items()
        if key.startswith(WEIGHTS) and "scale" in about
    }
    if scales or not description.task:
        return scales or None
    try:
        specs: Mapping[str, WeightSpec] = Params.from_text(description.task).instantiate().specs()
    except (ValueError, TypeError, ImportError):
        return None
    return {path: spec.scale for path, spec in specs.items() if spec.scale is not None}


def scale_problem(
    spec: WeightSpec, stored: str, scales: Mapping[str, float] | None, where: str
) -> str:
    """Returns the problem of a weight that is stored with another scale; "": none, or unknown.

    Args:
      spec: of the weight in the new model.
      stored: path of the stored weight.
      scales: from `stored_scales`.
      where: path of the checkpoint or file.
    """
    if scales is None:
        return ""
    before, now = scales.get(stored), spec.scale
    if before == now:
        return ""
    if before is not None and now is not None and abs(before - now) <= _MARGIN * abs(now):
        return ""
    return (
        f"{stored} is multiplied by {_number(before)} (alpha / rank of an adapter) in {where}, but "
        f"{spec.path} by {_number(now)}: give the new model the same `alpha` and `rank`"
    )


def left_out_problem(unused: Iterable[str], scales: Mapping[str, float] | None, where: str) -> str:
    """Returns the problem of stored adapters that the new model does not have; "": none.

    Args:
      unused: stored weights that the new model does not use.
      scales: from `stored_scales`.
      where: path of the checkpoint or file.
    """
    left = [path for path in unused if path in (scales or {})]
    if not left:
        return ""
    more = f" and {len(left) - 1} more adapters" if len(left) > 1 else ""
    return (
        f"the new model has no {left[0]}{more} of {where}: give it the same adapters, merge them "
        "first with tekso-ckpt merge, or leave them out"
    )


def _number(scale: Any) -> str:
    return "1" if scale is None else f"{scale:g}"
