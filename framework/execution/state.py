"""Checks the state that a program restores from a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Set
from typing import Protocol, TypeVar

import numpy as np
import tensorflow as tf

from tekso.framework.execution.errors import ExecutionError, joined
from tekso.framework.state import LEARNER
from tekso.framework.weight_spec import WeightSpec

T = TypeVar("T")


class Stored(Protocol):
    """A tensor of a checkpoint: an array, or an object that reads slices when it is indexed."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""

    def __getitem__(self, where: tuple[slice, ...], /) -> np.ndarray | tf.Tensor:
        """Returns the part of the tensor at slices, one for every dim."""


ReadKey = Callable[[str, tuple[slice, ...]], "np.ndarray | tf.Tensor"]
"""`value(checkpoint key, slices)` returns a slice of the value of a key."""


@dataclasses.dataclass(frozen=True)
class _Converted:
    """A stored tensor, read in the dtype of the state; without a copy if it is stored in it.

    Attributes:
      stored: the tensor.
      dtype: of the state.
    """

    stored: Stored
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Stored`."""
        return self.stored.shape

    def __getitem__(self, where: tuple[slice, ...], /) -> tf.Tensor:
        """See `Stored`."""
        return tf.cast(self.stored[where], self.dtype)


def chosen(found: Mapping[str, T], keys: Set[str] | None) -> Mapping[str, T]:
    """Returns the items with some keys, in their order; all if `keys` is None."""
    return found if keys is None else {key: v for key, v in found.items() if key in keys}


def checked_state(
    specs: Mapping[str, WeightSpec], read: Callable[[str], Stored], keys: Set[str]
) -> dict[str, Stored]:
    """Returns the state of a checkpoint; for the arguments see `ExecutionProgram.restore`.

    Raises:
      ExecutionError: keys are missing or unknown, or shapes differ; the message names them.
    """
    problems = [(key, f"missing {key}") for key in sorted(set(specs) - keys)]
    problems += [(key, f"unknown {key}") for key in sorted(keys - set(specs))]
    state: dict[str, Stored] = {
        key: _Converted(read(key), spec.dtype) for key, spec in specs.items() if key in keys
    }
    for key in sorted(state):
        if state[key].shape != specs[key].shape:
            text = f"{key} is {list(state[key].shape)}, must be {list(specs[key].shape)}"
            problems.append((key, text))
    if problems:
        problems.sort(key=lambda problem: problem[0].startswith(LEARNER))  # weights first
        texts = [text for _, text in problems]
        raise ExecutionError(f"the checkpoint does not fit the model and learner: {joined(texts)}")
    return state
