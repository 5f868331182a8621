"""Builds a process's part of a batch: its rows alone, where an input can build them alone."""

from __future__ import annotations

from typing import Any, Protocol

from tekso.framework.batch_part import BatchPart, IndivisibleError, RowsOf, joined
from tekso.framework.input.errors import InputError


class Batches(Protocol):
    """The methods of an input that build its batches; documented in `Input`."""

    params: Any

    def batch(self, step: int) -> Any:
        """Returns the global batch of a step."""
        ...

    def num_rows(self, step: int) -> int:
        """Returns the number of its examples."""
        ...

    def batch_rows(self, step: int, begin: int, end: int) -> Any:
        """Returns some of its examples."""
        ...


def built(input: Batches, step: int, rows: RowsOf) -> BatchPart:
    """Returns some rows of the global batch of a step; see `Input.own_part`."""
    alone = _builds_rows(type(input))
    whole = {} if alone else input.batch(step)
    size = input.num_rows(step) if alone else len(next(iter(whole.values())))
    try:
        own = rows(size)
    except IndivisibleError as error:
        raise InputError(_message(input, step, error)) from error
    if not alone:
        return BatchPart.of(whole, own)
    if own == ((0, size),):
        return BatchPart(input.batch(step), own, size)
    parts = [input.batch_rows(step, begin, end) for begin, end in own]
    return BatchPart({name: joined([p[name] for p in parts]) for name in parts[0]}, own, size)


def _builds_rows(kind: type) -> bool:
    """Whether `batch_rows` of an input class returns rows of its `batch`.

    It does not if a class has overridden `batch` after a base class has defined `batch_rows`.
    """
    owner = {
        name: next(i for i, base in enumerate(kind.__mro__) if name in vars(base))
        for name in ("batch", "batch_rows")
    }
    return owner["batch_rows"] <= owner["batch"]


def _message(input: Batches, step: int, error: IndivisibleError) -> str:
    p, setting = input.params, ""
    if "batch_size" in p:
        setting = f". Set {p.path_of('batch_size')}, or start another number of processes"
    return f"the batch of step {step} of {type(p).owner.__name__} has {error}{setting}"
