"""Measures convolutions of a training step on this machine; a program, see `this_machine.py`.

An op of a step with one tower uses all threads. It wakes them, waits for the slowest, and shares
the cores with the op that TensorFlow runs beside it: the gradients of a convolution with respect to
its input and to its filter do not depend on each other. A convolution that is repeated by itself
takes half the time. So these steps train stacks of convolutions with normalization and ReLU, and
the same stacks without the convolutions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.execution.base import signature_of
from tekso.framework.execution.data_parallel import DataParallel
from tekso.framework.initializers import Ones
from tekso.framework.json_text import to_json
from tekso.framework.params import param
from tekso.framework.planning import start_probes
from tekso.framework.planning.start_probes import ProbeTask
from tekso.framework.task import Batch, LossSums
from tekso.framework.theta import Theta

_WARMUP_STEPS = 30
_REPEATS = 60  # of single steps
_LEAST = 0.25  # least share of a convolution's time that its operations take


class LayerStack(NamedTuple):
    """Layers, one after the other: a convolution of 3 × 3 pixels, normalization and ReLU.

    Attributes:
      images: number of images.
      size: height and width of an image.
      channels: number of channels, before and after a convolution.
      layers: number of layers.
    """

    images: int
    size: int
    channels: int
    layers: int

    @property
    def flops(self) -> float:
        """Floating-point operations of a convolution, and of each of its two gradients."""
        return 18.0 * self.images * self.size**2 * self.channels**2

    @property
    def intensity(self) -> float:
        """Operations per byte of input, filter and output."""
        images = self.images * self.size**2 * self.channels
        return self.flops / (4.0 * (2 * images + 9 * self.channels**2))


# No fewer channels than a vector has numbers: the rest of it would be computed for nothing.
FEW, MANY = LayerStack(64, 8, 16, 6), LayerStack(256, 8, 16, 6)
STACKS = (
    LayerStack(8, 32, 16, 3),
    FEW,
    MANY,
    LayerStack(64, 8, 32, 6),
    LayerStack(8, 8, 128, 2),
    LayerStack(64, 16, 64, 1),
)


def main() -> None:
    """Measures this machine; prints {"elapsed" or "cpu": fields of `MachineSpeed`} as JSON."""
    _execution().setup_devices()
    steps = [_step_of(stack, convolves) for stack in STACKS for convolves in (True, False)]
    times = start_probes.typical_times(steps, warmup_steps=_WARMUP_STEPS, repeats=_REPEATS)
    # If more time passes than the threads compute, other programs use the cores.
    seconds = {"cpu": [time.cpu_s for time in times], "elapsed": [min(time) for time in times]}
    print(to_json({name: speeds_of(each[::2], each[1::2]) for name, each in seconds.items()}))


def speeds_of(whole_s: Sequence[float], rest_s: Sequence[float]) -> dict[str, Any]:
    """Returns the fields of `MachineSpeed` for convolutions.

    Args:
      whole_s: time of a step of each of `STACKS`.
      rest_s: the same without convolutions.

    Raises:
      ValueError: no step with convolutions takes longer than that without.
    """
    each_s = {
        stack: max(0.0, whole - rest) / (3 * stack.layers)  # a convolution and two gradients
        for stack, whole, rest in zip(STACKS, whole_s, rest_s, strict=True)
    }
    # MANY takes `ratio` times the operations of FEW at the same speed, and starts as often.
    ratio = MANY.flops / FEW.flops
    start_s = (ratio * each_s[FEW] - each_s[MANY]) / (ratio - 1.0)
    start_s = min(max(0.0, start_s), each_s[FEW])
    # A stack whose convolutions seem to take no time was disturbed, and has no speed.
    speeds = sorted(
        (stack.intensity, stack.flops / max(each - start_s, _LEAST * each))
        for stack, each in each_s.items()
        if stack != FEW and each
    )
    if not speeds:
        raise ValueError("steps with convolutions take no longer than steps without")
    return {"convolution_s": start_s, "convolutions": speeds, "filter_gradients": speeds}


def _execution() -> Any:
    return DataParallel.Params(towers=1, xla="none").instantiate()


def _step_of(stack: LayerStack, convolves: bool) -> Callable[[], float]:
    """Returns a function that trains a step."""
    batch = {"x": np.ones([stack.images, stack.size, stack.size, stack.channels], np.float32)}
    task = _Stacked.Params(channels=stack.channels, num_layers=stack.layers, convolves=convolves)
    program = _execution().build(
        task.instantiate(), start_probes.learner(), seed=0, batch=signature_of(batch)
    )
    return start_probes.training_step(program, batch)


class _Stacked(ProbeTask):
    """The layers of a stack."""

    class Params(ProbeTask.Params):
        """Params of _Stacked."""

        channels: int = param("Channels before and after each layer.", default=1)
        num_layers: int = param("Number of layers.", default=0)
        convolves: bool = param("Whether they contain convolutions.", default=True)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.weight("w", [1], dims=[None], init=Ones.Params())

    def loss(self, theta: Theta, batch: Batch, ctx: StepContext) -> LossSums:
        """See Task."""
        p = self.params
        x = batch["x"] * theta.w
        for i in range(p.num_layers):
            if p.convolves:
                # Different filters, whose gradients are needed.
                filters = tf.fill([3, 3, p.channels, p.channels], (1.0 + 0.1 * i) / 9.0)
                x = tf.nn.conv2d(x, filters * theta.w, 1, "SAME")
            x = x - tf.reduce_mean(x, [0, 1, 2])
            x = tf.nn.relu(x * tf.math.rsqrt(tf.reduce_mean(x * x, [0, 1, 2]) + 1.0) + 1.0)
        return LossSums(tf.reduce_sum(x))
