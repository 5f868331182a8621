"""Layouts of the activations of a step under rules, for the cost model.

A dim whose size is not a multiple of the axis size is replicated. If rules assign one axis to two
dims of a tensor, or to two letters of a product, the one that a weight has gets it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tekso.framework.execution.mesh.layouts import FOLLOWS, Layout, MeshLayout
from tekso.framework.planning.step_work import Dims, MatrixProduct, Part, SavedTensor


class PlacedActivations:
    """A mesh and rules, applied to activations; dims that do not divide are replicated."""

    def __init__(self, layout: MeshLayout, weight_dims: frozenset[str]) -> None:
        self.mesh = layout.mesh
        self.sizes: Mapping[str, int] = dict(layout.mesh.axes)
        self.rules = {d: a for d, a in layout.rules.pairs if self.sizes[a] > 1}
        self._weight_dims = weight_dims
        self._own: dict[Any, Layout] = {}

    def own(self, dims: Dims, shape: Sequence[int]) -> Layout:
        """Returns the layout of a tensor by its dimension names; dims of weights come first."""
        key = (dims, tuple(shape))
        if key not in self._own:
            layout: list[str | None] = [None] * len(dims)
            first = sorted(range(len(dims)), key=lambda i: dims[i] not in self._weight_dims)
            for name in (self.rules.get, self._followed):
                for i in first:
                    axis = name(dims[i] or "")
                    if axis is None or layout[i] or axis in layout:
                        continue
                    if shape[i] % self.sizes[axis] == 0:
                        layout[i] = axis
            self._own[key] = tuple(layout)
        return self._own[key]

    def _followed(self, dim: str) -> str | None:
        """Returns the axis of the dim that this dim follows, if it has no rule itself."""
        return self.rules.get(FOLLOWS.get(dim, "")) if dim not in self.rules else None

    def axis_of(self, dim: str) -> str | None:
        """Returns the axis of a dim, by its own rule or by the rule of the dim that it follows."""
        return self.rules.get(dim) or self._followed(dim)

    def of(self, part: Part) -> Layout:
        """Returns the layout of a part by its own names."""
        return self.own(part.dims, part.shape)

    def bytes(self, part: Part, layout: Layout | None = None) -> float:
        """Returns the bytes of a part on one device."""
        return part.size_bytes / self.count(self.of(part) if layout is None else layout)

    def count(self, axes: Iterable[str | None]) -> int:
        """Returns the number of devices along these axes."""
        n = 1
        for axis in axes:
            if axis:
                n *= self.sizes[axis]
        return n

    def ordered(self, axes: Iterable[str | None]) -> tuple[str, ...]:
        """Returns axes in the order of the mesh."""
        wanted = set(axes)
        return tuple(axis for axis in self.mesh.names if axis in wanted)

    def extra_axes(self, dims: Iterable[str], part: Part) -> tuple[str, ...]:
        """Returns the axes that shard these dims but not the part."""
        own = self.of(part)
        return self.ordered({self.rules.get(d) for d in dims} - {None, *own})

    def outside(self, layout: Layout, dims: Iterable[str | None]) -> tuple[str, ...]:
        """Returns the axes of dims, without the axes of a layout."""
        return self.ordered({self.axis_of(d) for d in dims if d is not None} - {None, *layout})

    def saved(self, tensors: Iterable[SavedTensor]) -> float:
        """Returns the bytes of saved activations on one device."""
        return sum(self.bytes(k.part) * k.count for k in tensors)


class Letters:
    """The letters of a product, with their names and sizes; computed once for all layouts."""

    def __init__(self, product: MatrixProduct, order: list[tuple[str, str]]) -> None:
        self.product, self._order = product, order
        self.forms, self.parts = product.letters, (product.a, product.b, product.out)
        self.size = math.prod(product.sizes.values())
        pairs = list(zip(self.forms, self.parts, strict=True))
        self._shapes = {
            letter: [p.shape[f.index(letter)] for f, p in pairs if letter in f]
            for letter, _ in order
        }

    @classmethod
    def of(cls, product: MatrixProduct) -> Letters:
        """Names every letter by the dim of the weight, or of the first tensor with a name."""
        parts = (product.a, product.b, product.out)
        pairs = sorted(
            zip(product.letters, parts, strict=True), key=lambda pair: pair[1].weight is None
        )
        names: dict[str, str] = {}
        for letters, part in pairs:
            for letter, dim in zip(letters, part.dims, strict=True):
                if dim is not None:
                    names.setdefault(letter, dim)
        return cls(product, list(names.items()))

    def axes(self, placed: PlacedActivations) -> dict[str, str]:
        """Returns {letter: axis that shards it}; an axis goes to the first letter with its rule."""
        found: dict[str, str] = {}
        for letter, name in self._order:
            axis = placed.axis_of(name)
            if axis is None or axis in found.values():
                continue
            if all(size % placed.sizes[axis] == 0 for size in self._shapes[letter]):
                found[letter] = axis
        return found
