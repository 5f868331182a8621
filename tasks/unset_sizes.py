"""Sets sizes of a model that the experiment leaves to the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tekso.framework.params import REQUIRED


def set_vocab_size(model: Any, path: str, size: int | None, *, data: str) -> None:
    """Sets the number of tokens of a model if it is not set.

    Args:
      model: Params of the model, which are `task.model`.
      path: its field with the number.
      size: tokens of the input; None: not known without its data.
      data: what the tokens are learned from, for errors: "text".

    Raises:
      ValueError: the number is set nowhere, or is smaller than the input's.
    """
    given = model.get(path)
    if given is REQUIRED:
        if size is None:
            raise ValueError(
                f"task.model.{path} is not set: training takes it from the {data}; without "
                f"{data}, set it, as in --set task.model.{path}=100"
            )
        model.set({path: size})
    elif size is not None and given < size:
        raise ValueError(
            f"task.model.{path} is {given}, but the input has {size} tokens: leave it unset, or "
            f"set at least {size}"
        )


def set_sizes(model: Any, sizes: Mapping[str, Any]) -> None:
    """Sets the fields that the model has and the experiment does not set: {path: value}."""
    for path, value in sizes.items():
        if path in model and (model.get(path) is REQUIRED or model.origin(path) == "default"):
            model.set({path: value})
