"""Runs a Transformer layer with experts on a mesh of 2 x 2 devices and prints the differences.

Layouts are taken from the dims of the weights and of the pins, by rules; a JSON list of them is
given. Printed is by how much loss, gradients and metrics differ from those of one device.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from typing import Any

from tekso.framework import ops

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["DTENSOR_USE_ALL_TO_ALL_RELAYOUT"] = "0"  # its default gives wrong values on CPU

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tekso.framework.context import StepContext
from tekso.framework.execution import devices
from tekso.framework.primitive import PRIMITIVES
from tekso.framework.theta import flatten
from tekso.models.layers import masking
from tekso.models.layers.attention import MultiHeadAttention
from tekso.models.layers.expert_routing import SwitchRouter, TopKRouter
from tekso.models.layers.mixture_of_experts import MixtureOfExperts
from tekso.models.layers.transformer import TransformerLayer

B, T, D, E, H = 4, 6, 8, 4, 10
CASES = {
    "switch": {"router": SwitchRouter.Params(jitter=0.1, z_weight=0.01)},
    "top_2": {
        "router": TopKRouter.Params(capacity_factor=0.7, later_choices="random"),
        "experts": "gated",
        "dropout_rate": 0.2,
    },
}


def fprop(layer: Any, mask: tf.Tensor, theta: Any, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
    return layer.fprop(theta, x, ctx, mask=mask)


def loss_and_gradients(layer: Any, theta: Any, inputs: Any, ctx: StepContext) -> Any:
    @tf.function(autograph=False)
    def run(theta: Any, inputs: Any) -> Any:
        flat = flatten(theta)
        with tf.GradientTape() as tape:
            tape.watch(flat)
            x = ctx.constrain(inputs["x"], ("batch", "length", "embed"))
            mask = masking.segments(inputs["segment_ids"])
            y = ops.rematerialize(ctx, functools.partial(fprop, layer, mask), theta, x)
            loss = tf.reduce_mean(tf.square(y)) + ctx.collected.total("loss")
        metrics = {k: v[0] for k, v in ctx.collected.sums["metric"].items()}
        return loss, tape.gradient(loss, flat), metrics

    return run(theta, inputs)


class Mesh:
    """A mesh, and what lies on which of its axes."""

    def __init__(self, rules: dict[str, str]) -> None:
        names = [f"CPU:{i}" for i in range(4)]
        self.mesh = dtensor.create_mesh([("data", 2), ("model", 2)], devices=names)
        self.rules = rules

    def layout(self, dims: Any) -> dtensor.Layout:
        return dtensor.Layout([self.rules.get(d, dtensor.UNSHARDED) for d in dims], self.mesh)

    def put(self, value: Any, dims: Any) -> tf.Tensor:
        value = tf.constant(value)
        replicated = dtensor.Layout.replicated(self.mesh, value.shape.rank)
        return dtensor.relayout(dtensor.copy_to_mesh(value, replicated), self.layout(dims))

    def whole(self, value: tf.Tensor) -> np.ndarray:
        replicated = dtensor.Layout.replicated(self.mesh, value.shape.rank)
        return dtensor.unpack(dtensor.relayout(value, replicated))[0].numpy()


class MeshContext(StepContext):
    """Pins layouts; everything else is as on one device."""

    def __init__(self, mesh: Mesh, **rest: Any) -> None:
        super().__init__(**rest)
        self.mesh = mesh

    def constrain(self, x: tf.Tensor, dims: Any) -> tf.Tensor:
        return dtensor.relayout(x, self.mesh.layout(dims))

    def project(self, x: Any, w: Any, b: Any = None, *, num_contracted: int = 1) -> tf.Tensor:
        y = tf.tensordot(x, w, num_contracted)
        return y if b is None else y + b

    def attend(self, q: Any, k: Any, v: Any, **rest: Any) -> tf.Tensor:
        dims = ("batch", None, "heads", None)
        q, k, v = (self.constrain(t, dims) for t in (q, k, v))
        return self.constrain(ops.attend.plain(self, q, k, v, **rest), dims)


MeshContext.forms = {n: form for n, form in vars(MeshContext).items() if n in PRIMITIVES}


def differences(case: str, rules: list[dict[str, str]]) -> list[dict[str, float]]:
    """For each of the rules, by how much a mesh differs from one device."""
    layer = TransformerLayer.Params(
        dim=D,
        attention=MultiHeadAttention.Params(num_heads=2, mask="causal"),
        feed_forward=MixtureOfExperts.Params(hidden_dim=H, num_experts=E, **CASES[case]),
    ).instantiate()
    rng = np.random.default_rng(0)
    inputs = {
        "x": rng.standard_normal([B, T, D]).astype(np.float32),
        "segment_ids": np.array([[1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 0, 0]] * 2, np.int32),
    }
    context = {"mode": "train", "seed": 5, "step": 7, "num_examples": B}
    here = {name: tf.constant(value) for name, value in inputs.items()}
    ctx = StepContext(**context)
    loss, gradients, metrics = loss_and_gradients(layer, layer.init(5), here, ctx)
    sizes = {path: float(np.max(np.abs(g))) for path, g in gradients.items()}
    least = 1e-2 * max(sizes.values())  # the gradient of a bias of keys is 0 but for rounding
    found = []
    for some in rules:
        mesh = Mesh(some)
        theta = {p: mesh.put(s.initial_value(5), s.dims) for p, s in layer.specs().items()}
        placed = {n: mesh.put(v, ("batch", *[None] * (v.ndim - 1))) for n, v in inputs.items()}
        ctx = MeshContext(mesh, **context)
        on_mesh = loss_and_gradients(layer, layer.theta(theta), placed, ctx)
        other_loss, others, other_metrics = tf.nest.map_structure(mesh.whole, on_mesh)
        by_weight = {
            path: float(np.max(np.abs(gradients[path] - g)) / max(sizes[path], least))
            for path, g in others.items()
        }
        by_metric = [abs(float(metrics[name] - value)) for name, value in other_metrics.items()]
        found.append(
            {
                "loss": abs(float(loss) - float(other_loss)) / float(loss),
                "gradients": max(by_weight.values()),
                "metrics": max(by_metric),
                "dropped": float(metrics["experts/dropped"]),
            }
        )
    return found


def main() -> None:
    devices.setup_cpu(logical_devices=4, threads_per_op=1)
    print(json.dumps(differences(sys.argv[1], json.loads(sys.argv[2]))))


if __name__ == "__main__":
    main()
