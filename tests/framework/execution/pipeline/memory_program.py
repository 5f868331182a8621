"""Trains a pipeline that is nearly all weights, and prints how much more a step takes; JSON.

weights  bytes of all weights
more     bytes at the peak of two steps, above those of weights and slots
held     bytes of tensors between two steps; null: TensorFlow has no statistics here
"""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["TF_ENABLE_ONEDNN_OPTS"] = "1"  # whose allocator has statistics

import numpy as np
import tensorflow as tf

from tekso.framework.execution import Pipelined
from tekso.framework.execution.base import signature_of
from tekso.framework.initializers import Zeros
from tekso.framework.layer import Layer
from tekso.framework.learner import Learner
from tekso.framework.optimizers.adam import Adam
from tekso.framework.pieces import LOSS_SUM, METRICS, Flow, Piece
from tekso.framework.schedules import Constant
from tekso.framework.task import Task
from tekso.framework.theta import Theta

DIM, LAYERS = 1024, 48


class Product(Layer):
    """y = x w."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.weight("w", [DIM, DIM], dims=("in", "embed"), init=Zeros.Params())


class Products(Task):
    """Products one after the other, of four examples."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child_list("layers", [Product.Params()] * LAYERS)

    def loss_weight(self, batch: Any) -> tf.Tensor:
        return tf.cast(tf.shape(batch["x"])[0], tf.float32)

    def pieces(self) -> list[Piece]:
        def product(i: int) -> Any:
            def run(theta: Theta, flow: Flow, ctx: Any) -> Flow:
                return {**flow, "x": flow["x"] + flow["x"] @ theta.layers[str(i)].w}

            return run

        def last(theta: Theta, flow: Flow, ctx: Any) -> Flow:
            return {**flow, LOSS_SUM: tf.reduce_sum(flow["x"]), METRICS: {}}

        layers = enumerate(self.layers)
        found = [Piece(f"layers/{i}", {f"layers/{i}": layer}, product(i)) for i, layer in layers]
        return [*found, Piece("last", {}, last)]


def memory(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition(f"{name}:")[2].split()[0])


def held() -> int | None:
    try:
        return int(tf.config.experimental.get_memory_info("CPU:0")["current"])
    except ValueError:  # no statistics
        return None


def main() -> None:
    """See the module."""
    execution = Pipelined.Params(num_stages=2, num_micro_batches=2).instantiate()
    execution.setup_devices()
    learner = Learner.Params(optimizer=Adam.Params(), schedule=Constant.Params(value=1e-6))
    batch = {"x": np.ones((4, DIM), np.float32)}
    program = execution.build(
        Products.Params().instantiate(), learner.instantiate(), seed=1, batch=signature_of(batch)
    )
    # Memory that is all zeros may not be there yet. With larger numbers, the loss would not be
    # finite, and a skipped step keeps the arrays of this program.
    specs = program.specs()
    program.restore(lambda key: np.full(specs[key].shape, 1e-4, specs[key].dtype), set(specs))
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that from now on
    before = memory("VmRSS")
    for step in range(2):
        assert program.train_step(batch, step)["nonfinite_total"] == 0
    weights = LAYERS * DIM * DIM * 4
    print(json.dumps({"weights": weights, "more": memory("VmHWM") - before, "held": held()}))


if __name__ == "__main__":
    main()
