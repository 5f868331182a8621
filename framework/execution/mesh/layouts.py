"""Layouts: a mesh and its rules say where the parts of every tensor lie.

    mesh   data:2;model:4            axes of devices and their sizes
    rules  batch:data;mlp:model      a dim of tensors : the axis that splits it

    w [embed=16, mlp=64]  ->  layout (None, "model")  ->  a device holds [16, 16]

Nothing here knows a device or a tensor: a layout for 512 devices is worked out on any machine.

Source:
  Meshes, rules and what is illegal: Shazeer et al. 2018, "Mesh-TensorFlow" (arXiv 1811.02084).
  Weights split over the data axis as well: Rajbhandari et al. 2020, "ZeRO" (arXiv 1910.02054).
  Slots split over the data axis as well: Xu et al. 2020 (arXiv 2004.13336).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from tekso.framework.execution.mesh import legality
from tekso.framework.execution.mesh.rules import LayoutError, MeshShape, Rules, joined

if TYPE_CHECKING:
    from tekso.framework.weight_spec import WeightSpec

Layout = tuple[str | None, ...]
"""For each dim of a tensor the mesh axis that splits it; None for a dim that stays whole."""

Activations = Mapping[str, tuple[Sequence[str | None], Iterable[int | None]]]
"""{name: (dims, shape)} of tensors that layers pin; None for a size that is not known."""


FOLLOWS = {"expert_batch": "batch", "token_experts": "experts"}
"""Dims of a mixture of experts that lie as another does, where nothing else wants the axis."""


@dataclasses.dataclass(frozen=True)
class MeshLayout:
    """A mesh and its rules: answers every question about placement.

    Attributes:
      mesh: the axes.
      rules: which dim is split over which axis.
      weights_axis: stored weights are split over this axis as well (fully sharded weights).
      slots_axis: optimizer slots are split over this axis as well (weight-update sharding).

    The extra axes split the largest dim that has a name, is whole so far and divides evenly; the
    first of several. A stack dim is taken only where no other can be. A tensor that has no such
    dim, or that uses the axis already, stays as it is.
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
        """Returns the layout of an activation, or of a weight in use: by the rules alone.

        Args:
          dims: a name for every dim, or None for one that is never split.
          shape: its sizes, None for one that is not known; without it no size is checked.
          name: what errors call it.

        Raises:
          LayoutError: the rules cannot be applied to it.
        """
        dims = tuple(dims)
        sizes = tuple(shape) if shape is not None else (None,) * len(dims)
        _raise_problems(self, legality.of_tensors(self, [legality.Tensor(name, dims, sizes)]))
        return tuple(self.rules.axis_of(dim) for dim in dims)

    def fitting(self, dims: Sequence[str | None], shape: Sequence[int]) -> Layout:
        """Returns the layout of an activation of any size: what cannot be split stays whole.

        For sizes that an experiment does not fix: the single token of a step of decoding, the last
        batch of a pass. Of two dims that want one axis, the first that divides has it. A dim that
        follows another (`FOLLOWS`) and has no rule takes that one's axis, if it is left.
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
        """Returns the axes of several devices that neither a rule nor an extra axis names."""
        used = {axis for _, axis in self.rules.pairs} | {self.weights_axis, self.slots_axis}
        return [
            name for name in self.mesh.names if self.mesh.size_of(name) > 1 and name not in used
        ]

    def __str__(self) -> str:
        """The settings that made it, as errors name them."""
        extra = {"weights_axis": self.weights_axis, "slots_axis": self.slots_axis}
        parts = [f"mesh {str(self.mesh)!r}", f"rules {str(self.rules)!r}"]
        return ", ".join([*parts, *(f"{name} {axis!r}" for name, axis in extra.items() if axis)])

    def without(self, *dims: str) -> MeshLayout:
        """Returns the same with these dims left whole."""
        rest = Rules(tuple(pair for pair in self.rules.pairs if pair[0] not in dims))
        return dataclasses.replace(self, rules=rest)

    def of_weight(self, spec: WeightSpec) -> Layout:
        """Returns the layout of a weight as it is used in a step; errors as `of`."""
        return self.of(spec.dims, spec.shape, name=spec.path)

    def of_stored_weight(self, spec: WeightSpec) -> Layout:
        """Returns the layout of a weight between steps: `of_weight` and the weights axis."""
        return self._with_axis(self.weights_axis, spec, self.of_weight(spec))

    def of_slot(self, spec: WeightSpec) -> Layout:
        """Returns the layout of a slot: that of a stored weight of its shape, and the slots axis.

        A slot may lack a dim that its weight has, as in Adafactor: it is laid out by its own dims.
        """
        return self._with_axis(self.slots_axis, spec, self.of_stored_weight(spec))

    def shard_shape(self, shape: Sequence[int], layout: Layout) -> tuple[int, ...]:
        """Returns the shape of the part that a device holds; every part is of the same shape."""
        parts = zip(shape, layout, strict=True)
        return tuple(n // self.mesh.size_of(axis) if axis else n for n, axis in parts)

    def problems(
        self, specs: Mapping[str, WeightSpec], *, activations: Activations | None = None
    ) -> list[str]:
        """Returns a sentence for each illegal layout, as `check`; empty if all is legal."""
        tensors = [legality.Tensor(s.path, tuple(s.dims), tuple(s.shape)) for s in specs.values()]
        for name, (dims, shape) in (activations or {}).items():
            tensors.append(legality.Tensor(name, tuple(dims), tuple(shape)))
        return legality.of_rules(self, tensors) + legality.of_tensors(self, tensors)

    def check(
        self, specs: Mapping[str, WeightSpec], *, activations: Activations | None = None
    ) -> None:
        """Checks that mesh and rules fit a model, before anything is allocated.

        Args:
          specs: of all weights. Slots need no check: they have no dims but those of their weights.
          activations: tensors that layers pin. Dims that no weight has ("batch", "length") are
            known by them only.

        Raises:
          LayoutError: names every rule or axis that does not fit, with the nearest that would.
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
        where = f"execution.mesh {str(layout.mesh)!r} and execution.rules {str(layout.rules)!r}"
        raise LayoutError(f"{where} do not fit:\n  {listed}")


__all__ = ["Activations", "Layout", "LayoutError", "MeshLayout", "MeshShape", "Rules"]
