"""State: the weights of a model and the slots of its learner, and their keys in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from tekso.framework.execution.errors import ExecutionError
from tekso.framework.weight_spec import WeightSpec

WEIGHTS = "weights/"
LEARNER = "learner/"

T = TypeVar("T")


class Stored(Protocol):
    """A tensor of a checkpoint: an array, or an object that reads slices when it is indexed."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""

    def __getitem__(self, where: tuple[slice, ...], /) -> np.ndarray:
        """Returns the part of the tensor at slices, one for every dim."""


class State(NamedTuple, Generic[T]):
    """One value for every weight and every slot: a spec, variable, tensor or array.

    Attributes:
      weights: {path of the weight: value}.
      slots: {path of the slot: value}; a path is "<weight path>/<slot name>", or a counter of the
        learner.
    """

    weights: Mapping[str, T]
    slots: Mapping[str, T]

    def keyed(self) -> dict[str, T]:
        """Returns {checkpoint key: value}: "weights/<path>" and "learner/<path>"."""
        found = {WEIGHTS + path: value for path, value in self.weights.items()}
        return found | {LEARNER + path: value for path, value in self.slots.items()}

    @classmethod
    def of_keys(cls, values: Mapping[str, T]) -> State[T]:
        """Returns the state of {checkpoint key: value}."""
        found: State[T] = cls(
            *(
                {key.removeprefix(prefix): v for key, v in values.items() if key.startswith(prefix)}
                for prefix in (WEIGHTS, LEARNER)
            )
        )
        return found

    def map(self, function: Callable[[T], Any]) -> State[Any]:
        """Returns the state with a function applied to every value."""
        found: list[dict[str, Any]] = [{path: function(v) for path, v in m.items()} for m in self]
        return State(*found)


def checked_state(
    specs: Mapping[str, WeightSpec], read: Callable[[str], Stored], keys: Set[str]
) -> dict[str, Stored]:
    """Returns the state of a checkpoint; for the arguments see `ExecutionProgram.restore`.

    Raises:
      ExecutionError: keys are missing or unknown, or shapes differ; the message names them.
    """
    problems = [f"missing {key}" for key in sorted(set(specs) - keys)]
    problems += [f"unknown {key}" for key in sorted(keys - set(specs))]
    state = {key: read(key) for key in specs if key in keys}
    for key in sorted(state):
        if state[key].shape != specs[key].shape:
            problems.append(f"{key} is {list(state[key].shape)}, must be {list(specs[key].shape)}")
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ExecutionError(
            f"the checkpoint does not fit the model and learner: {'; '.join(problems[:8])}{more}"
        )
    return state
