"""Halo exchange: images cut into parts along spatial dims, each with edges of its neighbours.

The spatial dims are height and width, of volumes also depth. This page shows height.

DTensor has no convolution or pooling over a sharded dim. So height is reshaped to two dims: the
parts, which are sharded, and the rows of a part, which are not:

    [height]  ->  [parts, height / parts]          4 parts of 2 rows, a window of 3, padding SAME

    part 0    part 1    part 2    part 3
    0 a b c   b c d e   d e f g   f g h 0          before: the last row of the part above
      ---       ---       ---       ---            after: the first row of the part below

Only the edges are gathered over the axis, and each device selects the edges of its neighbours,
because TensorFlow's DTensor has no collective permute. Each device receives
(before + after) * parts rows, and the same number in the backward pass.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import tensorflow as tf

from tekso.framework.execution.mesh.layouts import Layout
from tekso.framework.primitives.window_slices import sliced
from tekso.framework.primitives.windows import Window

Reshard = Callable[[tf.Tensor, Layout], tf.Tensor]


@dataclasses.dataclass(frozen=True)
class HaloPartition:
    """The partition of a spatial dim, and the rows that each part needs from its neighbours.

    Attributes:
      axis: the mesh axis of the parts; None: there is one part, with padding around it.
      parts: number of parts.
      before, after: number of rows before and after the part that its windows need; `after` is
        negative if the windows do not reach the end of the part.
      outputs: number of windows of a part.
      total: number of windows of the image; may be less than `parts * outputs`.
    """

    axis: str | None
    parts: int
    before: int
    after: int
    outputs: int
    total: int


def cut(size: int, window: Window, d: int, *, axis: str | None, parts: int) -> HaloPartition:
    """Returns the partition of spatial dim d: one part if `why_whole`."""
    before, after = window.pads(size, d)
    total = window.output_size(size, d)
    stride, reach = window.strides[d], _reach(window, d)
    if axis is None or why_whole(size, window, d, parts) is not None:
        after = (total - 1) * stride + reach - size - before
        return HaloPartition(None, 1, before, after, total, total)
    outputs = size // parts // stride
    after = (outputs - 1) * stride + reach - size // parts - before
    return HaloPartition(axis, parts, before, after, outputs, total)


def why_whole(size: int, window: Window, d: int, parts: int) -> str | None:
    """Returns why spatial dim d cannot be cut into parts; None if it can.

    A dim that cannot be cut is gathered, and every device computes all of it. This is slower, but
    the result is the same.
    """
    name, stride = window.dim_names[d], window.strides[d]
    if size % parts:
        return f"{name} {size} is not divisible by {parts} parts"
    part = size // parts
    if part % stride:
        return f"stride {stride} does not divide a part of {part} ({name} {size} in {parts} parts)"
    before = window.pads(size, d)[0]
    after = _reach(window, d) - stride - before
    if max(before, after) > part:
        return (
            f"a window of {_reach(window, d)} reaches {max(before, after)} beyond a part of "
            f"{part} ({name} {size} in {parts} parts)"
        )
    return None


def _reach(window: Window, d: int) -> int:
    return (window.shape[d] - 1) * window.dilations[d] + 1


class Parts:
    """An image in parts with halos, for ops on [*outer, *spatial, channels].

    The outer dims are batch and the parts of every spatial dim. Each sharded one stays separate,
    and the others are merged into the last of these. So there is one outer dim, unless two or more
    are sharded.

    Attributes:
      x: [*outer, *sizes of a part with halos, channels].
      num_outer: number of the outer dims.
    """

    def __init__(
        self,
        x: tf.Tensor,
        cuts: Sequence[HaloPartition],
        *,
        batch: str | None,
        channels: str | None,
        reshard: Reshard,
        fill: float = 0.0,
    ) -> None:
        """Cuts an image into parts and exchanges the halos.

        Args:
          x: [batch, *spatial, channels].
          cuts: partitions of the spatial dims.
          batch: mesh axis of the batch.
          channels: mesh axis of the channels.
          reshard: returns a tensor resharded by mesh axes.
          fill: value of the padding around the image.
        """
        self._cuts, self._reshard = cuts, reshard
        # Axes of the tiles [batch, parts, size, parts, size, …, channels], without channels.
        self._axes: Layout = (batch, *(axis for c in cuts for axis in (c.axis, None)))
        self._num_all = 1 + len(cuts)
        outer = [0, *range(1, 2 * len(cuts), 2)]
        split = [i for i in outer if self._axes[i] is not None]
        inner = range(2, 2 * len(cuts) + 1, 2)
        rest = (i for i in outer if i not in split)
        self._order = [*split, *rest, *inner, 2 * len(cuts) + 1]
        self.num_outer = max(len(split), 1)

        size = x.shape.as_list()
        x = reshard(x, (batch, *(c.axis for c in cuts), channels))
        pairs = zip(cuts, size[1:-1], strict=True)
        tiles = [n for c, whole in pairs for n in (c.parts, whole // c.parts)]
        x = tf.reshape(x, [size[0], *tiles, size[-1]])
        x = reshard(x, (*self._axes, channels))
        for d, c in enumerate(cuts):
            x = self._extended(x, 1 + 2 * d, c, channels, fill)
        x = reshard(tf.transpose(x, self._order), self._ordered(channels))
        size = x.shape.as_list()
        self._outer = size[: self._num_all]
        own = self.num_outer - 1
        merged = math.prod(size[own : self._num_all])
        x = tf.reshape(x, [*size[:own], merged, *size[self._num_all :]])
        self.x = reshard(x, self.axes(channels))

    def axes(self, channels: str | None) -> Layout:
        """Returns the mesh axes of x, or of outputs whose channels are sharded over `channels`."""
        return (*self._ordered(None)[: self.num_outer], *[None] * len(self._cuts), channels)

    def whole(self, y: tf.Tensor, channels: str | None) -> tf.Tensor:
        """Returns the outputs of all parts as one image.

        If the image has fewer outputs than all parts together (padding VALID), the dim is gathered
        and the surplus is sliced off.

        Shapes:
          y: [*outer, *outputs of a part, channels], sharded over `channels`
          returns: [batch, *outputs of the image, channels]
        """
        y = self._reshard(y, self.axes(channels))
        y = tf.reshape(y, [*self._outer, *y.shape[self.num_outer :]])
        y = self._reshard(y, self._ordered(channels))
        y = tf.transpose(y, [self._order.index(i) for i in range(len(self._order))])
        y = self._reshard(y, (*self._axes, channels))
        batch, *tiles, size = y.shape
        y = tf.reshape(y, [batch, *map(math.prod, zip(tiles[::2], tiles[1::2], strict=True)), size])
        axes = [self._axes[0], *(c.axis for c in self._cuts), channels]
        y = self._reshard(y, tuple(axes))
        for d, c in enumerate(self._cuts, start=1):
            if c.total < y.shape[d]:
                axes[d] = None
                y = sliced(self._reshard(y, tuple(axes)), d, 0, c.total)
                y = self._reshard(y, tuple(axes))
        return y

    def _ordered(self, channels: str | None) -> Layout:
        return tuple((*self._axes, channels)[i] for i in self._order)

    def _extended(
        self, x: tf.Tensor, at: int, c: HaloPartition, channels: str | None, fill: float
    ) -> tf.Tensor:
        # x is in tiles; `at` is the dim of the parts, and `at + 1` the dim that gets the halos.
        size = x.shape[at + 1]
        if c.after < 0:
            x = sliced(x, at + 1, 0, size + c.after)
        before, after = c.before, max(c.after, 0)
        if before + after == 0:
            return x
        if c.axis is None:
            return _padded(x, at + 1, before, after, fill)
        axes = (*self._axes, channels)
        whole = (*axes[:at], None, *axes[at + 1 :])
        edges = []
        if before:
            edges.append(sliced(x, at + 1, size - before, before))
        if after:
            edges.append(sliced(x, at + 1, 0, after))
        gathered = self._reshard(tf.concat(edges, at + 1) if edges[1:] else edges[0], whole)

        def shifted(start: int, count: int, by: int) -> tf.Tensor:
            # The inner constraints keep layout propagation from sharding `parts - 1` parts.
            edge = sliced(gathered, at + 1, start, count)
            edge = self._reshard(sliced(edge, at, max(-by, 0), c.parts - 1), whole)
            edge = _padded(edge, at, max(by, 0), max(-by, 0), fill)
            return self._reshard(self._reshard(edge, whole), axes)

        pieces = [x]
        if before:  # from the previous part; the first part has none
            pieces.insert(0, shifted(0, before, 1))
        if after:  # from the next part; the last part has none
            pieces.append(shifted(before, after, -1))
        return self._reshard(tf.concat(pieces, at + 1), axes)


def _padded(x: tf.Tensor, axis: int, before: int, after: int, fill: float) -> tf.Tensor:
    pads = [(before, after) if d == axis else (0, 0) for d in range(x.shape.rank)]
    return tf.pad(x, pads, constant_values=fill)
