"""Placement: moves tensors between the host and the devices of a mesh, by layouts.

A layout is a tuple with the mesh axis that shards each dim, or None. Everything here works in one
process and in several: each process creates and stores only the shards of its own devices.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tekso.framework.execution.mesh.layouts import Layout
from tekso.framework.execution.workarounds.tensors import copies, first_copy, is_folded, separated

Placed: TypeAlias = tf.Tensor | tuple[tf.Tensor]
"""A placed array; a tuple of copies of an array that a step would compile as a constant."""


class Placement:
    """The devices of a mesh; shards arrays over them and gathers them."""

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh
        self.process, self.num_processes = dtensor.client_id(), dtensor.num_clients()
        self._locations = mesh.local_device_locations()
        self._sizes = {name: mesh.dim_size(name) for name in mesh.dim_names}

    def layout(self, axes: Layout) -> Any:
        """Returns the DTensor layout of a tuple of axes."""
        return dtensor.Layout([axis or dtensor.UNSHARDED for axis in axes], self.mesh)

    def replicated(self, rank: int) -> Any:
        """Returns the DTensor layout of a replicated tensor."""
        return dtensor.Layout.replicated(self.mesh, rank)

    def reshard(self, x: tf.Tensor, axes: Layout) -> tf.Tensor:
        """Returns x resharded by axes. For use in a step."""
        return dtensor.relayout(x, self.layout(axes))

    def slices(self, shape: Sequence[int], axes: Layout, location: Any) -> tuple[slice, ...]:
        """Returns the slices of an array that are the shard of the device at `location`."""
        parts = []
        for size, axis in zip(shape, axes, strict=True):
            if axis is None:
                parts.append(slice(0, size))
            else:
                count = size // self._sizes[axis]
                parts.append(slice(location[axis] * count, (location[axis] + 1) * count))
        return tuple(parts)

    def extent(self, size: int, axis: str | None) -> tuple[int, int]:
        """Returns the first index, and the one after the last, that local devices have of a dim.

        Args:
          size: size of the dim.
          axis: the axis that shards it.
        """
        own = [self.slices((size,), (axis,), location)[0] for location in self._locations]
        return min(s.start for s in own), max(s.stop for s in own)

    def shards(
        self, shape: Sequence[int], axes: Layout
    ) -> list[tuple[tuple[slice, ...], tuple[int, ...]]]:
        """Returns every distinct shard of a tensor, with the processes that have it.

        The first devices of a mesh belong to process 0, the next to process 1, and so on.
        """
        names, per_process = list(self._sizes), len(self._locations)
        found: dict[Any, tuple[tuple[slice, ...], list[int]]] = {}
        for number, at in enumerate(itertools.product(*map(range, self._sizes.values()))):
            where = self.slices(shape, axes, dict(zip(names, at, strict=True)))
            _, processes = found.setdefault(hashable(where), (where, []))
            if number // per_process not in processes:
                processes.append(number // per_process)
        return [(where, tuple(processes)) for where, processes in found.values()]

    def local_shards(self, x: tf.Tensor, axes: Layout) -> dict[Any, tf.Tensor]:
        """Returns {hashable slices: shard} of the shards of a tensor that local devices have."""
        places = [hashable(self.slices(x.shape, axes, at)) for at in self._locations]
        found: dict[Any, tf.Tensor] = {}
        for place, shard in zip(places, dtensor.unpack(x), strict=True):
            found.setdefault(place, shard)
        return found

    def place(
        self,
        part: Callable[[tuple[slice, ...]], np.ndarray],
        shape: Sequence[int],
        axes: Layout,
        dtype: Any,
    ) -> tf.Tensor:
        """Returns a sharded tensor; `part(slices)` returns the shard of a local device."""
        made: dict[Any, tf.Tensor] = {}
        for location in self._locations:
            where = self.slices(shape, axes, location)
            key = hashable(where)
            if key not in made:
                made[key] = tf.constant(part(where), dtype)
        parts = []
        for location in self._locations:
            where = self.slices(shape, axes, location)
            parts.append(made[hashable(where)])
        return dtensor.pack(parts, self.layout(axes))

    def put(self, array: Any, axes: Layout | None = None) -> tf.Tensor:
        """Places an array: sharded by axes, or replicated if no axes are given."""
        array = np.asarray(array)
        axes = axes if axes is not None else (None,) * array.ndim
        return self.place(lambda where: array[where], array.shape, axes, array.dtype)

    def put_rows(
        self, array: np.ndarray, axes: Layout, *, dim: int, size: int, first: int
    ) -> tf.Tensor:
        """Places an array of which this process has the part that its devices need.

        Args:
          array: the array, with some rows of a dim.
          axes: the axis that shards each dim.
          dim: the dim.
          size: its size in the whole array.
          first: index in the whole array of the first row in `array`.
        """

        def part(where: tuple[slice, ...]) -> np.ndarray:
            rows = slice(where[dim].start - first, where[dim].stop - first)
            return array[(*where[:dim], rows, *where[dim + 1 :])]

        shape = (*array.shape[:dim], size, *array.shape[dim + 1 :])
        return self.place(part, shape, axes, array.dtype)

    def put_batch(
        self, array: np.ndarray, axes: Layout, *, dim: int, size: int, first: int
    ) -> Placed:
        """Places an array of a batch; see `put_rows`.

        A small replicated array is placed as a tuple of copies: `batch` returns it in a step.
        """
        if is_folded(array, self.layout(axes)):
            return (self.put_changing(array),)
        return self.put_rows(array, axes, dim=dim, size=size, first=first)

    def batch(self, placed: Mapping[str, Placed]) -> dict[str, tf.Tensor]:
        """Returns the arrays of a batch that `put_batch` placed. For use in a step."""
        return {
            name: self.taken(x[0], 0, (None,) * (x[0].shape.rank - 1))
            if isinstance(x, tuple)
            else x
            for name, x in placed.items()
        }

    def put_number(self, value: float, dtype: Any) -> tf.Tensor:
        """Places a number that changes from call to call, as a vector; see `put_changing`."""
        return self.put_changing(np.asarray(value, dtype))

    def put_changing(self, array: Any) -> tf.Tensor:
        """Places copies of an array that changes from call to call; a step uses the first.

        Shapes:
          array: any
          returns: [copies, *shape of the array]
        """
        return self.put(copies(array))

    def taken(self, x: tf.Tensor, index: Any, axes: Layout) -> tf.Tensor:
        """Returns x[index], sharded by axes. For use in a step."""
        return separated(self.reshard(tf.gather(x, index), axes))

    def to_host(self, x: tf.Tensor) -> np.ndarray:
        """Returns a sharded tensor as an array on the host; every process must call it."""
        array: np.ndarray = self.gathered(x).numpy()
        return array

    def gathered(self, x: tf.Tensor) -> tf.Tensor:
        """Returns a sharded tensor, replicated; every process must call it."""
        if dtensor.fetch_layout(x).is_fully_replicated():
            return x
        return dtensor.relayout(x, self.replicated(x.shape.rank))

    def local(self, x: tf.Tensor) -> tf.Tensor:
        """Returns a replicated tensor as an ordinary tensor, when its value is computed."""
        return first_copy(x)


def hashable(where: tuple[slice, ...]) -> tuple[tuple[int, int], ...]:
    """Returns slices as pairs of start and stop, which can be keys of a dict."""
    return tuple((s.start, s.stop) for s in where)
