"""Convolution and pooling on a mesh, with any dim of the image sharded.

    sharded dims              computation
    batch only                TensorFlow's kernels, as on one device
    one spatial dim only      parts with halos (halos.py), then the kernels; parts as batch
    several of them, channels parts with halos, then slices and products (`window_slices`)

The spatial dims are height and width; of volumes also depth.

Average pooling and depthwise convolution always use slices, because their kernels have no gradients
on a mesh. Slices and products are computed in at least float32. In every case the results match a
single device. If several elements are the maximum of a
window, the gradient goes to the same one.

A dim that cannot be sharded is gathered, and every device computes all of it. This applies if its
size is not a multiple of the axis size, the stride does not divide a part, or a window reaches
beyond the neighbouring part (`halos.why_whole` returns the reason). With padding VALID, the windows
over the end of the image are computed and sliced off, and the new size is sharded again if it
divides. Weights are gathered along a dim whose axis already shards the image.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import tensorflow as tf

from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.mesh.halos import HaloPartition, Parts, Reshard, cut
from tekso.framework.execution.mesh.layouts import Layout, MeshLayout
from tekso.framework.execution.workarounds.tensors import separated
from tekso.framework.primitives import window_slices, windows
from tekso.framework.primitives.precision import widen
from tekso.framework.primitives.windows import Window

Cuts = tuple[HaloPartition, ...]
"""The partitions of the spatial dims."""


@dataclasses.dataclass(frozen=True)
class ImageMesh:
    """The axes of a mesh that shard images, and functions that reshard tensors.

    Attributes:
      axes: {dim: axis} for the dims "batch", "depth", "height", "width" and "channels" of images
        and volumes, and "in_channels" and "out_channels" of weights; without dims that are not
        sharded.
      sizes: {axis: size}.
      reshard: returns a tensor resharded by mesh axes, an axis or None for each dim.
      gathered: reshards a weight and its gradient in the same way.
    """

    axes: Mapping[str, str]
    sizes: Mapping[str, int]
    reshard: Reshard
    gathered: Reshard

    @classmethod
    def of(cls, layout: MeshLayout, reshard: Reshard, gathered: Reshard) -> ImageMesh:
        """Returns the ImageMesh of a layout."""
        return cls(dict(layout.rules.pairs), dict(layout.mesh.axes), reshard, gathered)

    def image_axes(self, shape: tf.TensorShape) -> Layout:
        """Returns the axes of [batch, *spatial, channels]; None if a size does not divide.

        Raises:
          ExecutionError: the rules shard two dims of an image over one axis.
        """
        found: list[str | None] = []
        names = windows.image_dims(len(shape))
        for dim, size in zip(names, shape, strict=True):
            axis = self._usable(dim, size, ())
            if axis is not None and axis in found:
                other = names[found.index(axis)]
                raise ExecutionError(
                    f"rules {other}:{axis} and {dim}:{axis}: two dims of an image "
                    f"{shape.as_list()} cannot be sharded over one axis; set another axis for {dim}"
                )
            found.append(axis)
        return tuple(found)

    def constrain_image(self, x: tf.Tensor) -> tf.Tensor:
        """Returns images sharded by `image_axes`."""
        return self.reshard(x, self.image_axes(_static(x)))

    def concat_channels(self, xs: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns images joined along their channels, which are whole for it, by `image_axes`.

        Defect: DTensor cannot concatenate tensors along a dim that is sharded, before or
        afterwards.
        """

        def whole(x: tf.Tensor) -> tf.Tensor:
            return separated(self.reshard(x, (*self.image_axes(_static(x))[:-1], None)))

        joined = tf.concat([whole(x) for x in xs], xs[0].shape.rank - 1)
        return self.constrain_image(whole(joined))

    def parts(self, axis: str | None) -> int:
        """Returns the number of devices along an axis; 1 for None."""
        return self.sizes[axis] if axis is not None else 1

    def _usable(self, dim: str, size: int, taken: Layout) -> str | None:
        axis = self.axes.get(dim)
        # With another spatial dim sharded, DTensor ends the process if this axis has one device.
        if axis is None or self.sizes[axis] == 1:
            return None
        return None if axis in taken or size % self.sizes[axis] else axis


def convolution(
    x: tf.Tensor, w: tf.Tensor, b: tf.Tensor | None = None, *, window: Window, mesh: ImageMesh
) -> tf.Tensor:
    """See `window_ops.convolution`.

    Shapes:
      x: [batch, *spatial, channels], w: [*window.shape, channels / groups, outputs], b: [outputs]
      returns: [batch, *window.output_sizes(x), outputs]; outputs are sharded as "out_channels", or
        as "channels" if there is no rule for it
    """
    axes = mesh.image_axes(_static(x))
    cuts = _cuts(x, window, axes, mesh)
    groups = x.shape[-1] // w.shape[-2]
    in_axis, out_axis = _channel_axes(w.shape, groups, axes[:-1], mesh)
    w = mesh.gathered(w, (*_whole(cuts), in_axis, out_axis))
    channels = in_axis if groups == 1 else out_axis
    if channels is None and out_axis is None and _is_whole(cuts):
        whole = (axes[0], *_whole(cuts), None)
        y = mesh.reshard(windows.convolution(mesh.reshard(x, whole), w, window=window), whole)
    else:
        parts = _parts(x, cuts, axes[0], channels, mesh)
        if parts.num_outer == 1 and channels is None and out_axis is None:
            y = windows.convolution(parts.x, w, window=window._replace(padding="VALID"))
        else:
            y = _by_slices(parts, w, groups, (in_axis, out_axis), window, cuts, mesh)
        y = parts.whole(y, out_axis)
    return _with_bias(y, b, axes[0], out_axis, mesh)


def depthwise_convolution(
    x: tf.Tensor, w: tf.Tensor, b: tf.Tensor | None = None, *, window: Window, mesh: ImageMesh
) -> tf.Tensor:
    """See `window_ops.depthwise_convolution`.

    Shapes:
      x: [batch, *spatial, channels], w: [*window.shape, channels, multiplier]
      b: [channels * multiplier]
      returns: [batch, *window.output_sizes(x), channels * multiplier]
    """
    axes = mesh.image_axes(_static(x))
    cuts = _cuts(x, window, axes, mesh)
    w = mesh.gathered(w, (*_whole(cuts), axes[-1], None))
    parts = _parts(x, cuts, axes[0], axes[-1], mesh)
    y = window_slices.depthwise_convolution(
        widen(parts.x),
        widen(w),
        sizes=_outputs(cuts),
        strides=window.strides,
        dilations=window.dilations,
    )
    y = tf.cast(y, x.dtype)
    return _with_bias(parts.whole(y, axes[-1]), b, axes[0], axes[-1], mesh)


def average_pool(x: tf.Tensor, *, window: Window, mesh: ImageMesh) -> tf.Tensor:
    """See `window_ops.average_pool`."""
    axes = mesh.image_axes(_static(x))
    cuts = _cuts(x, window, axes, mesh)
    parts = _parts(x, cuts, axes[0], axes[-1], mesh)
    total = window_slices.window_sum(
        widen(parts.x), shape=window.shape, sizes=_outputs(cuts), strides=window.strides
    )
    counts = windows.element_counts(x.shape[1:-1], window)
    y = parts.whole(total, axes[-1]) / tf.constant(counts, total.dtype)
    return _settled(tf.cast(y, x.dtype), axes[0], axes[-1], mesh)


def max_pool(x: tf.Tensor, *, window: Window, mesh: ImageMesh) -> tf.Tensor:
    """See `window_ops.max_pool`."""
    axes = mesh.image_axes(_static(x))
    cuts = _cuts(x, window, axes, mesh)
    if axes[-1] is None and _is_whole(cuts):
        whole = (axes[0], *_whole(cuts), None)
        y = mesh.reshard(windows.max_pool(mesh.reshard(x, whole), window), whole)
        return _settled(y, axes[0], None, mesh)
    parts = _parts(x, cuts, axes[0], axes[-1], mesh, fill=float("-inf"))
    if parts.num_outer == 1 and axes[-1] is None and x.shape.rank == 4:
        y = tf.nn.max_pool2d(parts.x, window.shape, window.strides, "VALID")
    else:
        y = window_slices.window_max(
            parts.x, shape=window.shape, sizes=_outputs(cuts), strides=window.strides
        )
    return _settled(parts.whole(y, axes[-1]), axes[0], axes[-1], mesh)


def _static(x: tf.Tensor) -> tf.TensorShape:
    if x.shape.rank not in (4, 5) or not x.shape.is_fully_defined():
        raise ExecutionError(
            f"images on a mesh need 4 dims of known sizes, [batch, height, width, channels], and "
            f"volumes 5, [batch, depth, height, width, channels], but the shape is {x.shape}"
        )
    return x.shape


def _cuts(x: tf.Tensor, window: Window, axes: Layout, mesh: ImageMesh) -> Cuts:
    return tuple(
        cut(size, window, d, axis=axis, parts=mesh.parts(axis))
        for d, (size, axis) in enumerate(zip(x.shape[1:-1], axes[1:-1], strict=True))
    )


def _is_whole(cuts: Cuts) -> bool:
    return all(c.axis is None for c in cuts)


def _whole(cuts: Cuts) -> Layout:
    """Returns the axes of spatial dims that are not sharded."""
    return (None,) * len(cuts)


def _outputs(cuts: Cuts) -> tuple[int, ...]:
    return tuple(c.outputs for c in cuts)


def _parts(
    x: tf.Tensor,
    cuts: Cuts,
    batch: str | None,
    channels: str | None,
    mesh: ImageMesh,
    fill: float = 0.0,
) -> Parts:
    return Parts(x, cuts, batch=batch, channels=channels, reshard=mesh.reshard, fill=fill)


def _channel_axes(
    shape: tf.TensorShape, groups: int, taken: Layout, mesh: ImageMesh
) -> tuple[str | None, str | None]:
    """Returns the axes that shard the inputs and the outputs of a weight in a step."""
    inputs, outputs = shape[-2:]
    if groups > 1:  # only the groups can be sharded
        in_axis, outputs = None, groups
    else:
        in_axis = mesh._usable("in_channels", inputs, taken)
    taken = (*taken, in_axis)
    out_axis = mesh._usable("out_channels", outputs, taken)
    return in_axis, out_axis or mesh._usable("channels", outputs, taken)


def _by_slices(
    parts: Parts,
    w: tf.Tensor,
    groups: int,
    axes: tuple[str | None, str | None],
    window: Window,
    cuts: Cuts,
    mesh: ImageMesh,
) -> tf.Tensor:
    """Returns the outputs of the parts; `axes` shard the inputs and the outputs of w.

    A sharded dim becomes two dims: blocks, which are sharded, and the rest. So the all-reduces are
    over gradients of inputs and over outputs, never over all elements of the windows.
    """
    x, (in_axis, out_axis) = widen(parts.x), axes
    dtype, w = parts.x.dtype, widen(w)
    kernel, (inputs, outputs) = w.shape[:-2], w.shape[-2:]
    if groups > 1:
        lead: Layout = (out_axis,)
        x = _to_front(tf.reshape(x, [*x.shape[:-1], groups, inputs]))
        w = _to_front(tf.reshape(w, [*kernel, inputs, groups, outputs // groups]))
    else:
        lead = tuple(axis for axis in (out_axis, in_axis) if axis is not None)
        n, m = mesh.parts(in_axis), mesh.parts(out_axis)
        if in_axis is not None:
            x = _to_front(tf.reshape(x, [*x.shape[:-1], n, inputs // n]))
            x = mesh.reshard(x, (in_axis, *parts.axes(None)))
        if out_axis is not None:  # all inputs for each block of outputs; each device has one block
            ones = tf.ones([m] + [1] * x.shape.rank, x.dtype)
            ones = mesh.reshard(ones, (out_axis, *[None] * x.shape.rank))
            x = tf.expand_dims(x, 0) * ones
        w = tf.reshape(w, [*kernel, n, inputs // n, m, outputs // m])
        at = len(kernel)
        w = tf.transpose(w, [at + 2, at, *range(at), at + 1, at + 3])
        one = [d for d, axis in enumerate((out_axis, in_axis)) if axis is None]
        w = tf.squeeze(w, one) if one else w
    x = mesh.reshard(x, (*lead, *parts.axes(None)))
    w = mesh.gathered(w, (*lead, *_whole(cuts), None, None))
    y = window_slices.convolution(
        x, w, sizes=_outputs(cuts), strides=window.strides, dilations=window.dilations
    )
    y = mesh.reshard(y, (*lead, *parts.axes(None)))
    if in_axis is not None:
        y = tf.reduce_sum(y, len(lead) - 1)
    y = tf.cast(y, dtype)
    if out_axis is None and groups == 1:
        return mesh.reshard(y, parts.axes(None))
    y = tf.transpose(y, [*range(1, y.shape.rank - 1), 0, y.shape.rank - 1])
    return tf.reshape(y, [*y.shape[:-2], outputs])


def _to_front(x: tf.Tensor) -> tf.Tensor:
    """Returns [..., blocks, channels] as [blocks, ..., channels]."""
    rank = x.shape.rank
    return tf.transpose(x, [rank - 2, *range(rank - 2), rank - 1])


def _with_bias(
    y: tf.Tensor, b: tf.Tensor | None, batch: str | None, channels: str | None, mesh: ImageMesh
) -> tf.Tensor:
    y = _settled(y, batch, channels, mesh)
    return y if b is None else y + mesh.gathered(b, (channels,))


def _settled(y: tf.Tensor, batch: str | None, channels: str | None, mesh: ImageMesh) -> tf.Tensor:
    """Constrains outputs: channels as they were computed, spatial dims by the rules."""
    spatial = (None if axis == channels else axis for axis in mesh.image_axes(y.shape)[1:-1])
    return mesh.reshard(y, (batch, *spatial, channels))
