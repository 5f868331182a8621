"""Measures the fixed costs of a training step on this machine; a program, see `this_machine.py`.

It trains tasks that compute next to nothing, by data-parallel execution on one device. So the CPU
time of a step is the sum of its fixed costs:

    call_s + arrays array_s + variables variable_s + ops op_s + products product_s
    + convolutions convolution_s + clusters cluster_s + arguments argument_s + loops loop_s

An op that is repeated alone would take less time than in a step, where caches also hold the code of
other ops, and ops are handed to other threads. Products, convolutions and clusters start between
ops that compute, so the probes of their starts use more memory between any two than the cache of a
core holds. The numbers of arrays, variables, ops and so on are counted in the graphs with which a
step is planned, so the times fit what the plan counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.costs import this_machine
from tekso.framework.costs.this_machine import OF_STEP, STARTS, ThisMachine
from tekso.framework.execution.base import signature_of
from tekso.framework.execution.data_parallel import DataParallel
from tekso.framework.json_text import to_json
from tekso.framework.params import param
from tekso.framework.planning import start_probes
from tekso.framework.planning.start_probes import Equation, Products, ProductsTask
from tekso.framework.run import step_graphs
from tekso.framework.step import Step
from tekso.framework.task import Task

_WARMUP_STEPS = 100  # after which TensorFlow knows the ops that are too short for another thread
_REPEATS = 150  # of single steps
_ITERATIONS = 64  # of a loop that XLA compiles
_INPUTS, _OUTPUTS = 7, 3  # of a cluster with many arguments, as an update by Adam has
_TIMES = 8  # repetitions of what starts between ops that compute
_BETWEEN = (2, 1 << 18)  # these ops, of arrays of so many elements


class StepProbe(NamedTuple):
    """A step of the probes.

    Attributes:
      weights: number of weights.
      arrays: number of arrays of a batch.
      repeated: what the forward pass repeats; a method of `_Probed`.
      times: how often.
      apart: whether ops on large arrays run between any two repetitions.
      xla: as in `DataParallel.Params`.
    """

    weights: int = 1
    arrays: int = 1
    repeated: str = ""
    times: int = 0
    apart: bool = False
    xla: Literal["none", "clusters"] = "none"


SMALL = StepProbe()
DEEP = StepProbe(repeated="op", times=150)
ARRAYS = StepProbe(arrays=9)
WIDE = StepProbe(weights=17)
APART = StepProbe(repeated="nothing", times=_TIMES, apart=True)
PRODUCTS = StepProbe(repeated="product", times=_TIMES, apart=True)
CONVOLUTIONS = StepProbe(repeated="convolution", times=_TIMES, apart=True)
CLUSTERS = StepProbe(repeated="cluster", times=_TIMES, apart=True, xla="clusters")
ARGUMENTS = StepProbe(repeated="large_cluster", times=_TIMES, apart=True, xla="clusters")
LOOPS = StepProbe(repeated="loop", times=2, xla="clusters")

EQUATIONS = (
    Equation("op_s", DEEP, SMALL),
    Equation("array_s", ARRAYS, SMALL),
    Equation("variable_s", WIDE, SMALL),
    Equation("product_s", PRODUCTS, APART),
    Equation("convolution_s", CONVOLUTIONS, APART),
    Equation("argument_s", ARGUMENTS, CLUSTERS),  # which has as many clusters
    Equation("cluster_s", CLUSTERS, APART),
    Equation("loop_s", LOOPS, SMALL),
)


def main() -> None:
    """Measures this machine; prints {name of a time: seconds} as JSON."""
    DataParallel.Params().instantiate().setup_devices()
    probes = list(dict.fromkeys(probe for _, *both in EQUATIONS for probe in both))
    times = start_probes.typical_times(
        [step_of(probe) for probe in probes], warmup_steps=_WARMUP_STEPS, repeats=_REPEATS
    )
    measured = {
        probe: (time.cpu_s, counts_of(graphs_of(probe)))
        for probe, time in zip(probes, times, strict=True)
    }
    print(to_json(start_probes.solve(measured, EQUATIONS, SMALL)))


def counts_of(graphs: step_graphs.StepGraphs) -> dict[str, int]:
    """Returns {name of a time: how often a step takes it}, as its plan counts it."""
    names = (*OF_STEP, *STARTS)
    return {name: round(graphs.step_time(_machine({name: 1.0})).core_seconds) for name in names}


def _machine(times: Mapping[str, float]) -> ThisMachine:
    """Returns a machine that takes these times, and none to compute."""
    speed = this_machine.only(**{name: times.get(name, 0.0) for name in STARTS})
    return ThisMachine(speed, speed, speed, *(times.get(name, 0.0) for name in OF_STEP))


def step_of(probe: StepProbe) -> Callable[[], float]:
    """Returns a function that trains a step."""
    batch, execution = start_probes.batch(probe.arrays), _execution(probe).instantiate()
    program = execution.build(
        _task(probe), start_probes.learner(), seed=0, batch=signature_of(batch)
    )
    return start_probes.training_step(program, batch)


def graphs_of(probe: StepProbe) -> step_graphs.StepGraphs:
    """Returns the graphs of a step, as its plan traces them."""
    step = Step(_task(probe), start_probes.learner(), seed=0)
    batch = signature_of(start_probes.batch(probe.arrays))
    return step_graphs.trace(step, batch, _execution(probe))


def _execution(probe: StepProbe) -> DataParallel.Params:
    return DataParallel.Params(xla=probe.xla)


def _task(probe: StepProbe) -> Task:
    found: Task = _Probed.Params(
        products=Products.Params(num_weights=probe.weights),
        repeated=probe.repeated,
        times=probe.times,
        apart=probe.apart,
    ).instantiate()
    return found


class _Probed(ProductsTask):
    """Products, and something that is repeated."""

    class Params(ProductsTask.Params):
        """Params of _Probed."""

        repeated: str = param("A method of the task.", default="")
        times: int = param("How often.", default=0)
        apart: bool = param("Whether ops on large arrays run between.", default=False)

    def further(self, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """See ProductsTask."""
        count, size = _BETWEEN if self.params.apart else (0, 1)
        large = [tf.fill([size], tf.stop_gradient(x)[0, 0] + i) for i in range(2)]
        for i in range(self.params.times):
            x = getattr(self, self.params.repeated)(x, i, ctx)
            for _ in range(count):
                with tf.control_dependencies([x]):
                    large = [large[1], large[1] - large[0]]  # into an array of its own
                with tf.control_dependencies(large):
                    x = tf.identity(x)
        return x

    def nothing(self, x: tf.Tensor, i: int, ctx: StepContext) -> tf.Tensor:
        """[…] → the same shape."""
        return x

    # Products and clusters differ for each i, so that each has code of its own, as in a model.

    def op(self, x: tf.Tensor, i: int, ctx: StepContext) -> tf.Tensor:
        """[…] → the same shape."""
        return tf.tanh(x)

    def product(self, x: tf.Tensor, i: int, ctx: StepContext) -> tf.Tensor:
        """[batch, n] → [batch, n + 1], with a bias."""
        n = x.shape[-1]
        return tf.nn.bias_add(tf.matmul(x, tf.ones([n, n + 1])), tf.ones([n + 1]))

    def convolution(self, x: tf.Tensor, i: int, ctx: StepContext) -> tf.Tensor:
        """[batch, 4] → the same shape, with a gradient of the filter."""
        images = tf.reshape(x, [-1, 1, 1, 4]) * tf.ones([2, 2, 1])
        filters = tf.ones([3, 3, 4, 4]) * x[0]
        return tf.reduce_mean(tf.nn.conv2d(images, filters, 1, "SAME"), [1, 2])

    def cluster(self, x: tf.Tensor, i: int, ctx: StepContext) -> tf.Tensor:
        """[…] → the same shape, without a gradient."""
        given = tf.stop_gradient(x)
        return x + ctx.fuse(_scaled, factor=1.0 + 0.1 * i)(given)

    def large_cluster(self, x: tf.Tensor, i: int, ctx: StepContext) -> tf.Tensor:
        """[…] → the same shape, without a gradient."""
        given = [tf.stop_gradient(x)] * _INPUTS
        return x + ctx.fuse(_mixed, factor=1.0 + 0.1 * i)(*given)[-1]

    def loop(self, x: tf.Tensor, i: int, ctx: StepContext) -> tf.Tensor:
        """[…] → the same shape."""
        return x + ctx.fuse(_looped, factor=1.0 + 0.1 * i)(tf.stop_gradient(x))


def _scaled(x: tf.Tensor, *, factor: float) -> tf.Tensor:
    return tf.tanh(x * factor)


def _mixed(*given: tf.Tensor, factor: float) -> list[tf.Tensor]:
    return [tf.add_n(given) * (factor + i) for i in range(_OUTPUTS)]


def _looped(x: tf.Tensor, *, factor: float) -> tf.Tensor:
    def body(i: tf.Tensor, x: tf.Tensor) -> Any:
        for _ in range(2):
            x = tf.tanh(factor * x - tf.reduce_sum(x * x, -1, keepdims=True))
        return i + 1, x

    return tf.while_loop(
        lambda i, _: i < _ITERATIONS, body, (tf.constant(0), x), maximum_iterations=_ITERATIONS
    )[1]
