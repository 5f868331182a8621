"""Mesh forms of primitives that are here only because of defects of DTensor.

The forms in `execution/mesh/forms.py` save communication; those here avoid errors and wrong values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tekso.framework import ops, workarounds
from tekso.framework.context import StepContext
from tekso.framework.execution.mesh.context import MeshContext
from tekso.framework.execution.workarounds.tensors import loop_inputs, separated


def capture(ctx: MeshContext, nest: Any) -> Any:
    """See `workarounds.capture`; the defect is described at `tensors.loop_inputs`."""
    own = tf.nest.pack_sequence_as(nest, loop_inputs(tf.nest.flatten(nest)))
    ctx.register_layouts(own, ctx.layouts_of(nest))
    return own


def take_row(ctx: MeshContext, x: tf.Tensor, index: int) -> tf.Tensor:
    """See `workarounds.take_row`.

    Defect: of `x[index]`, DTensor mistakes which dim is sharded, and an einsum that contracts two
    dims of it gives wrong values. A gather does not have this defect.
    """
    return separated(workarounds.take_row.plain(ctx, x, index))


def concat(
    ctx: StepContext, xs: Sequence[tf.Tensor], axis: int, *, dims: Sequence[str | None]
) -> tf.Tensor:
    """See `workarounds.concat`; the tensors are sharded over the batch alone for it.

    Defect: DTensor cannot concatenate tensors along a dim that is sharded, before or afterwards.
    """
    whole = [dim if dim == "batch" else None for dim in dims]
    parts = [separated(ctx.constrain(x, whole)) for x in xs]
    return ctx.constrain(separated(ctx.constrain(tf.concat(parts, axis % len(dims)), whole)), dims)


def reverse(
    ctx: StepContext, x: tf.Tensor, axis: int, *, dims: Sequence[str | None] | None = None
) -> tf.Tensor:
    """See `workarounds.reverse`; the tensor is sharded over the batch alone for it.

    Defect: DTensor does not compile a gather whose result is sharded differently from its input.
    """
    names = ("batch", *[None] * (x.shape.rank - 1)) if dims is None else dims
    whole = [dim if dim == "batch" else None for dim in names]
    whole[axis] = None  # it is computed from all of its elements
    x = separated(ctx.constrain(x, whole))
    y = separated(ctx.constrain(workarounds.reverse.plain(ctx, x, axis), whole))
    return y if dims is None else ctx.constrain(y, dims)


def fill_rows(ctx: StepContext, buffer: tf.Tensor, index: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """See `ops.fill_rows`; always copies, also in `filling_in_place`.

    Defect: DTensor has no layouts for the op that fills a buffer in place.
    """
    return ops.fill_rows.plain(ctx, buffer, index, rows)
