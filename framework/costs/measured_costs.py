"""Measures the cost of pieces: seconds of forward and backward over a micro-batch on a device.

Pieces that their model declares alike are measured once. The inputs and weights are arbitrary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from tekso.framework.costs.piece_gradients import PieceGradients, piece_gradients
from tekso.framework.costs.piece_traces import PieceTrace, of_each
from tekso.framework.pieces import Flow, Piece
from tekso.framework.primitives.fusion import Fuse, no_fusion
from tekso.framework.signature import Signature, num_examples
from tekso.framework.weight_spec import WeightSpec

REPEATS = 5

Timer = Callable[[], float]
"""Returns seconds since an arbitrary start, like `time.perf_counter`."""


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
