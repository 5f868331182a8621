"""How a batch is divided over processes: whether its rows are built alone, and what fits."""

from __future__ import annotations

from typing import Any


def builds_rows(kind: type) -> bool:
    """Whether `batch_rows` of an input class returns rows of its `batch`.

    It does not if a class has overridden `batch` after a base class has defined `batch_rows`.
    """
    owner = {
        name: next(i for i, base in enumerate(kind.__mro__) if name in vars(base))
        for name in ("batch", "batch_rows")
    }
    return owner["batch_rows"] <= owner["batch"]


def indivisible(params: Any, step: int, size: int, parts: int, *, even: bool) -> str:
    """Returns an error message for a batch that cannot be divided over processes.

    Args:
      params: Params of the input.
      step: step of the batch.
      size: number of its examples.
      parts: number of processes.
      even: whether each process needs the same number of examples.
    """
    if size < parts:
        near = f"it must have at least {parts}"
    else:
        near = f"the nearest numbers that do: {size // parts * parts}, {-(-size // parts) * parts}"
    setting = ""
    if "batch_size" in params:
        path = params.path_of("batch_size")
        setting = f". Set {path}, or start another number of processes"
    how = "evenly " if even else ""
    name = type(params).owner.__name__
    return (
        f"the batch of step {step} of {name} has {size} examples, which do not "
        f"divide {how}over {parts} processes; {near}{setting}"
    )
