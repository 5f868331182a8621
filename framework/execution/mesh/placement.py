"""Placement: moves tensors between the host and the devices of a mesh, by layouts.

A layout is a tuple with the mesh axis that splits each dim, or None. Everything here works alike in
one process and in several: a process makes and holds the parts of its own devices only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tekso.framework.execution.mesh.layouts import Layout

TOO_MANY_TO_FOLD = 32


class Placement:
    """The devices of a mesh, and how arrays lie on them."""

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh
        self._locations = mesh.local_device_locations()
        self._sizes = {name: mesh.dim_size(name) for name in mesh.dim_names}

    def layout(self, axes: Layout) -> Any:
        """Returns the DTensor layout of a tuple of axes."""
        return dtensor.Layout([axis or dtensor.UNSHARDED for axis in axes], self.mesh)

    def replicated(self, rank: int) -> Any:
        """Returns the layout in which every device holds all."""
        return dtensor.Layout.replicated(self.mesh, rank)

    def relayout(self, x: tf.Tensor, axes: Layout) -> tf.Tensor:
        """Returns x laid out by axes; moves what has to move. For use in a step."""
        return dtensor.relayout(x, self.layout(axes))

    def slices(self, shape: Sequence[int], axes: Layout, location: Any) -> tuple[slice, ...]:
        """Returns which part of an array the device at `location` holds."""
        parts = []
        for size, axis in zip(shape, axes, strict=True):
            if axis is None:
                parts.append(slice(0, size))
            else:
                count = size // self._sizes[axis]
                parts.append(slice(location[axis] * count, (location[axis] + 1) * count))
        return tuple(parts)

    def place(
        self,
        part: Callable[[tuple[slice, ...]], np.ndarray],
        shape: Sequence[int],
        axes: Layout,
        dtype: Any,
    ) -> tf.Tensor:
        """Makes a tensor of which `part(slices)` gives what each local device holds."""
        made: dict[Any, tf.Tensor] = {}
        for location in self._locations:
            where = self.slices(shape, axes, location)
            key = tuple((s.start, s.stop) for s in where)
            if key not in made:
                made[key] = tf.constant(part(where), dtype)
        parts = []
        for location in self._locations:
            where = self.slices(shape, axes, location)
            parts.append(made[tuple((s.start, s.stop) for s in where)])
        return dtensor.pack(parts, self.layout(axes))

    def put(self, array: Any, axes: Layout | None = None) -> tf.Tensor:
        """Places a whole array; every device holds all of it if no axes are given."""
        array = np.asarray(array)
        axes = axes if axes is not None else (None,) * array.ndim
        return self.place(lambda where: array[where], array.shape, axes, array.dtype)

    def put_number(self, value: float, dtype: Any) -> tf.Tensor:
        """Places a number that changes from call to call, see `put_changing`; a vector."""
        return self.put_changing(np.asarray(value, dtype))

    def put_changing(self, array: Any) -> tf.Tensor:
        """Places what changes from call to call; a step takes the first of it.

        DTensor compiles a step for the value of an integer tensor with few elements, and all of it
        once more when it finds another value there; so there are many.

        Shapes:
          array: any
          returns: [copies, *shape of the array]
        """
        array = np.asarray(array)
        copies = max(1, -(-TOO_MANY_TO_FOLD // max(array.size, 1)))
        return self.put(np.repeat(array[np.newaxis], copies, axis=0))

    def taken(self, x: tf.Tensor, index: Any, axes: Layout) -> tf.Tensor:
        """Returns x[index], laid out by axes. For use in a step.

        Pinned on both sides of an identity, or what layers pin of the part would be asked of the
        whole, in which that dim has another place.
        """
        return tf.identity(self.relayout(tf.gather(x, index), axes))

    def whole(self, x: tf.Tensor) -> np.ndarray:
        """Returns all of a placed tensor on the host; every process has to call it."""
        layout = dtensor.fetch_layout(x)
        if not layout.is_fully_replicated():
            x = self._gather(x)
        return dtensor.unpack(x)[0].numpy()

    def _gather(self, x: tf.Tensor) -> tf.Tensor:
        return dtensor.relayout(x, self.replicated(x.shape.rank))

    def local(self, x: tf.Tensor) -> tf.Tensor:
        """Returns a replicated tensor as an ordinary one, without waiting for its value."""
        return dtensor.unpack(x)[0]
