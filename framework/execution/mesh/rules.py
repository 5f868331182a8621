"""Parses meshes ("data:2;model:4") and rules ("batch:data;mlp:model").

Source:
  Notation: Mesh-TensorFlow (Shazeer et al. 2018, arXiv 1811.02084).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence

from tekso.framework.execution.errors import ExecutionError, joined
from tekso.framework.spelling import close_matches

_AXIS_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")  # other names crash DTensor
_RESERVED = frozenset({"any", "match", "scalar", "unsharded"})  # reserved in DTensor's layouts


class LayoutError(ExecutionError):
    """A mesh or its rules are malformed, or do not fit the model."""


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """The axes of a device mesh with their sizes, in the given order; str() returns the text.

    Attributes:
      axes: the names with the sizes.
      params: path of the Params whose field `mesh` it is, for errors.

    Raises:
      LayoutError: there is no axis, a name is invalid or used twice, or a size is not positive.
    """

    axes: tuple[tuple[str, int], ...]
    params: str = dataclasses.field(default="execution", compare=False)

    def __post_init__(self) -> None:
        names, problems = self.names, []
        if not self.axes:
            problems.append("it has no axis")
        for i, (name, size) in enumerate(self.axes):
            if not _AXIS_NAME.fullmatch(name) or name.lower() in _RESERVED:
                problems.append(
                    f"axis {name!r} needs another name: letters, digits, _ - and . are allowed, "
                    f"the words {', '.join(sorted(_RESERVED))} are not"
                )
            if names.index(name) < i:
                problems.append(f"axis {name} is named twice")
            if size < 1:
                problems.append(f"axis {name} has size {size}, but must be at least 1")
        _raise_misfits(f"{self.params}.mesh", str(self), problems, "data:2;model:4")

    @classmethod
    def parse(cls, text: str, *, params: str = "execution") -> MeshShape:
        """Parses "data:2;model:4"; axes are separated by ";", "," or spaces.

        Args:
          text: the axes.
          params: as in MeshShape.

        Raises:
          LayoutError: the text is not a mesh.
        """
        axes, problems, field = [], [], f"{params}.mesh"
        for name, size in _pairs(field, text, "data:2;model:4"):
            if re.fullmatch(r"[+-]?[0-9]+", size):
                axes.append((name, int(size)))
            else:
                problems.append(f"axis {name} has size {size!r}, but must be a whole number")
        _raise_misfits(field, text, problems, "data:2;model:4")
        return cls(tuple(axes), params=params)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the axes."""
        return tuple(name for name, _ in self.axes)

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(size for _, size in self.axes)

    def size_of(self, axis: str) -> int:
        """Returns the size of an axis.

        Raises:
          LayoutError: there is no such axis.
        """
        for name, size in self.axes:
            if name == axis:
                return size
        raise LayoutError(f"{self.params}.mesh is {str(self)!r}: {no_axis(axis, self.names)}")

    def check_devices(self, num_devices: int) -> None:
        """Checks that there are enough devices.

        Raises:
          LayoutError: the mesh has more devices than there are.
        """
        if self.size <= num_devices:
            return
        near = []
        for i, (name, size) in enumerate(self.axes):
            fitting = num_devices // (self.size // size)
            if fitting:
                near.append(str(MeshShape((*self.axes[:i], (name, fitting), *self.axes[i + 1 :]))))
        nearest = f"; nearest that fit: {' or '.join(near)}" if near else ""
        raise LayoutError(
            f"{self.params}.mesh is {str(self)!r}: {self.size} devices, but there are {num_devices}"
            f"{nearest}; --cpu_devices={self.size} creates this many logical CPU devices"
        )

    def __str__(self) -> str:
        return ";".join(f"{name}:{size}" for name, size in self.axes)


@dataclasses.dataclass(frozen=True)
class Rules:
    """Pairs (dim, axis): dims with this name are sharded over the axis; str() returns the text.

    No rules at all are legal too: then everything is replicated.

    Attributes:
      pairs: the rules.
      params: path of the Params whose field `rules` they are, for errors.

    Raises:
      LayoutError: a dim is named twice.
    """

    pairs: tuple[tuple[str, str], ...]
    params: str = dataclasses.field(default="execution", compare=False)

    def __post_init__(self) -> None:
        wanted: dict[str, list[str]] = {}
        for dim, axis in self.pairs:
            wanted.setdefault(dim, []).append(axis)
        problems = [
            f"dim {dim} is given {len(axes)} times, for {' and '.join(axes)}; a dim is sharded "
            "over one axis"
            for dim, axes in wanted.items()
            if len(axes) > 1
        ]
        _raise_misfits(f"{self.params}.rules", str(self), problems, "batch:data;mlp:model")

    @classmethod
    def parse(cls, text: str, *, params: str = "execution") -> Rules:
        """Parses "batch:data;mlp:model"; rules are separated by ";", "," or spaces.

        Args:
          text: the rules.
          params: as in Rules.

        Raises:
          LayoutError: the text is not a list of rules.
        """
        pairs = _pairs(f"{params}.rules", text, "batch:data;mlp:model")
        return cls(tuple(pairs), params=params)

    def axis_of(self, dim: str | None) -> str | None:
        """Returns the axis that shards a dim, or None."""
        return dict(self.pairs).get(dim) if dim is not None else None

    def __str__(self) -> str:
        return ";".join(f"{dim}:{axis}" for dim, axis in self.pairs)


def _pairs(field: str, text: str, example: str) -> list[tuple[str, str]]:
    pairs, problems = [], []
    for piece in re.split(r"[;,\s]+", text.strip(";, \t\n")):
        parts = piece.split(":")
        if len(parts) == 2 and all(parts):
            pairs.append((parts[0], parts[1]))
        elif piece:
            problems.append(f"{piece!r} is not two parts separated by a colon (without spaces)")
    _raise_misfits(field, text, problems, example)
    return pairs


def _raise_misfits(field: str, text: str, problems: Sequence[str], example: str) -> None:
    if problems:
        raise LayoutError(f"{field} is {text!r}: {joined(problems)}; example: {example!r}")


def no_axis(axis: str, names: Sequence[str]) -> str:
    """Returns the message that a mesh does not have this axis, with a similar name if any."""
    close = close_matches(axis, names, count=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"the mesh has no axis {axis}; {hint}there are: {', '.join(names)}"
