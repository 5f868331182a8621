"""State: the weights of a model and the slots of its learner, and their keys in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

WEIGHTS = "weights/"
LEARNER = "learner/"

T = TypeVar("T")


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
