"""The step context on a mesh: one program for all devices, tensors sharded over its axes.

Layers are unchanged: TensorFlow's DTensor propagates layouts through their ops. The forms of
primitives that need more are in forms.py. A weight is known by its tensor, so that a primitive can
ask for its layout and constrain its gradient alike.
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


class LayoutContext(StepContext):
    """A context that is asked for the layouts of weights; this one knows none."""

    def register_layouts(self, weights: Any, axes: Any) -> None:
        """Remembers the layouts of weights: a nest of tensors and the same nest of layouts."""

    def layouts_of(self, weights: Any) -> list[Layout | None]:
        """Returns the layout of every tensor of a nest, flat; None if it is not known."""
        return [None for _ in tf.nest.flatten(weights)]

    def gathered(self, weight: tf.Tensor, axes: Layout) -> tf.Tensor:
        """Returns a weight sharded by axes for its use; its gradient is sharded by them too."""
        return weight


class MeshContext(LayoutContext):
    """The context of a step over a mesh.

    Args:
      placement: the devices.
      rules: the mesh and the rules.
      forms: the forms of the mesh (forms.py), where primitives are computed.
      everything else: as StepContext.

    Attributes:
      images: what the forms of convolutions and pooling need to know of the mesh.
      is_iteration: whether it is the context of one iteration of a loop.
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
        self.images = windows.ImageMesh.of(rules, self.reshard, self.gathered)
        # By the identity of a tensor, which is kept alive here: the layout of a weight.
        self._weights: dict[int, tuple[tf.Tensor, Layout]] = {}
        self.is_iteration = False

    def axes(self, dims: Sequence[str | None], shape: Sequence[int]) -> Layout:
        """Returns the axis of every dim of an activation; None for what cannot be sharded."""
        return self._rules.fitting(dims, shape)

    def axis_size(self, axis: str) -> int:
        """Returns the number of devices along an axis."""
        return self._rules.mesh.size_of(axis)

    def reshard(self, x: tf.Tensor, axes: Layout) -> tf.Tensor:
        """Returns x sharded by axes; its gradient is sharded as x was."""
        if self.is_iteration:
            return self.gathered(tf.identity(x), axes)
        return self._placement.relayout(x, axes)

    def gathered(self, weight: tf.Tensor, axes: Layout) -> tf.Tensor:
        """See `LayoutContext`.

        DTensor's own gradient, by relayout_like, ends the process in some loops, and a gradient
        that it made cannot be resharded as the slots are. What follows a relayout may ask for
        another layout of its result only if an identity is between them.
        """
        relayout = functools.partial(self._placement.relayout, axes=axes)

        @tf.custom_gradient
        def run(weight: tf.Tensor) -> Any:
            return relayout(weight), lambda dy: tf.identity(relayout(dy))

        return run(weight)

    def constrain(self, x: tf.Tensor, dims: Sequence[str | None]) -> tf.Tensor:
        """See `StepContext`."""
        return self.reshard(x, self.axes(dims, x.shape))

    def register_layouts(self, weights: Any, axes: Any) -> None:
        """See `LayoutContext`."""
        for tensor, layout in zip(tf.nest.flatten(weights), axes, strict=True):
            if layout is not None:
                self._weights[id(tensor)] = (tensor, layout)

    def layout_of(self, weight: tf.Tensor) -> Layout | None:
        """Returns the layout of a weight; None if the tensor is not known as one."""
        known = self._weights.get(id(weight))
        return known[1] if known else None

    def layouts_of(self, weights: Any) -> list[Layout | None]:
        """See `LayoutContext`."""
        return [self.layout_of(tensor) for tensor in tf.nest.flatten(weights)]

    def iteration(self, index: Any) -> MeshContext:
        """Returns the context of one iteration of `scan`, which collects for itself."""
        other = isolated(self).fold(index)
        other.is_iteration = True
        return other
