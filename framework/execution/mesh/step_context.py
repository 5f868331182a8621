"""Prepares a step on a mesh: its context, the axis of its batch, and its gathered weights."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from tekso.framework import primitive
from tekso.framework.context import Examples
from tekso.framework.execution.mesh.context import MeshContext
from tekso.framework.execution.mesh.layouts import MeshLayout
from tekso.framework.execution.mesh.placement import Placement
from tekso.framework.primitives.fusion import Fuse, no_fusion
from tekso.framework.weight_spec import WeightSpec


def batch_axis(layout: MeshLayout, examples: int) -> str | None:
    """Returns the axis of "batch"; None if it does not divide the number of examples."""
    axis = layout.rules.axis_of("batch")
    return axis if axis and examples % layout.mesh.size_of(axis) == 0 else None


def context(
    placement: Placement,
    layout: MeshLayout,
    examples: Examples,
    fuse: Fuse = no_fusion,
) -> MeshContext:
    """Returns the context of a step for some examples.

    Args:
      placement: the devices.
      layout: mesh and rules.
      examples: the examples.
      fuse: as in StepContext.
    """
    if batch_axis(layout, examples.size) is None:
        layout = layout.without("batch")
    return MeshContext(
        placement,
        layout,
        forms=primitive.forms("mesh"),
        fuse=fuse,
        **examples.arguments(),
    )


def used(
    layout: MeshLayout,
    specs: Mapping[str, WeightSpec],
    weights: Mapping[str, tf.Tensor],
    ctx: MeshContext,
) -> dict[str, tf.Tensor]:
    """Returns the weights for a step, sharded by the rules alone, and registers their layouts.

    Weights that `weights_axis` shards are gathered over it.
    """
    made, axes = {}, []
    for path, weight in weights.items():
        spec = specs[path]
        own = layout.of_weight(spec)
        # If only the layout of the slots differs, nothing is gathered, but the gradient needs a
        # layout.
        if not own == layout.of_stored_weight(spec) == layout.of_slot(spec):
            weight = ctx.gathered(weight, own)
        made[path] = weight
        axes.append(own)
    ctx.register_layouts(list(made.values()), axes)
    return made
