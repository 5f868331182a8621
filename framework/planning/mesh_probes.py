"""Measures what a mesh needs to start its work; a program, see `mesh_time.py`.

It trains a layer with next to nothing to compute, on logical devices of the CPU. So the CPU time of
a step is that of starts. On D devices it is

    call_s + D (arrays array_s + variables variable_s + ops op_s + collectives collective_s)

Real steps are measured, since their calls are spread over the engine and DTensor. The numbers of
ops and of collectives are those of the graphs that DTensor has compiled. The time of the bytes of a
collective is that of sums of large tensors over the devices.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.experimental import dtensor

from tekso.framework.context import StepContext
from tekso.framework.execution.mesh.layouts import MeshLayout, MeshShape, Rules
from tekso.framework.execution.mesh.placement import Placement
from tekso.framework.execution.mesh.program import MeshProgram
from tekso.framework.execution.mesh_sharded import MeshSharded
from tekso.framework.params import param
from tekso.framework.planning import start_probes
from tekso.framework.planning.compiled_step import compiled_by
from tekso.framework.planning.mesh_graphs import DeviceGraphs, device_graphs
from tekso.framework.planning.start_probes import Products
from tekso.framework.step import Step
from tekso.framework.task import Batch, LossSums, Task
from tekso.framework.theta import Theta

AXIS = "x"
_REPEATS = 6  # of collectives
_STEP_REPEATS = 60  # of single steps
_WARMUP_STEPS = 100  # after which TensorFlow knows the ops that are too short for another thread
_SUMS = 8  # collectives in a call
_LARGE = 1 << 18  # elements of a large tensor


class Probe(NamedTuple):
    """A task of the probes.

    Attributes:
      weights: number of its weights.
      ops: number of further ops of its forward pass.
      shards: whether the batch is sharded over the devices.
      arrays: number of arrays of a batch.
    """

    weights: int = 1
    ops: int = 0
    shards: bool = False
    arrays: int = 1


SMALL = Probe()
DEEP = Probe(ops=150)
ARRAYS = Probe(arrays=9)
WIDE = Probe(weights=17)
SUMMED = Probe(weights=17, shards=True)

EQUATIONS = (
    ("op_s", DEEP, SMALL),
    ("array_s", ARRAYS, SMALL),
    ("variable_s", WIDE, SMALL),
    ("collective_s", SUMMED, WIDE),
)
"""(unknown, a step that has more of it, a step that has less)."""


def main(devices: str) -> None:
    """Measures meshes of a number of devices; prints the fields of `MeshStarts` as JSON."""
    count = int(devices)
    execution = MeshSharded.Params(mesh=f"{AXIS}:{count}").instantiate()
    execution.setup_devices(cpu_devices=count)
    mesh = dtensor.create_mesh(
        [(AXIS, count)], devices=[d.name for d in tf.config.list_logical_devices("CPU")][:count]
    )
    probes = (SMALL, DEEP, ARRAYS, WIDE, SUMMED)
    steps, graphs = zip(*(_step(probe, mesh, count) for probe in probes), strict=True)
    seconds = start_probes.typical_seconds(steps, warmup_steps=_WARMUP_STEPS, repeats=_STEP_REPEATS)
    measured = zip(probes, zip(seconds, map(counts_of, graphs), strict=True), strict=True)
    print(json.dumps({**starts_of(dict(measured), count), "byte_s": _byte_seconds(mesh, count)}))


def counts_of(graphs: DeviceGraphs) -> dict[str, int]:
    """Returns {name of a time: how often a device takes it in a step}."""
    return {
        "op_s": graphs.ops(),
        "array_s": graphs.arrays,
        "variable_s": graphs.variables,
        "collective_s": len(graphs.collectives),
    }


def starts_of(
    measured: Mapping[Probe, tuple[float, Mapping[str, int]]], devices: int
) -> dict[str, float]:
    """Returns the fields of `MeshStarts`, without the bytes of collectives.

    Args:
      measured: {probe: (seconds of a step, `counts_of` a device)}.
      devices: number of devices.
    """
    of_all = {
        probe: (seconds, {name: devices * number for name, number in counts.items()})
        for probe, (seconds, counts) in measured.items()
    }
    return start_probes.solved(of_all, EQUATIONS, SMALL)


def _step(probe: Probe, mesh: Any, devices: int) -> tuple[Callable[[], None], DeviceGraphs]:
    """Returns a function that trains a step, and the graphs of a device."""
    task = _Probed.Params(num_weights=probe.weights, num_ops=probe.ops).instantiate()
    rules = Rules((("batch", AXIS),)) if probe.shards else Rules(())
    layout = MeshLayout(MeshShape(((AXIS, devices),)), rules)
    step = Step(task, start_probes.learner(), seed=0)
    program = MeshProgram(step, Placement(mesh), layout)
    program.initialize()
    (x,) = start_probes.batch().values()
    batch = {"x": x, **{f"x{i}": x for i in range(1, probe.arrays)}}

    def train() -> None:
        float(program.train_step(batch, 1)["loss"])

    compiled = compiled_by(program, train)
    variables = len(step.specs.weights) + len(step.specs.slots)
    return train, device_graphs(compiled, variables, arrays=probe.arrays)


def _byte_seconds(mesh: Any, devices: int) -> float:
    """Returns the CPU time of a device for a byte of a tensor that is summed over all devices."""
    sizes = (_LARGE // 2, _LARGE)
    calls = [_sums(mesh, devices, n, dim) for n in sizes for dim in (0, 1)]
    small, small_alone, large, large_alone = _least(calls)
    more = (large - large_alone) - (small - small_alone)
    return max(0.0, more / (devices * _SUMS * 4 * (sizes[1] - sizes[0])))


def _sums(mesh: Any, devices: int, elements: int, dim: int) -> Callable[[], Any]:
    """Returns a function that sums tensors over a dim of a single element on each device.

    Dim 0 is sharded, so its sum is all-reduced; the sum over dim 1 is computed without a
    collective.
    """
    sharded = dtensor.Layout([AXIS, dtensor.UNSHARDED, dtensor.UNSHARDED], mesh)
    shards = [tf.ones([1, 1, elements]) for _ in range(devices)]
    arrays = [dtensor.pack(shards, sharded) for _ in range(_SUMS)]
    after = dtensor.Layout([dtensor.UNSHARDED if dim == 0 else AXIS, dtensor.UNSHARDED], mesh)

    def sums(arrays: Any) -> Any:
        return [dtensor.relayout(tf.reduce_sum(x, dim), after) for x in arrays]

    call = tf.function(sums, autograph=False)
    return lambda: [dtensor.unpack(y)[0].numpy() for y in call(arrays)]


def _least(calls: Sequence[Callable[[], Any]]) -> list[float]:
    return start_probes.least_seconds(calls, warmup_steps=_WARMUP_STEPS, repeats=_REPEATS)


class _Probed(Task):
    """Products, and further ops."""

    class Params(Task.Params):
        """Params of _Probed."""

        num_weights: int = param("Number of weights.", default=1)
        num_ops: int = param("Number of further ops of the forward pass.", default=0)

    products: Products

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child("products", Products.Params(num_weights=self.params.num_weights))

    def loss_weight(self, batch: Batch) -> Any:
        """See Task."""
        return tf.cast(tf.shape(batch["x"])[0], tf.float32)

    def loss(self, theta: Theta, batch: Batch, ctx: StepContext) -> LossSums:
        """See Task."""
        x = self.products.fprop(theta.products, batch["x"], ctx)
        for name in sorted(batch.keys() - {"x"}):
            x = x + batch[name]
        for _ in range(self.params.num_ops):
            x = tf.tanh(x)
        return LossSums(tf.reduce_sum(x))
