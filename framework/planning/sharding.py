"""Computes the shards of weights and slots on a device of a mesh, from specs; allocates nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tekso.framework.execution.mesh.layouts import Layout, MeshLayout
from tekso.framework.weight_spec import WeightSpec


@dataclasses.dataclass(frozen=True)
class ShardedWeight:
    """A weight on a mesh.

    Attributes:
      spec: path, dims, shape, dtype.
      layout: layout between steps.
      used_layout: layout in a step; it differs from `layout` if the weight is gathered for use.
      shard_shape: shape of a device's shard between steps.
      bytes_per_device: bytes of this shard.
      optimizer_bytes_per_device: bytes of the shards of its slots.
      optimizer_bytes: bytes of its slots on all devices together.
    """

    spec: WeightSpec
    layout: Layout
    used_layout: Layout
    shard_shape: tuple[int, ...]
    bytes_per_device: int
    optimizer_bytes_per_device: int
    optimizer_bytes: int


@dataclasses.dataclass(frozen=True)
class Sharding:
    """All weights of a task on a mesh.

    Attributes:
      layout: mesh and rules.
      weights: all weights, in the order of the specs.
      optimizer_bytes_per_device: bytes of the shards of all slots, including counters of steps,
        which belong to no weight.
      optimizer_bytes: bytes of all slots, unsharded.
    """

    layout: MeshLayout
    weights: tuple[ShardedWeight, ...]
    optimizer_bytes_per_device: int
    optimizer_bytes: int

    @property
    def weight_bytes_per_device(self) -> int:
        """Bytes of the shards of all weights on a device between steps."""
        return sum(weight.bytes_per_device for weight in self.weights)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(weight.spec.size_bytes for weight in self.weights)

    def split_by(self, dim: str, axis: str) -> list[ShardedWeight]:
        """Returns the weights that the rule dim:axis shards."""
        pair = (dim, axis)
        return [w for w in self.weights if pair in zip(w.spec.dims, w.used_layout, strict=True)]

    def split_further(self) -> list[ShardedWeight]:
        """Returns the weights that `weights_axis` shards in addition to the rules."""
        return [weight for weight in self.weights if weight.layout != weight.used_layout]

    def remarks(self) -> list[str]:
        """Returns sentences on settings of the layout that have no effect."""
        layout, found = self.layout, []
        used = {axis for _, axis in layout.rules.pairs}
        for axis, size in layout.mesh.axes:
            extra = axis in (layout.weights_axis, layout.slots_axis)
            if axis not in used and size > 1:
                does = "compute" if extra else "store and compute"
                found.append(f"no rule uses axis {axis}: its {size} devices {does} the same")
        if layout.weights_axis is not None and not self.split_further():
            found.append(
                f"weights_axis {layout.weights_axis} shards nothing: every weight is sharded over "
                "the axis by a rule, or has no other dim that the axis divides"
            )
        if layout.slots_axis is not None and not self.slots_are_split_further():
            found.append(
                f"slots_axis {layout.slots_axis} shards nothing: every slot is already sharded "
                "over the axis, or has no other dim that the axis divides"
            )
        return found

    def slots_are_split_further(self) -> bool:
        """Returns whether `slots_axis` shards any slot."""
        without = dataclasses.replace(self.layout, slots_axis=None)
        return any(self.layout.of_slot(w.spec) != without.of_slot(w.spec) for w in self.weights)


def of_model(
    layout: MeshLayout, specs: Mapping[str, WeightSpec], slots: Mapping[str, WeightSpec]
) -> Sharding:
    """Returns the sharding of weights and slots.

    Args:
      layout: mesh and rules; must be legal.
      specs: specs of all weights.
      slots: specs of the learner's slots, by "<weight path>/<slot name>".
    """
    held = {path: layout.shard_bytes(s, layout.of_slot(s)) for path, s in slots.items()}
    own: dict[str, list[str]] = {path: [] for path in specs}
    for path in slots:
        own.get(path.rpartition("/")[0], []).append(path)
    weights = []
    for path, spec in specs.items():
        stored = layout.of_stored_weight(spec)
        weights.append(
            ShardedWeight(
                spec=spec,
                layout=stored,
                used_layout=layout.of_weight(spec),
                shard_shape=layout.shard_shape(spec.shape, stored),
                bytes_per_device=layout.shard_bytes(spec, stored),
                optimizer_bytes_per_device=sum(held[slot] for slot in own[path]),
                optimizer_bytes=sum(slots[slot].size_bytes for slot in own[path]),
            )
        )
    return Sharding(
        layout,
        tuple(weights),
        optimizer_bytes_per_device=sum(held.values()),
        optimizer_bytes=sum(spec.size_bytes for spec in slots.values()),
    )


def record(sharding: Sharding) -> dict[str, Any]:
    """Returns a sharding in a form for JSON."""
    layout = sharding.layout
    return {
        "mesh": str(layout.mesh),
        "axes": dict(layout.mesh.axes),
        "num_devices": layout.mesh.size,
        "rules": [
            {"dim": dim, "axis": axis, "weights": len(sharding.split_by(dim, axis))}
            for dim, axis in layout.rules.pairs
        ],
        "weights_axis": layout.weights_axis,
        "slots_axis": layout.slots_axis,
        "remarks": sharding.remarks(),
        "weights": [
            {
                "path": weight.spec.path,
                "dims": list(weight.spec.dims),
                "shape": list(weight.spec.shape),
                "dtype": weight.spec.dtype,
                "layout": list(weight.layout),
                "used_layout": list(weight.used_layout),
                "shard_shape": list(weight.shard_shape),
                "bytes_per_device": weight.bytes_per_device,
                "optimizer_bytes_per_device": weight.optimizer_bytes_per_device,
            }
            for weight in sharding.weights
        ],
        "weight_bytes": sharding.weight_bytes,
        "weight_bytes_per_device": sharding.weight_bytes_per_device,
        "optimizer_bytes": sharding.optimizer_bytes,
        "optimizer_bytes_per_device": sharding.optimizer_bytes_per_device,
    }
