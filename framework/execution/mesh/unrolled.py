"""An unrolled loop over depth: the layers of a repeated stack one after the other.

This is faster than the loop of `control_flow`, which recomputes every layer in the backward pass
and copies the gradients of all layers once per layer. With 12 Transformer layers of width 256 on
`data:2`, a step takes 0.88 s unrolled and 1.48 s as a loop (1.25 s and 1.71 s if the layers are
rematerialized). In return, the first step of the loop takes a third of the CPU time: 7 s instead of
21 s (8 s instead of 36 s). Loops over time stay loops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tekso.framework.context import isolated
from tekso.framework.execution.mesh.context import LayoutContext
from tekso.framework.nests import stacked


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
    ctx.collected.merge({"statistic": stacked(statistics)})
    return state, stacked(ys)
