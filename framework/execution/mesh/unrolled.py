"""An unrolled loop over depth: the layers of a repeated stack one after the other.

DTensor (TensorFlow 2.21) does not compile a loop over some layers, for example attention ("operand
#0 does not dominate this use"). It compiles the unrolled layers, and the compilation time then
grows with depth. Loops over time stay loops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tekso.framework.context import isolated
from tekso.framework.execution.mesh.context import LayoutContext


def scan(
    ctx: LayoutContext,
    body: Callable[..., tuple[Any, Any]],
    theta: Mapping[str, Any],
    state: Any,
    xs: Any,
    first: int,
) -> tuple[Any, Any]:
    """See `ops.scan`; xs has stacked weights."""
    flat = tf.nest.flatten(xs)
    stacked_axes = ctx.layouts_of(xs)
    whole = [
        x if axes is None or axes[0] is None else ctx.gathered(x, (None, *axes[1:]))
        for x, axes in zip(flat, stacked_axes, strict=True)
    ]
    slices = [tf.unstack(x) for x in whole]
    theta_axes, axes = ctx.layouts_of(theta), [a and a[1:] for a in stacked_axes]
    ys, statistics = [], []
    for i in range(len(slices[0])):
        x = tf.nest.pack_sequence_as(xs, [parts[i] for parts in slices])
        inner = isolated(ctx).fold(first + i)
        inner.register_layouts(theta, theta_axes)
        inner.register_layouts(x, axes)
        state, y = body(theta, state, x, inner)
        ys.append(y)
        sums = inner.collected.sums
        statistics.append(sums["statistic"])
        ctx.collected.merge({kind: v for kind, v in sums.items() if kind != "statistic"})
    ctx.collected.merge({"statistic": _stacked(statistics)})
    return state, _stacked(ys)


def _stacked(values: list[Any]) -> Any:
    return tf.nest.map_structure(lambda *each: None if each[0] is None else tf.stack(each), *values)
