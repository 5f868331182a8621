"""The step context on a mesh: one program for all devices, with sharded tensors.

Layers are unchanged: TensorFlow's DTensor propagates layouts through their ops. forms.py has the
mesh forms of primitives for which propagation is not enough. The context maps the tensor of a
weight to its layout, so that a primitive can give the gradient the same layout.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import tensorflow as tf

from tekso.framework.context import Form, StepContext, isolated
from tekso.framework.execution.mesh import windows
from tekso.framework.execution.mesh.layouts import Layout, MeshLayout
from tekso.framework.execution.mesh.placement import Placement
from tekso.framework.execution.workarounds.tensors import resharded_both_ways, separated


class LayoutContext(StepContext):
    """A step context with the layouts of weights; this base class has none."""

    def register_layouts(self, weights: Any, axes: Any) -> None:
        """Stores the layouts of weights: a nest of tensors, and a flat list of their layouts."""

    def layouts_of(self, weights: Any) -> list[Layout | None]:
        """Returns a flat list of the layouts of a nest of tensors; None if not registered."""
        return [None for _ in tf.nest.flatten(weights)]

    def gathered(self, weight: tf.Tensor, axes: Layout) -> tf.Tensor:
        """Returns a weight resharded by axes for use; its gradient is sharded by axes too."""
        return weight


class MeshContext(LayoutContext):
    """The context of a step on a mesh.

    Args:
      placement: the devices.
      rules: the mesh and the rules.
      forms: the mesh forms of primitives (forms.py).
      everything else: as StepContext.

    Attributes:
      is_iteration: whether this is the context of one iteration of a loop.
    """

    def __init__(
        self,
        placement: Placement,
        rules: MeshLayout,
        *,
        forms: Mapping[str, Form] = MappingProxyType({}),
        **rest: Any,
    ) -> None:
        super().__init__(**rest)
        self.forms = forms
        self._placement, self._rules = placement, rules
        # {id of the tensor of a weight: (the tensor, which keeps the id valid, and its layout)}.
        self._weights: dict[int, tuple[tf.Tensor, Layout]] = {}
        self.is_iteration = False

    def axes(self, dims: Sequence[str | None], shape: Sequence[int]) -> Layout:
        """Returns the axis of every dim of an activation; None for dims that are not sharded."""
        return self._rules.fitting(dims, shape)

    @property
    def images(self) -> windows.ImageMesh:
        """The mesh as the forms of convolutions and pooling need it."""
        return windows.ImageMesh.of(self._rules, self.reshard, self.gathered)

    def axis_size(self, axis: str) -> int:
        """Returns the number of devices along an axis."""
        return self._rules.mesh.size_of(axis)

    def reshard(self, x: tf.Tensor, axes: Layout) -> tf.Tensor:
        """Returns x sharded by axes; its gradient has the original sharding of x."""
        if self.is_iteration:
            return self.gathered(separated(x), axes)
        return self._placement.reshard(x, axes)

    def gathered(self, weight: tf.Tensor, axes: Layout) -> tf.Tensor:
        """See `LayoutContext`."""
        reshard = functools.partial(self._placement.reshard, axes=axes)
        return resharded_both_ways(reshard, weight)

    def constrain(self, x: tf.Tensor, dims: Sequence[str | None]) -> tf.Tensor:
        """See `StepContext`."""
        return self.reshard(x, self.axes(dims, x.shape))

    def register_layouts(self, weights: Any, axes: Any) -> None:
        """See `LayoutContext`."""
        for tensor, layout in zip(tf.nest.flatten(weights), axes, strict=True):
            if layout is not None:
                self._weights[id(tensor)] = (tensor, layout)

    def layout_of(self, weight: tf.Tensor) -> Layout | None:
        """Returns the layout of a weight; None if the tensor is not registered as a weight."""
        known = self._weights.get(id(weight))
        return known[1] if known else None

    def layouts_of(self, weights: Any) -> list[Layout | None]:
        """See `LayoutContext`."""
        return [self.layout_of(tensor) for tensor in tf.nest.flatten(weights)]

    def iteration(self, index: Any) -> MeshContext:
        """Returns the context of one iteration of `scan`, with its own collection."""
        other = isolated(self).fold(index)
        other.is_iteration = True
        return other
