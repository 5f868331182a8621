"""Sums the sizes of stored weights and slots by module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tekso.framework.run.stored_tensors import TensorInFiles
from tekso.framework.state import State

ALL, OTHERS = "(all)", "(others)"
_LEVELS = 2


class Totals(NamedTuple):
    """The tensors of a module and of all modules inside of it.

    Attributes:
      module: its path; ALL: all tensors, OTHERS: slots that belong to no weight, such as counters.
      depth: number of modules of the list that contain it.
      tensors: number of tensors that are weights.
      weights: number of elements of the weights.
      weight_bytes: bytes of the weights.
      slot_bytes: bytes of the slots of the learner.
    """

    module: str
    depth: int
    tensors: int = 0
    weights: int = 0
    weight_bytes: int = 0
    slot_bytes: int = 0

    def plus(self, tensor: TensorInFiles, *, is_weight: bool) -> Totals:
        """Returns the totals with one more tensor."""
        if not is_weight:
            return self._replace(slot_bytes=self.slot_bytes + tensor.size_bytes)
        return self._replace(
            tensors=self.tensors + 1,
            weights=self.weights + tensor.size,
            weight_bytes=self.weight_bytes + tensor.size_bytes,
        )


def module_totals(tensors: Sequence[TensorInFiles]) -> list[Totals]:
    """Returns the totals of all tensors, then of modules by path, two levels deep.

    A module that contains nothing but one other module is left out; the other is listed instead.
    """
    state = State.of_keys({tensor.key: tensor for tensor in tensors})
    found = {"": Totals(ALL, 0)}
    inside: dict[str, dict[str, None]] = {}  # the modules and weights of each module

    def add(path: str, tensor: TensorInFiles, *, is_weight: bool) -> None:
        parts = path.split("/")
        for level in range(len(parts)):
            name = "/".join(parts[:level])
            found[name] = found.get(name, Totals(name, 0)).plus(tensor, is_weight=is_weight)
            inside.setdefault(name, {})["/".join(parts[: level + 1])] = None

    for path, tensor in sorted(state.weights.items()):
        add(path, tensor, is_weight=True)
    rest = Totals(OTHERS, 1)
    for path, tensor in state.slots.items():
        owner = path.rpartition("/")[0]
        while owner and owner not in state.weights:  # the slot's name may have several parts
            owner = owner.rpartition("/")[0]
        if owner:
            add(owner, tensor, is_weight=False)
        else:
            rest = rest.plus(tensor, is_weight=False)
            found[""] = found[""].plus(tensor, is_weight=False)

    def listed(name: str, depth: int) -> Iterator[Totals]:
        while len(inside[name]) == 1 and (only := next(iter(inside[name]))) in inside:
            name = only
        yield found[name if depth else ""]._replace(depth=depth)
        for part in inside[name] if depth < _LEVELS else ():
            if part in inside:
                yield from listed(part, depth + 1)

    if not state.weights:
        return [found[""], *([rest] if rest.slot_bytes else [])]
    return [*listed("", 0), *([rest] if rest.slot_bytes else [])]
