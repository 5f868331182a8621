"""Searches the legal layouts of a model for the fastest step, by the cost model.

    for every mesh        the given one, or all meshes of up to three axes over N devices
      for every axis      sets of dims that it can shard together legally
        their products    rules; with and without weights_axis or slots_axis

Layouts that do not fit into the memory of a device come last. The search is not exhaustive:

- Dims that only small weights have (less than 1 % of the bytes), and dims of experts that follow
  other dims (`layouts.FOLLOWS`), get no rules.
- If there are too many rules, axes are decided one after the other. After each axis only the
  fastest layouts and those with the least memory remain.
- weights_axis and slots_axis are tried only for the fastest layouts of a mesh and those with the
  least memory, over axes that shard less than half of the bytes of the weights.
- If the step fits into one device, layouts by which every device computes the whole step are left
  out: one device computes it as fast. The ranking includes one device for comparison.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tekso.framework.costs import this_machine
from tekso.framework.costs.device_types import DeviceType
from tekso.framework.execution.accumulation import part_of
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.mesh import activations, step_errors
from tekso.framework.execution.mesh.layouts import (
    FOLLOWS,
    Activations,
    MeshLayout,
    MeshShape,
    Rules,
)
from tekso.framework.execution.mesh.presets import DATA, MODEL
from tekso.framework.learning_step import LearnerBase
from tekso.framework.planning import tracing
from tekso.framework.planning.cost_model import Cost, CostModel
from tekso.framework.planning.step_work import alike
from tekso.framework.signature import Signature
from tekso.framework.task import Task
from tekso.framework.weight_spec import WeightSpec

MAX_TRIED = 4000  # largest number of rules, of all meshes together, for which all are tried
KEPT = 30  # number of fastest layouts that remain, and of those with the least memory
MODEL2 = "model2"
ONE_DEVICE = MeshLayout(MeshShape(((DATA, 1),)), Rules(()))
_WHOLE_STEP = 0.999  # share of the operations of a step that counts as all of them
SMALL = 0.01  # a dim is small if weights with this dim have less than this share of the bytes


@dataclasses.dataclass(frozen=True)
class Ranked:
    """A layout and its place in a ranking.

    Attributes:
      place: 1 for the best.
      layout: mesh and rules.
      cost: cost of a step.
      device: type of the devices for this cost.
      best: cost of the first layout of the ranking.
      is_asked: whether the caller gave this layout for comparison.
    """

    place: int
    layout: MeshLayout
    cost: Cost
    device: DeviceType
    best: Cost
    is_asked: bool = False

    @property
    def fits(self) -> bool:
        """Whether it fits into the memory of a device."""
        return self.cost.memory.total <= self.device.memory_bytes


def rank(
    task: Task,
    learner: LearnerBase,
    signature: Signature,
    *,
    mesh: MeshShape | None = None,
    num_devices: int | None = None,
    device: str = "tpu_v2",
    activation_dtype: str = "float32",
    compare: Sequence[MeshLayout] = (),
) -> list[Ranked]:
    """Returns legal layouts, the best first; layouts that do not fit into memory come last.

    A single device is one of them. Nothing is allocated, and no device is needed.

    Args:
      task: the task.
      learner: the learner; its slots and accumulation steps affect the cost.
      signature: signature of the global batch.
      mesh: the mesh; None: all meshes of up to three axes over `num_devices`.
      num_devices: number of devices; not needed if a mesh is given.
      device: name of the device type, see `device_types`.
      activation_dtype: as in MeshSharded.Params.
      compare: layouts that the ranking always includes.

    Raises:
      ExecutionError: neither a mesh nor a number of devices is given, the device type is unknown,
        the batch does not divide evenly over the accumulation steps, or DTensor cannot compile a
        loop of the step.
      LayoutError: a layout of `compare` is not legal.
    """
    if mesh is None and num_devices is None:
        raise ExecutionError(
            "a layout search needs a mesh (execution.mesh) or a number of devices (--devices)"
        )
    model, legality = _prepare(task, learner, signature, device, activation_dtype, compare)
    meshes = [mesh] if mesh is not None else list(factorisations(num_devices or 1))
    costs: dict[MeshLayout, Cost] = {}
    for shape in meshes:
        search = _Search(shape, legality, model, limit=MAX_TRIED // len(meshes))
        costs.update(search.costs(may_swap=mesh is not None))
    alone = model.cost(ONE_DEVICE)
    if alone.memory.total <= model.device.memory_bytes:
        costs = {layout: cost for layout, cost in costs.items() if shares_work(layout, cost)}
    if not any(layout.mesh.size == 1 for layout in costs):
        costs[ONE_DEVICE] = alone
    costs.update((layout, model.cost(layout)) for layout in compare)
    return _ranking(costs, compare, model.device)


def shares_work(layout: MeshLayout, cost: Cost) -> bool:
    """Returns whether the devices of a layout do not all compute the whole step."""
    return layout.mesh.size == 1 or cost.redundancy < _WHOLE_STEP * layout.mesh.size


def price(
    task: Task,
    learner: LearnerBase,
    signature: Signature,
    layout: MeshLayout,
    *,
    device: str,
    activation_dtype: str = "float32",
) -> Ranked:
    """Returns one layout with the cost of a step, without a search; the arguments are of `rank`.

    Raises:
      ExecutionError: the device type is unknown, the batch does not divide evenly over the
        accumulation steps, or DTensor cannot compile a loop of the step.
      LayoutError: the layout is not legal.
    """
    model, _ = _prepare(task, learner, signature, device, activation_dtype, [layout])
    cost = model.cost(layout)
    return Ranked(1, layout, cost, model.device, cost, is_asked=True)


def price_replicas(
    task: Task,
    learner: LearnerBase,
    signature: Signature,
    replicas: int,
    *,
    device: str,
    activation_dtype: str = "float32",
) -> Ranked:
    """Returns the cost of a data-parallel step, from the work of one replica.

    Nothing is sharded: every device computes an equal part of the batch with weights of its own.
    So the cost does not depend on the names of dims, which are guessed for some ops.

    Args:
      task: the task.
      learner: as in `rank`.
      signature: signature of the global batch.
      replicas: number of devices.
      device: as in `rank`.
      activation_dtype: type in which layers compute.

    Raises:
      ExecutionError: the device type is unknown, or the batch does not divide evenly over the
        accumulation steps and the devices.
    """
    layout = MeshLayout(MeshShape(((DATA, replicas),)), Rules(()))
    model, _ = _prepare(
        task, learner, signature, device, activation_dtype, [layout], replicas=replicas
    )
    cost = model.cost(layout, packs_gradients=True)
    return Ranked(1, layout, cost, model.device, cost, is_asked=True)


def factorisations(num_devices: int) -> Iterator[MeshShape]:
    """Yields every mesh of up to three axes over `num_devices`: "data", "model", "model2".

    Only "data" may shard the batch. The other two axes are interchangeable, so "model" is never
    smaller than "model2".
    """
    yield MeshShape(((DATA, num_devices),))
    for data in _divisors(num_devices):
        rest = num_devices // data
        yield MeshShape(((DATA, data), (MODEL, rest)))
        for second in _divisors(rest):
            if second * second <= rest:
                yield MeshShape(((DATA, data), (MODEL, rest // second), (MODEL2, second)))


def _divisors(number: int) -> list[int]:
    """Returns the divisors of a number without 1 and the number itself."""
    return [n for n in range(2, number // 2 + 1) if number % n == 0]


def _prepare(
    task: Task,
    learner: LearnerBase,
    signature: Signature,
    device: str,
    activation_dtype: str,
    compare: Sequence[MeshLayout],
    *,
    replicas: int | None = None,
) -> tuple[CostModel, _Legality]:
    """Returns the cost model, and what is legal; checks that the layouts of `compare` are.

    The model is of a mesh, or with `replicas` of data-parallel execution.
    """
    found_device, parts = this_machine.find(device), learner.params.accumulation_steps
    batch, specs = part_of(signature, parts), task.specs()
    weights = alike(specs.values(), trained=learner.trainable(specs))
    work = tracing.trace(
        task, weights, batch,
        activation_dtype=activation_dtype, recomputes_loops=replicas is None, replicas=replicas,
    )  # fmt: skip
    if replicas is None and work.list_loops:
        where = f"execution.{compare[0]}" if compare else "any execution.mesh"
        raise step_errors.lists_of_loop(where, work.list_loops[0])
    model = CostModel(
        work,
        weights,
        alike(learner.slots(specs).values()),
        found_device,
        parts=parts,
        activation_bytes=4 if activation_dtype == "float32" else 2,
    )
    # Data-parallel devices shard nothing, and compute what a mesh refuses.
    trained = learner.trainable(specs).keys()
    constrained = activations.of_task(task, batch, trained=trained) if replicas is None else {}
    dims = _worth_a_rule(specs.values(), constrained)
    legality = _Legality({g.spec.path: g.spec for g in weights}, constrained, dims)
    for layout in compare:
        layout.check(legality.specs, activations=constrained)
    return model, legality


def _worth_a_rule(specs: Iterable[WeightSpec], constrained: Activations) -> list[str]:
    """Returns the dims that may get rules, in their order of appearance in the tensors."""
    sizes: dict[str, int] = {}
    total = 0
    for names, _ in constrained.values():
        sizes |= {dim: -1 for dim in names if dim is not None}
    for spec in specs:
        total += spec.size_bytes
        for dim in dict.fromkeys(spec.dims):
            if dim is not None and sizes.get(dim) != -1:
                sizes[dim] = sizes.get(dim, 0) + spec.size_bytes
    is_small = {dim for dim, size in sizes.items() if 0 <= size < SMALL * total}
    return [dim for dim in sizes if dim not in is_small and dim not in FOLLOWS]


class _Legality:
    """Returns which dims an axis can shard; a set of dims is legal if each pair of them is."""

    def __init__(
        self, specs: dict[str, WeightSpec], constrained: Activations, dims: list[str]
    ) -> None:
        self.specs, self.constrained, self.dims = specs, constrained, dims
        self._known: dict[tuple[tuple[str, ...], int], bool] = {}

    def _allows(self, dims: tuple[str, ...], size: int) -> bool:
        """Returns whether an axis of this size may shard these dims."""
        if (dims, size) not in self._known:
            rules = Rules(tuple((d, DATA) for d in dims))
            layout = MeshLayout(MeshShape(((DATA, size),)), rules)
            problems = layout.problems(self.specs, activations=self.constrained)
            self._known[dims, size] = not problems
        return self._known[dims, size]

    def sets(self, size: int) -> list[tuple[str, ...]]:
        """Returns all sets of dims that an axis of this size may shard, the empty set first."""
        found: list[tuple[str, ...]] = [()]
        for dim in self.dims:
            if not self._allows((dim,), size):
                continue
            found += [
                (*others, dim)
                for others in list(found)
                if all(self._allows((other, dim), size) for other in others)
            ]
        return sorted(found, key=len)


class _Search:
    """The search over the rules of one mesh."""

    def __init__(
        self, mesh: MeshShape, legality: _Legality, model: CostModel, *, limit: int
    ) -> None:
        self._mesh, self._legality, self._model, self._limit = mesh, legality, model, limit
        self._axes = [name for name, size in mesh.axes if size > 1]

    def costs(self, *, may_swap: bool) -> dict[MeshLayout, Cost]:
        """Returns layouts with their costs.

        Args:
          may_swap: whether axes other than "data" may shard the batch. If all meshes are searched,
            another mesh has the same layout with swapped axes.
        """
        sets = {axis: self._legality.sets(self._mesh.size_of(axis)) for axis in self._axes}
        number = math.prod(len(found) for found in sets.values())
        chosen: dict[MeshLayout, Cost] = {}
        rules = [Rules(())]
        for axis in self._axes:
            if number > self._limit and chosen:
                rules = [layout.rules for layout in _best(chosen)]
            rules = [
                Rules((*before.pairs, *((dim, axis) for dim in dims)))
                for before in rules
                for dims in sets[axis]
                if not set(dims) & {dim for dim, _ in before.pairs}
                and (may_swap or axis == DATA or "batch" not in dims)
            ]
            if number > self._limit or axis == self._axes[-1]:
                chosen = self._costs(MeshLayout(self._mesh, r) for r in rules)
        if not self._axes:
            chosen = self._costs([MeshLayout(self._mesh, Rules(()))])
        return chosen | self._costs(
            further
            for layout in _best(chosen)
            for axis in self._axes
            if self._model.unsharded_share(layout, axis) > 0.5
            for further in (
                dataclasses.replace(layout, weights_axis=axis),
                dataclasses.replace(layout, slots_axis=axis),
            )
        )

    def _costs(self, layouts: Iterable[MeshLayout]) -> dict[MeshLayout, Cost]:
        return {layout: self._model.cost(layout) for layout in layouts}


def _best(costs: dict[MeshLayout, Cost]) -> list[MeshLayout]:
    """Returns the fastest layouts, and of the others those with the least memory."""
    fast = sorted(costs, key=lambda layout: costs[layout].seconds)[:KEPT]
    rest = [layout for layout in costs if layout not in set(fast)]
    return fast + sorted(rest, key=lambda layout: costs[layout].memory.total)[:KEPT]


def _ranking(
    costs: dict[MeshLayout, Cost], compare: Iterable[MeshLayout], device: DeviceType
) -> list[Ranked]:
    asked = set(compare)

    def order(layout: MeshLayout) -> Any:
        cost = costs[layout]
        fits = cost.memory.total <= device.memory_bytes
        main = cost.seconds if fits else cost.memory.total
        extras = (layout.weights_axis is not None) + (layout.slots_axis is not None)
        simple = len(layout.rules.pairs) + extras
        return not fits, main, cost.memory.total, layout not in asked, simple

    ordered = sorted(costs, key=order)
    best = costs[ordered[0]]
    ranking: list[Ranked] = []
    seen: set[Any] = set()
    for layout in ordered:
        cost = costs[layout]
        # Layouts of equal cost that differ only in an ineffective rule or in names of axes are
        # listed once.
        sizes = tuple(size for _, size in layout.mesh.axes)
        key = (sizes, cost.seconds, cost.memory.total)
        if key in seen and layout not in asked:
            continue
        seen.add(key)
        place = len(ranking) + 1
        ranking.append(Ranked(place, layout, cost, device, best, layout in asked))
    return ranking
