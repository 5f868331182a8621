"""The meshes of a pipeline whose stages are split themselves, and what goes from one to another.

    stage 0   CPU:0 CPU:1   model:2           a value: its parts, device for device,
    stage 1   CPU:2 CPU:3   model:2           in the layout that it has already

A program over devices of several meshes does not run in TensorFlow 2.21, so a tensor leaves one
mesh as its parts and enters another as such.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.experimental import dtensor

from tekso.framework.execution.mesh import mesh_devices
from tekso.framework.execution.mesh.layouts import Layout, MeshLayout
from tekso.framework.execution.mesh.placement import TOO_MANY_TO_FOLD, Placement

# DTensor's device keeps tables that nothing guards. What it is asked to do it does in threads of
# its own, so it is asked by one thread at a time, and each waits for the answer without the lock.
_ASKING = threading.Lock()


@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
    """A tensor outside of its mesh.

    Attributes:
      parts: what each device has, in the order of the mesh.
      axes: how it lay.
    """

    parts: tuple[tf.Tensor, ...]
    axes: Layout

    @classmethod
    def of(cls, x: tf.Tensor) -> Parts:
        """Takes a tensor from its mesh; it may not be computed yet."""
        specs = dtensor.fetch_layout(x).sharding_specs
        axes = tuple(None if spec == dtensor.UNSHARDED else spec for spec in specs)
        return cls(tuple(dtensor.unpack(x)), axes)

    @property
    def first(self) -> tf.Tensor:
        """What the first device has: all of it, if it is not split."""
        return self.parts[0]


class StageMesh:
    """The mesh of a stage, and how tensors lie on it.

    Args:
      layout: mesh and rules.
      device_type: of the devices.
      number: 0 for the first devices of the type, 1 for the next, and so on.
    """

    def __init__(self, layout: MeshLayout, device_type: str, number: int) -> None:
        self.layout = layout
        mesh = mesh_devices.make_mesh(layout.mesh, device_type, first=number * layout.mesh.size)
        self.placement = Placement(mesh)
        self._devices: list[str] = list(mesh.local_devices())

    def __len__(self) -> int:
        return len(self._devices)

    def ask(self, function: Callable[..., Any], *args: Any) -> Any:
        """Returns a nest of tensors of this mesh, perhaps not computed yet.

        Args:
          function: of tensors of this mesh.
          args: what it takes.
        """
        with _ASKING:
            return function(*args)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Returns a nest of tensors of this mesh as `Parts`, when they are computed."""
        with _ASKING:
            made = function(*args)
            parts = tf.nest.map_structure(lambda x: None if x is None else Parts.of(x), made)
        wait_for(parts)
        return parts

    def put(self, array: Any, axes: Layout | None = None) -> tf.Tensor:
        """Places an array; every device holds all of it if no axes are given."""
        with _ASKING:
            return self.placement.put(array, axes)

    def put_number(self, value: float, dtype: Any) -> tf.Tensor:
        """Places a number; see `Placement`."""
        with _ASKING:
            return self.placement.put_number(value, dtype)

    def take(self, given: Parts) -> tf.Tensor:
        """Places a tensor of another mesh of this shape, as it lay there."""
        return self._pack(given.parts, given.axes)

    def spread(self, x: tf.Tensor) -> tf.Tensor:
        """Places an ordinary tensor; every device holds all of it."""
        return self._pack([x] * len(self), (None,) * x.shape.rank)

    def spread_scalar(self, x: tf.Tensor) -> tf.Tensor:
        """Places an ordinary scalar in the form of `put_number`."""
        return self.spread(tf.fill([TOO_MANY_TO_FOLD], x))

    def _pack(self, parts: Sequence[tf.Tensor], axes: Layout) -> tf.Tensor:
        own = []
        for part, device in zip(parts, self._devices, strict=True):
            with tf.device(device):
                own.append(tf.identity(part))
        with _ASKING:
            return dtensor.pack(own, self.placement.layout(axes))


def wait_for(parts: Any) -> None:
    """Waits until one call of a mesh is done; `parts` is a nest of what it made.

    By an op, which lets other threads go on: reading a value of a tensor that is not there yet
    holds Python's lock.
    """
    made = [each for each in tf.nest.flatten(parts) if each is not None]
    for part in made[0].parts if made else ():
        tf.identity(part)


def local(parts: Any) -> Any:
    """Returns a nest of `Parts` of tensors that are not split as ordinary tensors."""
    return tf.nest.map_structure(lambda made: None if made is None else made.first, parts)
