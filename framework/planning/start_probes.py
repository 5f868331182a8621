"""What the probes that train real steps share: tasks, a batch, a learner, the clock, equations.

The tasks compute next to nothing, so the CPU time of a step is that of starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.execution.base import ExecutionProgram
from tekso.framework.initializers import Ones
from tekso.framework.layer import Layer
from tekso.framework.learner import Learner
from tekso.framework.optimizers.adam import Adam
from tekso.framework.params import param
from tekso.framework.schedules import Constant
from tekso.framework.task import Batch, LossSums, Task
from tekso.framework.theta import Theta

Probe = TypeVar("Probe")  # what determines a step

_EXAMPLES, _WIDTH = 64, 4
_STEPS = 8  # in a row, of which the mean is measured
_PAUSE_S = 2e-3  # before a step; about as long as a small batch takes to make


class StepTimes(NamedTuple):
    """The measured time of a step.

    Attributes:
      cpu_s: CPU time of all threads.
      elapsed_s: time that passes.
    """

    cpu_s: float
    elapsed_s: float


class Equation(NamedTuple, Generic[Probe]):
    """An unknown time, which is found from the difference of two steps.

    Attributes:
      unknown: name of the time.
      more: a step that takes it more often.
      less: a step that takes it less often.
    """

    unknown: str
    more: Probe
    less: Probe


def batch(arrays: int = 1) -> dict[str, Any]:
    """Returns a batch for `ProductsTask`: "x", "x1", … of shape [64, 4]."""
    x = np.ones([_EXAMPLES, _WIDTH], np.float32)
    return {"x": x, **{f"x{i}": x for i in range(1, arrays)}}


def learner() -> Learner:
    """Returns a learner with two slots per weight."""
    params = Learner.Params(optimizer=Adam.Params(), schedule=Constant.Params(value=0.1))
    found: Learner = params.instantiate()
    return found


def training_step(program: ExecutionProgram, batch: Batch) -> Callable[[], float]:
    """Initializes a program; returns a function that trains a step and returns its loss."""
    program.initialize()
    return lambda: float(program.train_step(batch, 1)["loss"])


def mean_seconds(
    calls: Sequence[Callable[[], Any]], *, warmup_steps: int, repeats: int
) -> list[float]:
    """Returns the CPU time of each function: the mean of several steps, the median of such means.

    Args:
      calls: the functions; a call is a step. They are measured in turns.
      warmup_steps: number of calls of each before it is measured.
      repeats: number of turns.
    """
    _warm_up(calls, warmup_steps)
    return [float(x) for x in np.median(_turns(calls, repeats, _STEPS)[..., 0], axis=0)]


def typical_times(
    calls: Sequence[Callable[[], Any]],
    *,
    warmup_steps: int,
    repeats: int,
    pause: Callable[[], None] = lambda: time.sleep(_PAUSE_S),
) -> list[StepTimes]:
    """Returns the times of a usual step of each function: the median of several.

    A pause precedes each step, as in training, where a step waits for its batch. TensorFlow's
    threads fall asleep in it, so a small step takes longer than right after another one. The least
    time of a step is far below that of most steps, because threads that wait for ops sometimes
    sleep and sometimes do not.

    Args:
      calls: the functions; a call is a step. They are measured in turns, step by step.
      warmup_steps: number of calls of each before it is measured.
      repeats: number of turns.
      pause: waits before each step.
    """
    _warm_up(calls, warmup_steps)
    middle = np.median(_turns(calls, repeats, 1, pause), axis=0)
    return [StepTimes(float(cpu), float(elapsed)) for cpu, elapsed in middle]


def solve(
    measured: Mapping[Probe, tuple[float, Mapping[str, float]]],
    equations: Sequence[Equation[Probe]],
    smallest: Probe,
) -> dict[str, float]:
    """Returns {unknown: seconds}, and as "call_s" what is left of the smallest step.

    It solves one equation after the other, so that noise makes no time negative.

    Args:
      measured: {step: (seconds, {name of a time: how often the step takes it})}.
      equations: an unknown counts in all equations after its own.
      smallest: the step that has least of all.
    """
    found: dict[str, float] = {}

    def rest(probe: Probe) -> float:
        seconds, counts = measured[probe]
        return seconds - sum(counts[name] * each for name, each in found.items())

    for name, more, less in equations:
        number = measured[more][1][name] - measured[less][1][name]
        found[name] = max(0.0, (rest(more) - rest(less)) / number)
    return {**found, "call_s": max(0.0, rest(smallest))}


def _warm_up(calls: Sequence[Callable[[], Any]], steps: int) -> None:
    for call in calls:
        for _ in range(steps):
            call()


def _turns(
    calls: Sequence[Callable[[], Any]],
    repeats: int,
    steps: int,
    pause: Callable[[], None] = lambda: None,
) -> Any:
    """Returns the seconds of a step, the mean of several: [turn, function, CPU or elapsed]."""
    found = np.zeros([repeats, len(calls), 2])
    for turn in found:
        for i, call in enumerate(calls):
            pause()
            start = _now()
            for _ in range(steps):
                call()
            turn[i] = (_now() - start) / steps
    return found


def _now() -> Any:
    return np.array([time.process_time(), time.perf_counter()])


class Products(Layer):
    """Multiplies by its weights.

    Shapes:
      x: [batch, 4]
      returns: [batch, 4]
    Weights:
      w0, w1, …: [4]
    """

    class Params(Layer.Params):
        """Params of Products."""

        num_weights: int = param("Number of weights.", default=1)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for i in range(self.params.num_weights):
            self.weight(f"w{i}", [_WIDTH], dims=["embed"], init=Ones.Params())

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """See Layer."""
        for i in range(self.params.num_weights):
            x = x * theta[f"w{i}"]
        return x


class ProbeTask(Task):
    """A task whose loss is a sum over the examples "x".

    Shapes:
      x: [batch, ...]
    """

    def loss_weight(self, batch: Batch) -> Any:
        """See Task."""
        return tf.cast(tf.shape(batch["x"])[0], tf.float32)


class ProductsTask(ProbeTask):
    """Multiplies "x" by weights, adds all other arrays of a batch, and sums up the result.

    Shapes:
      x: [batch, 4], and the same for all other arrays
    """

    class Params(ProbeTask.Params):
        """Params of ProductsTask."""

        products: Products.Params = param("The weights.", default=Products.Params())

    products: Products

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child("products", self.params.products)

    def loss(self, theta: Theta, batch: Batch, ctx: StepContext) -> LossSums:
        """See Task."""
        x = self.products.fprop(theta.products, batch["x"], ctx)
        for name in sorted(batch.keys() - {"x"}):
            x = x + batch[name]
        return LossSums(tf.reduce_sum(self.further(x, ctx)))

    def further(self, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """Returns what is summed up; subclasses compute more. [batch, 4] → [batch, …]."""
        return x
