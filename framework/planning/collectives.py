"""Counts the collectives of a training step on a mesh, in the compiled program.

compiled_step.py compiles it for a mesh of any size, as for CPU and GPU meshes. There DTensor
implements a reduce-scatter by an all-reduce. It implements an all-gather by summing zero-padded
shards, which is counted as an all-gather (partitioned_program.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from tekso.framework.execution.mesh.layouts import MeshLayout, MeshShape
from tekso.framework.learning_step import LearnerBase
from tekso.framework.planning.compiled_step import CompiledStep, compiled_step
from tekso.framework.planning.partitioned_program import Exchange, PartitionedProgram
from tekso.framework.planning.rings import CollectiveCost
from tekso.framework.signature import Signature
from tekso.framework.step import Step
from tekso.framework.task import Task

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "permute", "broadcast")


@dataclasses.dataclass(frozen=True)
class Collective:
    """All collectives of one kind over one axis in a step.

    Attributes:
      kind: one of KINDS, or of a pipeline without a mesh "send": a device gets gradients from other
        replicas, and sends weights to them.
      axis: the mesh axis of the collective; "data+model" for two axes at once; "replica" of sends.
      count: number of tensors exchanged in a step.
      bytes: bytes of these tensors on one device. all-reduce: the tensor that is reduced;
        all-gather: the result; reduce-scatter: the tensor before it is scattered; all-to-all and
        permute: the device's shard.
    """

    kind: str
    axis: str
    count: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class StepCollectives:
    """All collectives of a step.

    Attributes:
      collectives: sums by axis and kind.
      unknown_loops: loops whose number of iterations cannot be read from the program; they are
        counted as one iteration.
    """

    collectives: tuple[Collective, ...]
    unknown_loops: tuple[str, ...] = ()


def of_step(
    task: Task,
    learner: LearnerBase,
    layout: MeshLayout,
    batch: Signature,
    *,
    activation_dtype: str = "float32",
) -> StepCollectives:
    """Returns the collectives of a training step; allocates no tensors.

    The step is compiled in this process, as before the first step of training.

    Args:
      task: the task.
      learner: the learner.
      layout: mesh and rules; must be legal.
      batch: shape and dtype of every array of the global batch.
      activation_dtype: as in MeshSharded.Params.

    Raises:
      ExecutionError: DTensor cannot compile the step for this layout.
    """
    step = Step(task, learner, seed=0, dtype=activation_dtype)
    return of_compiled(compiled_step(step, layout, batch), layout.mesh)


def of_compiled(compiled: CompiledStep, mesh: MeshShape) -> StepCollectives:
    """Returns the collectives of a compiled step."""
    program = PartitionedProgram(compiled.functions.__getitem__, mesh)
    found: list[Exchange] = []
    for name, times in compiled.times.items():
        found += program.exchanges(name, times=times)
    return _summed(found, mesh, tuple(program.unknown_loops))


def of_costs(costs: Iterable[CollectiveCost]) -> tuple[Collective, ...]:
    """Returns the collectives of a cost model, summed by axis and kind."""
    sums: dict[tuple[str, str], tuple[int, float]] = {}
    for cost in costs:
        key = cost.kind, _axis(cost.axes)
        count, num_bytes = sums.get(key, (0, 0.0))
        sums[key] = count + cost.count, num_bytes + cost.bytes
    return tuple(Collective(*key, count, round(size)) for key, (count, size) in sums.items())


def _axis(axes: Iterable[str]) -> str:
    return "+".join(axes)


def _summed(
    found: list[Exchange], mesh: MeshShape, unknown_loops: tuple[str, ...]
) -> StepCollectives:
    sums: dict[tuple[tuple[str, ...], str], tuple[int, int]] = {}
    for one in found:
        count, num_bytes = sums.get((one.axes, one.kind), (0, 0))
        sums[one.axes, one.kind] = (count + one.times, num_bytes + one.times * one.bytes)
    place = {axis: i for i, axis in enumerate(mesh.names)}
    order: Callable[[Any], Any] = lambda key: (  # noqa: E731
        len(key[0]), [place[axis] for axis in key[0]], KINDS.index(key[1])
    )  # fmt: skip
    return StepCollectives(
        tuple(Collective(key[1], _axis(key[0]), *sums[key]) for key in sorted(sums, key=order)),
        unknown_loops=unknown_loops,
    )
