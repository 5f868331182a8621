"""Measures what a mesh needs to start its work; a program, see `mesh_time.py`.

It trains a layer with next to nothing to compute, on logical devices of the CPU. So the CPU time of
a step is that of starts. On D devices it is

    call_s + D (arrays array_s + variables variable_s + ops op_s + collectives collective_s)

Real steps are measured, since their calls are spread over the engine and DTensor. The numbers of
ops and of collectives are those of the graphs that DTensor has compiled. The time that passes in a
collective is the time by which a step with collectives takes longer. The time of the bytes of a
collective is that of sums of large tensors over the devices.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
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
from tekso.framework.planning.start_probes import Equation, Products, ProductsTask
from tekso.framework.step import Step

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
DEEP = Probe(ops=300)  # about 600 with their gradients: few determine the time of one badly
ARRAYS = Probe(arrays=9)
WIDE = Probe(weights=17)
SUMMED = Probe(weights=17, shards=True)

EQUATIONS = (
    Equation("op_s", DEEP, SMALL),
    Equation("array_s", ARRAYS, SMALL),
    Equation("variable_s", WIDE, SMALL),
    Equation("collective_s", SUMMED, WIDE),
)


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
    times = start_probes.typical_times(steps, warmup_steps=_WARMUP_STEPS, repeats=_STEP_REPEATS)
    measured = {
        probe: (time.cpu_s, counts_of(each, count))
        for probe, time, each in zip(probes, times, graphs, strict=True)
    }
    starts = start_probes.solve(measured, EQUATIONS, SMALL)
    elapsed = {probe: time.elapsed_s for probe, time in zip(probes, times, strict=True)}
    collectives = measured[SUMMED][1]["collective_s"] / count  # of a device
    passes = max(0.0, elapsed[SUMMED] - elapsed[WIDE]) / collectives
    starts |= {"collective_elapsed_s": passes, "byte_s": _byte_seconds(mesh, count)}
    print(json.dumps(starts))


def counts_of(graphs: DeviceGraphs, devices: int) -> dict[str, int]:
    """Returns {name of a time: how often all devices together take it in a step}.

    Args:
      graphs: the graphs of a device.
      devices: number of devices.
    """
    return {
        "op_s": devices * graphs.ops(),
        "array_s": devices * graphs.arrays,
        "variable_s": devices * graphs.variables,
        "collective_s": devices * len(graphs.collectives),
    }


def _step(probe: Probe, mesh: Any, devices: int) -> tuple[Callable[[], float], DeviceGraphs]:
    """Returns a function that trains a step, and the graphs of a device."""
    products = Products.Params(num_weights=probe.weights)
    task = _Probed.Params(products=products, num_ops=probe.ops).instantiate()
    rules = Rules((("batch", AXIS),)) if probe.shards else Rules(())
    layout = MeshLayout(MeshShape(((AXIS, devices),)), rules)
    step = Step(task, start_probes.learner(), seed=0)
    program = MeshProgram(step, Placement(mesh), layout)
    train = start_probes.training_step(program, start_probes.batch(probe.arrays))
    compiled = compiled_by(program, train)
    variables = len(step.specs.weights) + len(step.specs.slots)
    return train, device_graphs(compiled, variables=variables, arrays=probe.arrays)


def _byte_seconds(mesh: Any, devices: int) -> float:
    """Returns the CPU time of a device for a byte of a tensor that is summed over all devices."""
    sizes = (_LARGE // 2, _LARGE)
    calls = [_sums(mesh, devices, n, dim) for n in sizes for dim in (0, 1)]
    small, small_alone, large, large_alone = _seconds(calls)
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


def _seconds(calls: Sequence[Callable[[], Any]]) -> list[float]:
    return start_probes.mean_seconds(calls, warmup_steps=_WARMUP_STEPS, repeats=_REPEATS)


class _Probed(ProductsTask):
    """Products, and further ops."""

    class Params(ProductsTask.Params):
        """Params of _Probed."""

        num_ops: int = param("Number of further ops of the forward pass.", default=0)

    def further(self, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """See ProductsTask."""
        for _ in range(self.params.num_ops):
            x = tf.tanh(x)
        return x
