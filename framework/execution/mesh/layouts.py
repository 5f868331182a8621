"""Layouts: a mesh and its rules define the sharding of every tensor.

    mesh   data:2;model:4            axes of devices and their sizes
    rules  batch:data;mlp:model      dim of tensors : the axis that shards it

    w [embed=16, mlp=64]  ->  layout (None, "model")  ->  the shard of a device is [16, 16]

This file needs neither devices nor tensors: any machine can compute a layout for 512 devices.

Source:
  Meshes, rules and illegal layouts: Shazeer et al. 2018, "Mesh-TensorFlow" (arXiv 1811.02084).
  Weights sharded also over the data axis: Rajbhandari et al. 2020, "ZeRO" (arXiv 1910.02054).
  Slots sharded also over the data axis: Xu et al. 2020 (arXiv 2004.13336).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from tekso.framework.execution.errors import joined
from tekso.framework.execution.mesh import legality
from tekso.framework.execution.mesh.rules import LayoutError, MeshShape, Rules

if TYPE_CHECKING:
    from tekso.framework.weight_spec import WeightSpec

Layout = tuple[str | None, ...]
"""For each dim of a tensor, the mesh axis that shards it; None if the dim is not sharded."""

Activations = Mapping[str, tuple[Sequence[str | None], Iterable[int | None]]]
"""{name: (dims, shape)} of tensors that layers constrain; None for an unknown size."""


FOLLOWS = {"expert_batch": "batch", "token_experts": "experts"}
"""Dims of a mixture of experts that use the axis of another dim, if no other dim uses it."""


@dataclasses.dataclass(frozen=True)
class MeshLayout:
    """A mesh and its rules; returns the layout of every tensor.

    Attributes:
      mesh: the axes.
      rules: the axis that shards each dim.
      weights_axis: stored weights are also sharded over this axis (fully sharded weights).
      slots_axis: optimizer slots are also sharded over this axis (weight-update sharding).

    The two extra axes shard the largest dim that has a name, is not sharded yet and divides evenly;
    the first one if several have this size. A stack dim is used only if there is no other. A tensor
    without such a dim, or already sharded over the axis, does not change.
    """

    mesh: MeshShape
    rules: Rules
    weights_axis: str | None = None
    slots_axis: str | None = None

    def of(
        self,
        dims: Sequence[str | None],
        shape: Iterable[int | None] | None = None,
        *,
        name: str = "a tensor",
    ) -> Layout:
        """Returns the layout of an activation, or of a weight in a step, by the rules alone.

        Args:
          dims: a name for every dim, or None for a dim that is never sharded.
          shape: its sizes, with None for an unknown size; without a shape, no size is checked.
          name: name of the tensor in errors.

        Raises:
          LayoutError: the rules cannot be applied to the tensor.
        """
        dims = tuple(dims)
        sizes = tuple(shape) if shape is not None else (None,) * len(dims)
        _raise_problems(self, legality.of_tensors(self, [legality.Tensor(name, dims, sizes)]))
        return tuple(self.rules.axis_of(dim) for dim in dims)

    def fitting(self, dims: Sequence[str | None], shape: Sequence[int]) -> Layout:
        """Returns the layout of an activation of any size; replicates dims that do not divide.

        This is for sizes that an experiment does not fix, such as the single token of a decoding
        step or the last batch of a pass. If rules assign one axis to two dims, the first dim that
        divides gets it. A dim in `FOLLOWS` without a rule uses the axis of the dim that it follows,
        unless another dim of the tensor uses it.
        """
        layout: list[str | None] = [None] * len(dims)
        for wanted in (dims, [FOLLOWS.get(dim or "") for dim in dims]):
            for i, (dim, size) in enumerate(zip(wanted, shape, strict=True)):
                axis = self.rules.axis_of(dim)
                if axis is None or axis in layout or layout[i] is not None:
                    continue
                if size % self.mesh.size_of(axis) == 0:
                    layout[i] = axis
        return tuple(layout)

    def idle_axes(self) -> list[str]:
        """Returns the axes with several devices that no rule and no extra axis uses."""
        used = {axis for _, axis in self.rules.pairs} | {self.weights_axis, self.slots_axis}
        return [
            name for name in self.mesh.names if self.mesh.size_of(name) > 1 and name not in used
        ]

    def __str__(self) -> str:
        """Returns the mesh, the rules and the extra axes as text for errors."""
        extra = {"weights_axis": self.weights_axis, "slots_axis": self.slots_axis}
        parts = [f"mesh {str(self.mesh)!r}", f"rules {str(self.rules)!r}"]
        return ", ".join([*parts, *(f"{name} {axis!r}" for name, axis in extra.items() if axis)])

    def without(self, *dims: str) -> MeshLayout:
        """Returns this layout without the rules for these dims."""
        rest = tuple(pair for pair in self.rules.pairs if pair[0] not in dims)
        return dataclasses.replace(self, rules=dataclasses.replace(self.rules, pairs=rest))

    def of_weight(self, spec: WeightSpec) -> Layout:
        """Returns the layout of a weight in a step; raises as `of`."""
        return self.of(spec.dims, spec.shape, name=spec.path)

    def of_stored_weight(self, spec: WeightSpec) -> Layout:
        """Returns the layout of a weight between steps: `of_weight` plus the weights axis."""
        return self._with_axis(self.weights_axis, spec, self.of_weight(spec))

    def of_slot(self, spec: WeightSpec) -> Layout:
        """Returns the layout of a slot: that of a stored weight of its shape, plus the slots axis.

        A slot may have fewer dims than its weight, as in Adafactor. Its layout follows from its own
        dims.
        """
        return self._with_axis(self.slots_axis, spec, self.of_stored_weight(spec))

    def shard_shape(self, shape: Sequence[int], layout: Layout) -> tuple[int, ...]:
        """Returns the shape of a device's shard; all shards have the same shape."""
        parts = zip(shape, layout, strict=True)
        return tuple(n // self.mesh.size_of(axis) if axis else n for n, axis in parts)

    def shard_bytes(self, spec: WeightSpec, layout: Layout) -> int:
        """Returns the bytes of a device's shard of a weight."""
        itemsize = spec.size_bytes // max(spec.size, 1)
        return math.prod(self.shard_shape(spec.shape, layout)) * itemsize

    def problems(
        self, specs: Mapping[str, WeightSpec], *, activations: Activations | None = None
    ) -> list[str]:
        """Returns a sentence for each problem of the layout; empty if it is legal."""
        tensors = [legality.Tensor(s.path, tuple(s.dims), tuple(s.shape)) for s in specs.values()]
        for name, (dims, shape) in (activations or {}).items():
            tensors.append(legality.Tensor(name, tuple(dims), tuple(shape)))
        return legality.of_rules(self, tensors) + legality.of_tensors(self, tensors)

    def check(
        self, specs: Mapping[str, WeightSpec], *, activations: Activations | None = None
    ) -> None:
        """Checks that the mesh and the rules fit a model, before anything is allocated.

        Args:
          specs: specs of all weights. Slots need no check: all their dims are dims of weights.
          activations: tensors that layers constrain. Only these have dims such as "batch" and
            "length", which no weight has.

        Raises:
          LayoutError: the message names every rule or axis that does not fit, with legal
            alternatives.
        """
        _raise_problems(self, self.problems(specs, activations=activations))

    def _with_axis(self, axis: str | None, spec: WeightSpec, layout: Layout) -> Layout:
        if axis is None or axis in layout:
            return layout
        count = self.mesh.size_of(axis)
        free = [
            (d >= spec.stacked, size, -d)
            for d, size in enumerate(spec.shape)
            if layout[d] is None and spec.dims[d] is not None and size % count == 0
        ]
        if not free:
            return layout
        chosen = -max(free)[2]
        return (*layout[:chosen], axis, *layout[chosen + 1 :])


def _raise_problems(layout: MeshLayout, problems: Sequence[str]) -> None:
    if problems:
        listed = joined(problems, separator="\n  ")
        mesh = f"{layout.mesh.params}.mesh {str(layout.mesh)!r}"
        where = f"{mesh} and {layout.rules.params}.rules {str(layout.rules)!r}"
        raise LayoutError(f"{where} do not fit the model:\n  {listed}")


__all__ = ["Activations", "Layout", "LayoutError", "MeshLayout", "MeshShape", "Rules"]
