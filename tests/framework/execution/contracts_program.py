"""Runs the toy task by means that Tekso has no execution for yet, and prints the differences.

The layers are those of `steps_program`, unchanged. `mesh`: one SPMD program over four devices, by
layouts taken from the dims of the weights. `stages`: cut between the blocks, in micro-batches, the
gradients handed from stage to stage.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["DTENSOR_USE_ALL_TO_ALL_RELAYOUT"] = "0"  # its default gives wrong values on CPU

import tensorflow as tf
from steps_program import BATCH, ToyTask, batch
from tensorflow.experimental import dtensor

from tekso.framework.context import StepContext
from tekso.framework.execution import devices
from tekso.framework.theta import flatten

STEP, SEED = 7, 5


def whole_batch(task: ToyTask) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
    """The loss and the gradients of one device."""
    theta = task.init(SEED)
    ctx = StepContext(mode="train", seed=SEED, step=STEP, num_examples=BATCH)
    return total_and_gradients(task, theta, tensors(), ctx)


def tensors() -> dict[str, tf.Tensor]:
    return {name: tf.constant(value) for name, value in batch(STEP).items()}


def total_and_gradients(task: ToyTask, theta: Any, batch: Any, ctx: StepContext) -> Any:
    @tf.function(autograph=False)
    def run(theta: Any, batch: Any) -> Any:
        flat = flatten(theta)
        with tf.GradientTape() as tape:
            tape.watch(flat)
            loss = task.loss(theta, batch, ctx).loss_sum / task.loss_weight(batch)
            loss += ctx.collected.total("loss")
        return loss, tape.gradient(loss, flat)

    return run(theta, batch)


def on_mesh(rules: dict[str, str], task: ToyTask) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
    """The same on a mesh of 2 x 2 devices; `rules` says which dim lies on which axis."""
    names = [f"CPU:{i}" for i in range(4)]
    mesh = dtensor.create_mesh([("data", 2), ("model", 2)], devices=names)

    def layout(dims: Any) -> dtensor.Layout:
        return dtensor.Layout([rules.get(d, dtensor.UNSHARDED) for d in dims], mesh)

    def put(value: Any, dims: Any) -> tf.Tensor:
        value = tf.constant(value)
        copied = dtensor.copy_to_mesh(value, dtensor.Layout.replicated(mesh, value.shape.rank))
        return dtensor.relayout(copied, layout(dims))

    def whole(value: tf.Tensor) -> tf.Tensor:
        replicated = dtensor.Layout.replicated(mesh, value.shape.rank)
        return tf.constant(dtensor.unpack(dtensor.relayout(value, replicated))[0].numpy())

    class MeshContext(StepContext):
        def constrain(self, x: tf.Tensor, dims: Any) -> tf.Tensor:
            return dtensor.relayout(x, layout(dims))

        def one_hot(self, ids: tf.Tensor, size: int) -> tf.Tensor:
            return dtensor.relayout(tf.one_hot(ids, size), layout(("batch", None, "vocab")))

        def lookup_shared(self, table: tf.Tensor, ids: tf.Tensor) -> Any:
            return tf.einsum("btv,vd->btd", self.one_hot(ids, table.shape[0]), table), table

        def cross_entropy(self, x: Any, table: Any, labels: Any, **_: Any) -> tf.Tensor:
            logits = tf.einsum("btd,vd->btv", x, table)
            label = tf.reduce_sum(logits * self.one_hot(labels, table.shape[0]), -1)
            return tf.reduce_logsumexp(logits, -1) - label

    theta = task.theta({p: put(s.initial_value(SEED), s.dims) for p, s in task.specs().items()})
    inputs = {n: put(v, ("batch", None)) for n, v in batch(STEP).items()}
    ctx = MeshContext(mode="train", seed=SEED, step=STEP, num_examples=BATCH)
    loss, gradients = total_and_gradients(task, theta, inputs, ctx)
    return whole(loss), {path: whole(g) for path, g in gradients.items()}


def in_stages(num_micro_batches: int, task: ToyTask) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
    """The same in two stages: [lookup, block 0] and [block 1, softmax], sharing the table."""
    theta = task.init(SEED)
    whole = tensors()
    weight = task.loss_weight(whole)
    total, gradients = tf.constant(0.0), {p: tf.zeros_like(w) for p, w in flatten(theta).items()}
    size = BATCH // num_micro_batches
    for start in range(0, BATCH, size):
        part = {name: x[start : start + size] for name, x in whole.items()}
        ctx = [
            StepContext(
                mode="train", seed=SEED, step=STEP, num_examples=BATCH, example_offset=start
            )
            for _ in range(2)
        ]
        with tf.GradientTape(persistent=True) as first:
            first.watch(flatten(theta))
            x = ctx[0].lookup(theta.table, part["ids"])
            x = task.blocks[0].fprop(theta.blocks["0"], x, ctx[0].fold(0))
            aux = ctx[0].collected.total("loss")
        with tf.GradientTape() as second:
            second.watch((x, flatten(theta)))
            y = task.blocks[1].fprop(theta.blocks["1"], x, ctx[1].fold(1))
            nats = ctx[1].cross_entropy(y, theta.table, part["labels"])
            loss = tf.reduce_sum(nats * part["weights"]) / weight + ctx[1].collected.total("loss")
        zero = tf.UnconnectedGradients.ZERO
        dx, late = second.gradient(loss, (x, flatten(theta)), unconnected_gradients=zero)
        ones = [dx, tf.ones_like(aux)]
        early = first.gradient([x, aux], flatten(theta), ones, unconnected_gradients=zero)
        total += loss + aux
        for path in gradients:
            gradients[path] += tf.convert_to_tensor(early[path]) + late[path]
    return total, gradients


def main() -> None:
    how, argument = sys.argv[1], json.loads(sys.argv[2])
    devices.setup_cpu(logical_devices=4, threads_per_op=1)
    task = ToyTask.Params(rematerialize=how == "mesh").instantiate()
    loss, gradients = whole_batch(task)
    other_loss, other = {"mesh": on_mesh, "stages": in_stages}[how](argument, task)
    differences = [float(tf.reduce_max(tf.abs(gradients[p] - g))) for p, g in other.items()]
    print(json.dumps({"loss": abs(float(loss - other_loss)), "gradients": max(differences)}))


if __name__ == "__main__":
    main()
