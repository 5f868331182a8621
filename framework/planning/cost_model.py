"""A cost model: time and memory of a training step under a layout, computed without a device.

    time    = products and elementwise passes + collectives + the update of the weights
    memory  = weights + slots + gradients + saved activations + workspace

Every device computes a product `x [batch, length, embed] · w [embed, mlp]` on its shards. Let U be
the axes that shard any letter of the product. Its output and its two gradients are each summed
over the axes of U that do not shard them:

    out             contracted letters are sharded       all-reduce of activations, forward
    gradient of x   dims that only w has are sharded     all-reduce of activations, backward
    gradient of w   dims that only x has are sharded     all-reduce of gradients

If several products use an activation, its gradients are summed on each device first, and there is
one all-reduce. If rules assign one axis to two letters, the letter of the weight gets it, and the
activation is gathered. If a sharding constraint differs from the current sharding, the tensor is
all-gathered, or resharded between two dims by an all-to-all. Slicing is free.

Collectives are rings (rings.py).

The model is made to rank layouts. It leaves out the overlap of communication with computation,
compiler fusion, sums over a sharded dim in the optimizer, and alignment and fragmentation of
memory. It assumes that the gradient of a weight is reduce-scattered over an axis that shards its
slots.

Source:
  Products: Shazeer et al. 2018, "Mesh-TensorFlow" (arXiv 1811.02084), section 4.
  Time of a product, limited by arithmetic or by memory: Williams et al. 2009, "Roofline".
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from tekso.framework.costs.device_types import DeviceType
from tekso.framework.execution.mesh.layouts import Layout, MeshLayout, Rules
from tekso.framework.planning.placed_work import Letters, PlacedActivations
from tekso.framework.planning.rings import (
    ACTIVATIONS,
    GRADIENTS,
    WEIGHTS,
    Bill,
    CollectiveCost,
)
from tekso.framework.planning.step_work import (
    Alike,
    Halo,
    MatrixProduct,
    Part,
    Passes,
    Reduction,
    ReplicaSum,
    Reshard,
    StepWork,
)
from tekso.framework.weight_spec import WeightSpec

_LOSS_WEIGHT_BYTES = 4.0
_POSITIONS = ("batch", "length")  # the gradient of every weight is summed over these dims


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes per device at the peak of a step.

    Attributes:
      weights: stored weights.
      used_weights: copies of weights for a step: gathered, or cast to another type.
      slots: slots of the optimizer.
      gradients: gradients of all weights.
      activations: saved activations.
      workspace: twice the largest output of a product, plus the saved activations of the largest
        recomputed part.
    """

    weights: float
    used_weights: float
    slots: float
    gradients: float
    activations: float
    workspace: float

    @property
    def total(self) -> float:
        """Sum of all bytes."""
        held = self.weights + self.used_weights + self.slots + self.gradients
        return held + self.activations + self.workspace


@dataclasses.dataclass(frozen=True)
class Cost:
    """Time, memory and communication of a step.

    Attributes:
      flops: floating-point operations of one device.
      redundancy: flops of all devices together / flops on a single device; 1 if nothing is computed
        twice.
      compute_s, communication_s, update_s: the three parts of the time.
      memory: bytes per device.
      collectives: the collectives of a step.
      unsized: names of the ops whose results have an unknown size.
    """

    flops: float
    redundancy: float
    compute_s: float
    communication_s: float
    update_s: float
    memory: Memory
    collectives: tuple[CollectiveCost, ...]
    unsized: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Time of a step."""
        return self.compute_s + self.communication_s + self.update_s

    def sent_bytes(self, of: str | None = None) -> float:
        """Returns the bytes that a device sends in a step: all, or only those with this `of`."""
        return sum(c.sent_bytes for c in self.collectives if of is None or c.of == of)


class CostModel:
    """Costs of one model on one type of device, for any mesh and rules.

    Args:
      work: work of a step, or of one accumulation step.
      weights: all weights, in groups; `work` refers to the first spec of each group.
      slots: all slots of the optimizer, in groups.
      device: type of the devices.
      parts: number of accumulation steps.
      activation_bytes: bytes per element to which float32 weights are cast for a step.
    """

    def __init__(
        self,
        work: StepWork,
        weights: Sequence[Alike],
        slots: Sequence[Alike],
        device: DeviceType,
        *,
        parts: int = 1,
        activation_bytes: int = 4,
    ) -> None:
        self.device = device
        self._work, self._weights, self._slots = work, weights, slots
        self._parts, self._activation_bytes = parts, activation_bytes
        self._of_path = {group.spec.path: group for group in weights}
        self._products = [
            (Letters.of(product), recomputed, count)
            for (product, recomputed), count in work.work.items()
            if isinstance(product, MatrixProduct)
        ]
        used = {p.weight for letters, _, _ in self._products for p in letters.parts}
        self._summed_only = [g for g in weights if g.trained and g.spec.path not in used]
        self._layouts: dict[Any, Layout] = {}
        self._last: tuple[Any, _Sums] | None = None

    def cost(self, layout: MeshLayout, *, packs_gradients: bool = False) -> Cost:
        """Returns the cost of a step under a layout, which must be legal.

        Args:
          layout: the layout.
          packs_gradients: whether one all-reduce over all devices has all gradients and the sums of
            the loss, after the last accumulation step, as in data-parallel execution, which also
            all-reduces the weight of the loss of the batch. On a mesh, each gradient has its own.
        """
        key = (layout.mesh, layout.rules)
        if self._last is None or self._last[0] != key:
            self._last = (key, self._step(PlacedActivations(layout, self._work.weights)))
        sums = self._last[1]
        bill = Bill(layout.mesh, self.device, dict(sums.bill.rows))
        if packs_gradients:
            trained = [g.spec.size_bytes * g.count for g in self._weights if g.trained]
            bill.add("all-reduce", layout.mesh.names, GRADIENTS, math.fsum(trained), 1)
            bill.add("all-reduce", layout.mesh.names, ACTIVATIONS, _LOSS_WEIGHT_BYTES, 1)
        for gradient in () if packs_gradients else sums.gradients:
            self._reduce_gradient(bill, layout, gradient)
        memory, update_bytes = self._state(bill, layout, sums)
        flops = sums.flops * self._parts
        return Cost(
            flops,
            sums.flops * layout.mesh.size / max(self._work.flops, 1),
            sums.seconds * self._parts,
            bill.seconds,
            update_bytes / self.device.memory_bytes_per_s,
            memory,
            bill.collectives(),
            self._work.unsized,
        )

    def unsharded_share(self, layout: MeshLayout, axis: str) -> float:
        """Returns the share of the bytes of weights that the rules do not shard over an axis."""
        total = whole = 0
        for group in self._weights:
            size = group.spec.size_bytes * group.count
            total += size
            whole += size if axis not in self._layout("used", layout, group.spec) else 0
        return whole / max(total, 1)

    # --- the step: products, activations ---

    def _step(self, placed: PlacedActivations) -> _Sums:
        sums = _Sums(Bill(placed.mesh, self.device, {}))
        for letters, recomputed, count in self._products:
            self._product(sums, placed, letters, recomputed, count * self._parts)
        bandwidth = self.device.memory_bytes_per_s
        for (work, recomputed), iterations in self._work.work.items():
            count, forward = iterations * self._parts, 1 + recomputed
            if isinstance(work, Passes):
                passes = work.forward * forward + work.backward
                sums.seconds += placed.bytes(work.part) * passes * iterations / bandwidth
            elif isinstance(work, Reduction):
                axes = placed.extra_axes(work.over, work.part)
                times = work.forward * forward + work.backward
                local = placed.bytes(work.part)
                sums.bill.add("all-reduce", axes, ACTIVATIONS, local, times * count)
            elif isinstance(work, ReplicaSum):
                times = forward + work.part.learned
                local, axes = work.part.size_bytes, placed.mesh.names
                sums.bill.add("all-reduce", axes, ACTIVATIONS, local, times * count)
            elif isinstance(work, Reshard):
                before, after = placed.own(work.before, work.after.shape), placed.of(work.after)
                self._reshard(sums.bill, placed, work.after, before, after, forward * count)
                if work.after.learned:
                    self._reshard(sums.bill, placed, work.after, after, before, count)
            elif isinstance(work, Halo):
                axis = placed.of(work.part)[work.dim]
                size = work.part.shape[work.dim] / placed.count([axis])
                share = min(work.width / size, 1)
                times = (forward + work.part.learned) * count
                # The edges of all parts are gathered, see execution/mesh/halos.py.
                gathered = placed.bytes(work.part) * share * placed.count([axis])
                axes = (axis,) if axis else ()
                sums.bill.add("all-gather", axes, ACTIVATIONS, gathered, times)
        sums.saved = placed.saved(self._work.saved)
        sums.recomputed = max((placed.saved(region) for region in self._work.recomputed), default=0)
        for group in self._summed_only:
            axes = placed.extra_axes(_POSITIONS, _part(group.spec))
            local = placed.bytes(_part(group.spec))
            sums.gradients.append(_Gradient(group, axes, local, group.count * self._parts))
        return sums

    def _product(
        self, sums: _Sums, placed: PlacedActivations, letters: Letters, recomputed: int, count: int
    ) -> None:
        product, device, forward = letters.product, self.device, 1 + recomputed
        axis_of = letters.axes(placed)
        axes = [tuple(axis_of.get(x) for x in form) for form in letters.forms]
        used = set(axis_of.values())
        local = [placed.bytes(p, a) for p, a in zip(letters.parts, axes, strict=True)]
        a, b, out = letters.parts
        flops = 2.0 * letters.size / placed.count(used)
        moved_s = sum(local) / device.memory_bytes_per_s
        peak = device.flops_per_s["bfloat16" if a.itemsize == 2 else "float32"] * device.reached
        seconds = max(flops / peak, moved_s)
        backward = a.learned + b.learned
        iterations = count / self._parts
        if product.is_lookup:
            # The forward pass copies rows; the backward pass adds them to a table of zeros.
            copied_s = 2 * local[2] / device.memory_bytes_per_s
            added_s = copied_s + 2 * local[1] / device.memory_bytes_per_s
            sums.seconds += (copied_s * forward + added_s) * iterations
        else:
            sums.seconds += seconds * (forward + backward) * iterations
            sums.flops += flops * (forward + backward) * iterations
        sums.largest = max(sums.largest, local[2])
        # Inputs are resharded for the product, and their gradients are resharded back.
        before = (product.before_a, product.before_b)
        for part, needed, size, earlier in zip((a, b), axes, local, before, strict=False):
            rest = placed.ordered(used - set(needed))
            if part.weight is not None:
                if part.learned and part.weight in self._of_path:
                    group = self._of_path[part.weight]
                    is_whole = part.shape == group.spec.shape  # and no slice of an iteration
                    times = count // product.iterations if is_whole else count
                    if group.trained:
                        sums.gradients.append(_Gradient(group, rest, size, times))
                continue
            if product.is_lookup and part is a:
                continue
            own = placed.of(part)
            self._reshard(sums.bill, placed, part, own, needed, forward * count)
            if part.learned:
                if not any(rest == placed.outside(needed, dims) for dims in earlier):
                    sums.bill.add("all-reduce", rest, ACTIVATIONS, size, count)
                self._reshard(sums.bill, placed, part, needed, own, count)
        rest = placed.ordered(used - set(axes[2]))
        sums.bill.add("all-reduce", rest, ACTIVATIONS, local[2], forward * count)
        own = placed.of(out)
        self._reshard(sums.bill, placed, out, axes[2], own, forward * count)
        if out.learned:
            self._reshard(sums.bill, placed, out, own, axes[2], count)

    def _reshard(
        self,
        bill: Bill,
        placed: PlacedActivations,
        part: Part,
        before: Layout,
        after: Layout,
        count: int,
    ) -> None:
        if before == after:
            return
        moved = [x for i, x in enumerate(before) if x and x in after and after[i] != x]
        dropped = [x for x in before if x and x not in after]
        common = placed.count(set(before) | set(after))  # slicing comes first
        local = part.size_bytes / common
        for axis in moved:
            bill.add("all-to-all", (axis,), ACTIVATIONS, local, count)
        gathered = local * placed.count(dropped)
        bill.add("all-gather", placed.ordered(dropped), ACTIVATIONS, gathered, count)

    # --- weights, slots and their gradients ---

    def _reduce_gradient(self, bill: Bill, layout: MeshLayout, gradient: _Gradient) -> None:
        spec, axes, size = gradient.group.spec, gradient.axes, gradient.bytes
        stored = self._layout("slot", layout, spec)[spec.stacked :]
        used = self._layout("used", layout, spec)
        for axis in [x for x in stored if x and x not in used and x in axes]:
            bill.add("reduce-scatter", (axis,), GRADIENTS, size, gradient.count)
            size /= layout.mesh.size_of(axis)
            axes = tuple(x for x in axes if x != axis)
        bill.add("all-reduce", axes, GRADIENTS, size, gradient.count)

    def _state(self, bill: Bill, layout: MeshLayout, sums: _Sums) -> tuple[Memory, float]:
        """Returns the memory, and the bytes that the update reads and writes."""
        weights = used_weights = gradients = slots = update = 0.0
        for group in self._weights:
            spec, count = group.spec, group.count
            used, stored, slot = (self._layout(k, layout, spec) for k in ("used", "stored", "slot"))
            as_used, as_stored, as_slot = (
                layout.shard_bytes(spec, x) for x in (used, stored, slot)
            )
            weights += as_stored * count
            itemsize = spec.size_bytes // max(spec.size, 1)
            is_cast = group.trained and itemsize == 4 != self._activation_bytes
            in_use = as_used * (self._activation_bytes / itemsize if is_cast else 1)
            if is_cast or stored != used:
                used_weights += in_use * count
            if stored != used:
                gathered = tuple(x for x in stored if x and x not in used)
                bill.add("all-gather", gathered, WEIGHTS, in_use, count * self._parts)
            if not group.trained:
                continue
            if slot != stored:
                gathered = tuple(x for x in slot if x and x not in stored)
                bill.add("all-gather", gathered, WEIGHTS, as_stored, count)
            gradients += as_slot * count * (2 if self._parts > 1 else 1)
            update += 3 * as_slot * count
        for group in self._slots:
            local = layout.shard_bytes(group.spec, self._layout("slot", layout, group.spec))
            slots += local * group.count
            update += 2 * local * group.count
        workspace = 2 * sums.largest + sums.recomputed
        memory = Memory(weights, used_weights, slots, gradients, sums.saved, workspace)
        return memory, update

    def _layout(self, kind: str, layout: MeshLayout, spec: WeightSpec) -> Layout:
        """Returns the cached layout of a weight in a step, of a stored weight, or of a slot."""
        if kind == "stored" and layout.weights_axis is None:
            kind = "used"
        elif kind == "slot" and layout.slots_axis is None:
            return self._layout("stored", layout, spec)
        pairs = tuple(pair for pair in layout.rules.pairs if pair[0] in spec.dims)
        key = (kind, layout.mesh, pairs, layout.weights_axis, layout.slots_axis, id(spec))
        if key not in self._layouts:
            own = dataclasses.replace(layout, rules=Rules(pairs))
            makers = {"used": own.of_weight, "stored": own.of_stored_weight, "slot": own.of_slot}
            self._layouts[key] = makers[kind](spec)
        return self._layouts[key]


@dataclasses.dataclass(frozen=True)
class _Gradient:
    """The gradient of a weight, which is to be summed over axes."""

    group: Alike
    axes: tuple[str, ...]
    bytes: float
    count: int


class _Sums:
    """Totals over the work of a step; times are for one accumulation step."""

    def __init__(self, bill: Bill) -> None:
        self.bill = bill
        self.seconds = self.flops = 0.0
        self.largest = self.saved = self.recomputed = 0.0
        self.gradients: list[_Gradient] = []


def _part(spec: WeightSpec) -> Part:
    return Part(spec.dims, spec.shape, spec.size_bytes // max(spec.size, 1), weight=spec.path)
