"""Runs a small task for some steps under an execution and prints what came out, as JSON.

Started by tests in a process of its own, because a process has one execution. The task has all that
could tell one execution from another: dropout, padding, an auxiliary loss, and (by choice) batch
statistics and a repeated stack.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from tekso.framework import ops

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import small_models
import tensorflow as tf

from tekso.framework.cluster import Cluster
from tekso.framework.execution import DataParallel, devices
from tekso.framework.execution.base import signature_of
from tekso.framework.initializers import GlorotUniform, Normal
from tekso.framework.layer import Layer
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import SGD
from tekso.framework.params import Params, param
from tekso.framework.schedules import Constant
from tekso.framework.task import LossSums, Task
from tekso.framework.theta import Theta
from tekso.models.layers.feed_forward import FeedForward
from tekso.models.layers.normalization import BatchNorm, LayerNorm

BATCH, LENGTH, VOCAB, DIM, HEADS = 16, 5, 11, 6, 2
UNEVEN = 13  # examples of a batch that only an evaluation takes on several devices


class Block(Layer):
    """Attention and feed-forward with dropout and an auxiliary loss."""

    class Params(Layer.Params):
        """Params of Block."""

        batch_norm: bool = param("Whether the norm takes batch statistics.", default=False)

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        norm = BatchNorm.Params(dim=DIM) if params.batch_norm else LayerNorm.Params(dim=DIM)
        self.child("norm", norm)
        for name in ("q", "k", "v"):
            self.weight(
                name,
                [DIM, HEADS, DIM // HEADS],
                dims=("embed", "heads", "head_dim"),
                init=GlorotUniform.Params(),
            )
        self.child("ffn", FeedForward.Params(input_dim=DIM, hidden_dim=7, dropout_rate=0.2))

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: object) -> tf.Tensor:
        h = self.norm.fprop(theta.norm, x, ctx)
        q, k, v = (ops.project(ctx, h, theta[name]) for name in ("q", "k", "v"))
        mask = np.tril(np.ones([1, 1, LENGTH, LENGTH], bool))
        a = ops.attend(
            ctx, q, k, v, scale=0.5, mask=tf.constant(mask), dropout_rate=0.2, layer=self
        )
        x += ops.dropout(ctx, tf.reshape(a, x.shape), 0.3, self)
        ctx.collect_loss("size", 1e-2 * tf.reduce_sum(tf.square(x)))
        return x + self.ffn.fprop(theta.ffn, x, ctx)


class ToyTask(Task):
    """A language model over random tokens with uneven padding."""

    class Params(Task.Params):
        """Params of ToyTask."""

        num_blocks: int = param("Number of blocks.", default=1)
        repeated: bool = param("Whether the blocks are a repeated stack.", default=False)
        rematerialize: bool = param("Whether blocks are computed again.", default=False)
        block: Block.Params = param("Of each block.", default=Block.Params())

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        init = Normal.Params(stddev=0.3)
        self.weight("table", [VOCAB, DIM], dims=("vocab", "embed"), init=init)
        if self.params.repeated:
            self.child_stack("blocks", self.params.block, self.params.num_blocks)
        else:
            self.child_list("blocks", [self.params.block] * self.params.num_blocks)

    def loss_weight(self, batch: dict) -> tf.Tensor:
        return tf.reduce_sum(batch["weights"])

    def loss(self, theta: Theta, batch: dict, ctx: object) -> LossSums:
        x, table = ops.lookup_shared(ctx, theta.table, batch["ids"])
        if self.params.repeated:

            def body(_: Theta, x: tf.Tensor, block: Theta, ctx: object) -> tuple:
                return self._block(self.blocks, block, x, ctx), None

            x, _ = ops.scan(ctx, body, Theta(), x, theta.blocks)
        else:
            for i, layer in enumerate(self.blocks):
                x = self._block(layer, theta.blocks[str(i)], x, ctx.fold(i))
        nats = ops.cross_entropy(ctx, x, table, batch["labels"])
        return LossSums(tf.reduce_sum(nats * batch["weights"]))

    def _block(self, layer: Block, theta: Theta, x: tf.Tensor, ctx: object) -> tf.Tensor:
        if self.params.rematerialize:
            return ops.rematerialize(ctx, layer.fprop, theta, x)
        return layer.fprop(theta, x, ctx)


def batch(step: int, model: str = "") -> dict[str, np.ndarray]:
    if model:
        return small_models.batch(model, step, size=BATCH)
    generator = np.random.default_rng(step)
    tokens = generator.integers(0, VOCAB, (BATCH, LENGTH + 1)).astype(np.int32)
    lengths = generator.integers(1, LENGTH + 1, BATCH)
    return {
        "ids": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "weights": (np.arange(LENGTH) < lengths[:, None]).astype(np.float32),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu_devices", type=int)
    parser.add_argument("--cluster", type=lambda text: text.split(","))
    parser.add_argument("--process", type=int)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--in_one_call", action="store_true", help="the steps again, together")
    parser.add_argument("--deterministic", action="store_true", help="orders sums of many tensors")
    parser.add_argument("--no_evaluation", action="store_true")
    parser.add_argument("--one_size", action="store_true", help="evaluates no smaller batches")
    parser.add_argument("--unoptimized", action="store_true", help="without the graph optimizer")
    parser.add_argument("--op_by_op", action="store_true", help="without graphs")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--execution", default="{}", help="JSON of DataParallel's Params")
    parser.add_argument("--task", default="{}", help="JSON of ToyTask's Params")
    parser.add_argument("--model", default="", help="one of small_models, instead of ToyTask")
    options = parser.parse_args()
    if options.deterministic:
        devices.set_determinism(True)
    devices.set_graph_optimizer(not options.unoptimized)
    tf.config.run_functions_eagerly(options.op_by_op)
    execution = DataParallel.Params().set(json.loads(options.execution)).instantiate()
    if options.cluster:
        execution.join(Cluster(tuple(options.cluster), options.process))
    execution.setup_devices(cpu_devices=options.cpu_devices)
    toy, model = ToyTask.Params().set(json.loads(options.task)), options.model
    task = (small_models.MODELS[model]() if model else toy).instantiate()
    learner = Learner.Params(
        optimizer=SGD.Params(),
        schedule=Constant.Params(value=0.5),
        accumulation_steps=options.accumulation,
    ).instantiate()
    program = execution.build(task, learner, seed=2**40 + 3, batch=signature_of(batch(0, model)))
    program.initialize()
    first = {k: float(np.abs(v).sum()) for k, v in program.state().items()}

    batches = [batch(i, model) for i in range(options.steps)]
    begin = program.state()
    outputs = [program.train_step(b, 2**31 + i) for i, b in enumerate(batches)]
    together = None
    if options.in_one_call:
        found = program.state()
        program.restore(begin.__getitem__, set(begin))
        ends = program.train_steps(batches, 2**31)
        together = {"steps": _floats(ends), "weights": _weights(program)}
        program.restore(found.__getitem__, set(found))
    evaluation: dict[str, list[float]] | None = None
    if not options.no_evaluation:
        evaluation = {}
        sizes = {"": BATCH, "uneven/": UNEVEN, "few/": 1}
        for name in [""] if model or options.one_size else sizes:  # each size is traced
            part = {key: array[: sizes[name]] for key, array in batch(99, model).items()}
            pairs = program.eval_step(part)
            evaluation |= {f"{name}{k}": [float(x) for x in pair] for k, pair in pairs.items()}
    weights = _weights(program)
    fusions = [str(key) for key in program._fusions]

    start = program.state()

    def losses(*steps: int) -> list[float]:
        """Of the same batch, from the same weights on."""
        program.restore(start.__getitem__, set(start))
        return [float(program.train_step(batch(0, model), step)["loss"]) for step in steps]

    same = {"one": losses(5, 5, 5), "again": losses(5), "other": losses(6)}
    print(
        json.dumps(
            {
                "first": first,
                "steps": _floats(outputs),
                "together": together,
                "eval": evaluation,
                "weights": weights,
                "fusions": fusions,
                "same_batch": same,
            }
        )
    )


def _floats(outputs: list[dict[str, Any]]) -> list[dict[str, float]]:
    return [{name: float(value) for name, value in one.items()} for one in outputs]


def _weights(program: Any) -> dict[str, Any]:
    state = program.state()
    return {key: value.tolist() for key, value in state.items() if key.startswith("weights/")}


if __name__ == "__main__":
    main()
