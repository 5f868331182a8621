"""The cost of a piece, by which a model is partitioned: seconds of forward and backward.

It is estimated from what the piece computes, or measured on a device, where pieces that their model
declares alike are measured once, with arbitrary inputs and weights. Only the ratios of costs are
used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from tekso.framework.costs import device_types
from tekso.framework.costs.piece_gradients import PieceGradients, piece_gradients
from tekso.framework.costs.piece_traces import PieceTrace, of_each
from tekso.framework.pieces import Flow, Piece
from tekso.framework.primitives.fusion import Fuse, no_fusion
from tekso.framework.signature import Signature, num_examples
from tekso.framework.weight_spec import WeightSpec

BACKWARD_COST = 2.0  # of the forward pass: both factors of every product get a gradient
REPEATS = 5

Timer = Callable[[], float]
"""Returns seconds since an arbitrary start, like `time.perf_counter`."""


def cost_of(trace: PieceTrace) -> float:
    """Returns the estimated seconds of forward and backward over a micro-batch on a CPU.

    Operations and moved bytes are weighted as for the device type `cpu`.
    """
    cpu = device_types.find("cpu")
    flops_per_s = cpu.flops_per_s["float32"] * cpu.reached
    forward = trace.flops / flops_per_s + trace.bytes_moved / cpu.memory_bytes_per_s
    return (1.0 + BACKWARD_COST) * forward


def measured_costs(
    pieces: Sequence[Piece],
    traces: Sequence[PieceTrace],
    specs: Mapping[str, WeightSpec],
    batch: Signature,
    *,
    device: str | None,
    timer: Timer = time.perf_counter,
    fuse: Fuse = no_fusion,
) -> list[float]:
    """Returns for each piece the shortest time of `REPEATS` runs, after one warm-up run.

    Args:
      pieces: the pieces of the task, in order.
      traces: their traces.
      specs: specs of all weights of the task; the weights of a piece exist only during its runs.
      batch: signature of a micro-batch.
      device: name of the device; None: TensorFlow's choice.
      timer: called before and after every run.
      fuse: compiles elementwise clusters.
    """

    def find(piece: Piece, trace: PieceTrace, own: Mapping[str, WeightSpec], given: Flow) -> float:
        learned = {path for path, spec in own.items() if spec.trainable}
        both = piece_gradients(piece, own, learned, given, trace, num_examples(batch), fuse=fuse)
        with tf.device(device):
            return _least_seconds(both, timer)

    return of_each(pieces, traces, specs, batch, find)


def _least_seconds(both: PieceGradients, timer: Timer) -> float:
    specs = [*both.weights, *both.inputs, *both.seeds]
    values = [_value(spec, number) for number, spec in enumerate(specs)]

    def whole(*flat: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([t for each in both.function(*flat) for t in each]):
            return tf.identity(flat[-1])

    run = tf.function(whole, autograph=False)
    run(*values).numpy()  # traces the function
    times = []
    for _ in range(REPEATS):
        start = timer()
        run(*values).numpy()
        times.append(timer() - start)
    return min(times)


def _value(spec: tf.TensorSpec, number: int) -> tf.Tensor:
    if not spec.dtype.is_floating:
        return tf.zeros(spec.shape, spec.dtype)
    return tf.cast(0.05 * tf.random.stateless_normal(spec.shape, seed=[number, 0]), spec.dtype)
