"""Trains a model on one device and in pipelines, and prints what came out of each; for tests.

All pipelines of a call are in one process, on eight logical devices.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path

from tekso.framework import ops

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework.execution import DataParallel, Pipelined, devices
from tekso.framework.execution.base import signature_of
from tekso.framework.initializers import Normal
from tekso.framework.layer import Layer
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import Momentum
from tekso.framework.params import param
from tekso.framework.pieces import LOSS_SUM, METRICS, Flow, Piece, rows_of_stack
from tekso.framework.schedules import Constant
from tekso.framework.task import Task
from tekso.framework.theta import Theta
from tekso.models.layers.normalization import BatchNorm
from tekso.models.layers.stack import RepeatedStack, Stack

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import small_models
from traced_calls import call_traced, op_by_op

DIM, CLASSES = 6, 3


class Block(Layer):
    """y = x + tanh(x w) in float64, with dropout."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        init = Normal.Params(stddev=0.5)
        self.weight("w", [DIM, DIM], dims=("in", "embed"), init=init, dtype="float64")

    def fprop(self, theta: Theta, x: Any, ctx: Any) -> Any:
        return x + ops.dropout(ctx, tf.tanh(x @ theta.w), 0.2, self)


class Skipping(Task):
    """Float64; values jump over blocks, others are nests, some are None or read in evaluation only.

    The first and the last piece share a table.
    """

    class Params(Task.Params):
        """Params of Skipping."""

        num_blocks: int = param("Number of blocks.", default=7)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child_list("blocks", [Block.Params()] * self.params.num_blocks)
        self.child("table", Block.Params())

    def loss_weight(self, batch: Any) -> tf.Tensor:
        return tf.reduce_sum(batch["weights"])

    def pieces(self) -> list[Piece]:
        pieces = [Piece("first", {"table": self.table}, self._first)]
        for i, block in enumerate(self.blocks):
            run = functools.partial(self._block, i)
            pieces.append(Piece(f"blocks/{i}", {f"blocks/{i}": block}, run))
        return [*pieces, Piece("last", {"table": self.table}, self._last)]

    def _first(self, theta: Theta, flow: Flow, ctx: Any) -> Flow:
        x = flow["x"] @ theta.table.w
        left = {"jump": tf.sin(x), "mask": None, "only_evaluated": x}
        return {**flow, **left, "h": (x, {"twice": 2.0 * x, "none": None})}

    def _block(self, index: int, theta: Theta, flow: Flow, ctx: Any) -> Flow:
        x, more = flow["h"]
        ctx = ctx.fold(index)
        if index >= 4:  # as in a U-net: each reads what another one left
            x = x + flow[f"skip{6 - index}"]
        if index in (3, 6):  # and one value is read by several stages, whose gradients add up
            x = x + 0.5 * flow["jump"]
        y = self.blocks[index].fprop(theta.blocks[str(index)], x, ctx)
        if flow["mask"] is not None or (not ctx.is_training and flow["only_evaluated"] is None):
            raise ValueError("the values of other pieces got lost")
        ctx.collect_loss("size", 0.01 * tf.reduce_sum(tf.square(tf.cast(y, tf.float32))))
        left = {f"skip{index}": y} if index < 3 else {}
        return {**flow, **left, "h": (y, {**more, "twice": more["twice"] * 0.9 + y})}

    def _last(self, theta: Theta, flow: Flow, ctx: Any) -> Flow:
        x, more = flow["h"]
        y = (x + more["twice"] + flow["jump"]) @ tf.transpose(theta.table.w)
        error = tf.reduce_sum(tf.square(y - flow["target"]), -1)
        weights = tf.cast(flow["weights"], tf.float64)
        metrics = {"error": (tf.reduce_sum(error), tf.cast(tf.size(error), tf.float64))}
        return {**flow, LOSS_SUM: tf.reduce_sum(error * weights), METRICS: metrics}


def skipping_batch(step: int, size: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {
        "x": rng.normal(size=(size, DIM)),
        "target": rng.normal(size=(size, DIM)),
        "weights": rng.integers(0, 3, size).astype(np.float32),
    }


class Gated(Layer):
    """y = x + memory * softmax(x w + mask)."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.weight("w", [DIM, DIM], dims=("embed", "mlp"), init=Normal.Params(stddev=0.5))

    def fprop(self, theta: Theta, x: Any, ctx: Any, *, memory: Any, mask: Any) -> Any:
        return x + memory * tf.nn.softmax(x @ theta.w + mask)


class Masked(Task):
    """A repeated stack that reads a mask of minus infinity, and something that is learned."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child("first", Gated.Params())
        self.child("stack", RepeatedStack.Params(num_layers=4, layer=Gated.Params()))

    def loss_weight(self, batch: Any) -> tf.Tensor:
        return tf.cast(tf.shape(batch["x"])[0], tf.float32)

    def pieces(self) -> list[Piece]:
        rows = rows_of_stack("stack", {"stack": self.stack}, 4, self._rows)
        first, last = Piece("first", {"first": self.first}, self._first), Piece("last", {}, _last)
        return [first, *rows, last]

    def _first(self, theta: Theta, flow: Flow, ctx: Any) -> Flow:
        return {**flow, "memory": flow["x"] @ theta.first.w}

    def _rows(self, first: int, theta: Theta, flow: Flow, ctx: Any) -> Flow:
        side = {name: flow[name] for name in ("memory", "mask")}
        return {**flow, "x": self.stack.fprop(theta.stack, flow["x"], ctx, first=first, **side)}


def _last(theta: Theta, flow: Flow, ctx: Any) -> Flow:
    return {**flow, LOSS_SUM: tf.reduce_sum(tf.square(flow["x"])), METRICS: {}}


def masked_batch(step: int, size: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    mask = np.where(rng.random((size, DIM)) < 0.5, -np.inf, 0.0)
    mask[:, 2] = 0.0
    return {"x": rng.normal(size=(size, DIM)).astype("f4"), "mask": mask.astype("f4")}


class Statistics(Task):
    """Batch normalisation between linear maps."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child_list("norms", [BatchNorm.Params(dim=DIM)] * 3)

    def loss_weight(self, batch: Any) -> tf.Tensor:
        return tf.cast(tf.shape(batch["x"])[0], tf.float32)

    def pieces(self) -> list[Piece]:
        def norm(i: int) -> Any:
            def run(theta: Theta, flow: Flow, ctx: Any) -> Flow:
                y = self.norms[i].fprop(theta.norms[str(i)], flow["x"], ctx)
                return {**flow, "x": tf.nn.relu(y) + 0.1 * flow["x"]}

            return run

        def last(theta: Theta, flow: Flow, ctx: Any) -> Flow:
            return {**flow, LOSS_SUM: tf.reduce_sum(flow["x"] ** 2), METRICS: {}}

        parts = [Piece(f"norms/{i}", {f"norms/{i}": n}, norm(i)) for i, n in enumerate(self.norms)]
        return [*parts, Piece("last", {}, last)]


def statistics_batch(step: int, size: int) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(step).normal(size=(size, DIM)).astype(np.float32) * 3 + 1}


def deep(kind: Any = Stack) -> Any:
    return small_models.language_model(kind.Params(num_layers=4, layer=small_models.layer()))


def task_of(model: str) -> Any:
    own: dict[str, Any] = {"skipping": Skipping.Params, "masked": Masked.Params}
    own |= {"statistics": Statistics.Params, "deep": deep}
    return own.get(model, small_models.MODELS.get(model))().instantiate()


def batch_of(model: str, step: int, size: int) -> dict[str, np.ndarray]:
    if model == "skipping":
        return skipping_batch(step, size)
    if model == "masked":
        return masked_batch(step, size)
    if model == "statistics":
        return statistics_batch(step, size)
    return small_models.batch(model, step, size=size)


def learner(model: str, accumulation: int = 1) -> Any:
    return Learner.Params(
        optimizer=Momentum.Params(),
        schedule=Constant.Params(value=0.1),
        clip_global_norm=1.0,
        ema_decay=0.9,
        accumulation_steps=accumulation,
        frozen=small_models.FROZEN.get(model, []),
    ).instantiate()


def run(execution: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Trains under one execution; returns what came out."""
    model, size = job["model"], job.get("size", 8)
    sizes = job.get("sizes", [size] * job.get("steps", 2))
    batches = [batch_of(model, i, n) for i, n in enumerate(sizes)]
    for i in job.get("poisoned", []):
        batches[i] = {name: np.full_like(array, np.nan) for name, array in batches[i].items()}
    program = execution.build(
        task_of(model),
        learner(model, job.get("accumulation", 1)),
        seed=7,
        batch=signature_of(batches[0]),
    )
    program.initialize()
    first = program.state()
    outputs = [program.train_step(b, i) for i, b in enumerate(batches)]
    odd = {name: a[: size - 3] for name, a in batch_of(model, 99, size).items()}
    is_evaluated = model != "statistics" and job.get("evaluate", True)
    evaluation = program.eval_step(odd) if is_evaluated else {}
    state = program.state()
    program.restore(lambda key: first[key], set(first))
    back = program.state()
    if any(not np.array_equal(back[key], first[key]) for key in first):
        raise ValueError("the state that was restored is another one")
    program.restore(lambda key: state[key], set(state))
    return {
        "first": {k: v.ravel().tolist() for k, v in first.items()},
        "steps": [{k: float(v) for k, v in o.items()} for o in outputs],
        "eval": {k: [float(x) for x in pair] for k, pair in evaluation.items()},
        "weights": {k: v.ravel().tolist() for k, v in state.items() if k.startswith("weights/")},
        "shown": float(
            call_traced(
                program,
                lambda theta, ctx: tf.add_n(
                    [tf.reduce_sum(tf.cast(t, tf.float32)) for t in tf.nest.flatten(theta)]
                ),
            )
        ),
    }


def main() -> None:
    """Reads {"model", "pipelines": [Params of Pipelined], …}; the first result is one device's."""
    job = json.loads(sys.argv[1])
    pipelines = [Pipelined.Params().set(p) for p in job["pipelines"]]
    Pipelined.Params(num_stages=8).instantiate().setup_devices()
    devices.set_graph_optimizer(job.get("optimized", True))
    alone = DataParallel.Params(towers=1, xla="none").instantiate()
    with op_by_op():
        results = [run(alone, job)] if job.get("alone", True) else []
    results += [run(p.instantiate(), job) for p in pipelines]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
