"""The workloads in Flax (linen) and Optax; JAX compiles the step with XLA."""

from __future__ import annotations

import functools
import importlib.metadata
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import workloads
from benchmarks.frameworks import Built, UnsupportedError, Weights


class _Transformer(nn.Module):
    """workloads.Transformer."""

    w: workloads.Transformer

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        w = self.w
        norm = functools.partial(nn.LayerNorm, epsilon=workloads.NORM_EPSILON)
        table = nn.Embed(w.vocab_size, w.dim, name="table")
        x = table(ids) * math.sqrt(w.dim) + workloads.sinusoids(w.length, w.dim)
        mask = nn.make_causal_mask(ids)
        for i in range(w.num_layers):
            attention = nn.MultiHeadDotProductAttention(w.num_heads, name=f"attention{i}")
            x = x + attention(norm(name=f"attention_norm{i}")(x), mask=mask)
            y = norm(name=f"feed_forward_norm{i}")(x)
            y = nn.relu(nn.Dense(w.hidden_dim, name=f"hidden{i}")(y))
            x = x + nn.Dense(w.dim, name=f"output{i}")(y)
        return table.attend(norm(name="final_norm")(x))


def _transformer_weights(w: workloads.Transformer, weights: Weights) -> dict[str, Any]:
    def norm(path: str) -> dict[str, Any]:
        return {name: weights[f"{path}/{name}"] for name in ("scale", "bias")}

    found: dict[str, Any] = {"table": {"embedding": weights["model/embedding/table"]}}
    found["final_norm"] = norm("model/final_norm")
    names = {"query": "q", "key": "k", "value": "v", "out": "out"}
    for i in range(w.num_layers):
        path = f"model/stack/layers/{i}"
        found[f"attention{i}"] = {
            flax_name: {
                "kernel": weights[f"{path}/attention/{name}"],
                "bias": weights[f"{path}/attention/{name}_bias"],
            }
            for flax_name, name in names.items()
        }
        for name in ("attention_norm", "feed_forward_norm"):
            found[f"{name}{i}"] = norm(f"{path}/{name}")
        for name in ("hidden", "output"):
            part = f"{path}/feed_forward/{name}"
            found[f"{name}{i}"] = {"kernel": weights[f"{part}/w"], "bias": weights[f"{part}/b"]}
    return found


class _Lstm(nn.Module):
    """workloads.Lstm."""

    w: workloads.Lstm

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        x = nn.Embed(self.w.vocab_size, self.w.dim, name="table")(ids)
        for i in range(self.w.num_layers):
            x = nn.RNN(nn.OptimizedLSTMCell(self.w.dim, name=f"cell{i}"))(x)
        return nn.Dense(self.w.vocab_size, name="softmax")(x)


def _lstm_weights(w: workloads.Lstm, weights: Weights) -> dict[str, Any]:
    softmax = {"kernel": weights["model/softmax/w"].T, "bias": weights["model/softmax/b"]}
    found = {"table": {"embedding": weights["model/embedding/table"]}, "softmax": softmax}
    for i in range(w.num_layers):
        path, cell = f"model/stack/layers/{i}/cell", {}
        for gate, name in enumerate("ifgo"):
            # Tekso adds 1 to the forget gate; Flax begins its bias with what it is given.
            bias = weights[f"{path}/b"][gate] + np.float32(name == "f")
            cell[f"i{name}"] = {"kernel": weights[f"{path}/w_input"][:, gate]}
            cell[f"h{name}"] = {"kernel": weights[f"{path}/w_recurrent"][:, gate], "bias": bias}
        found[f"cell{i}"] = cell
    return found


class _ConvNorm(nn.Module):
    """A convolution without bias, padded alike on both sides, and batch normalisation."""

    width: int
    kernel: int
    stride: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        k, pad = self.kernel, [(self.kernel // 2, self.kernel // 2)] * 2
        x = nn.Conv(self.width, (k, k), self.stride, pad, use_bias=False, name="conv")(x)
        return nn.BatchNorm(
            use_running_average=False,
            momentum=workloads.BATCH_NORM_DECAY,
            epsilon=workloads.BATCH_NORM_EPSILON,
            name="norm",
        )(x)


class _ResNet(nn.Module):
    """workloads.ResNet."""

    w: workloads.ResNet

    @nn.compact
    def __call__(self, x: Any) -> Any:
        w = self.w
        x = nn.relu(_ConvNorm(w.width, 7, 2, name="stem_conv")(x))
        x = nn.max_pool(x, (3, 3), (2, 2), [(1, 1), (1, 1)])
        inputs, number = w.width, 0
        for group, count in enumerate(w.num_blocks):
            width = w.width * 2**group
            for i in range(count):
                stride, name = 2 if group and not i else 1, f"blocks_{number}"
                y = nn.relu(_ConvNorm(width, 3, stride, name=f"{name}_convs_0")(x))
                y = _ConvNorm(width, 3, 1, name=f"{name}_convs_1")(y)
                if stride != 1 or inputs != width:
                    x = _ConvNorm(width, 1, stride, name=f"{name}_shortcut")(x)
                x, inputs, number = nn.relu(x + y), width, number + 1
        return nn.Dense(w.classes, name="classifier")(x.mean((1, 2)))


def _resnet_weights(weights: Weights) -> dict[str, Any]:
    classifier = {"kernel": weights["model/classifier/w"], "bias": weights["model/classifier/b"]}
    found: dict[str, Any] = {"classifier": classifier}
    for path, value in weights.items():
        if path.endswith("/conv/w"):
            unit = path.removesuffix("/conv/w")
            scale, bias = (weights[f"{unit}/norm/{name}"] for name in ("scale", "bias"))
            name = unit.removeprefix("model/").replace("/", "_")
            norm = {"scale": scale, "bias": bias}
            found[name] = {"conv": {"kernel": value}, "norm": norm}
    return found


def build(workload: workloads.Workload, weights: Weights, variant: str) -> Built:
    """Returns the workload; there are no variants."""
    del variant
    if isinstance(workload, workloads.BeamSearch):
        raise UnsupportedError("Flax has no beam search")
    if isinstance(workload, workloads.AmoebaNet):
        raise UnsupportedError("AmoebaNet is compared with PyTorch and Keras only")
    if isinstance(workload, workloads.Conformer | workloads.FrontEnd):
        raise UnsupportedError("speech is compared with PyTorch only")
    batch = workload.batch()
    model: Any
    if isinstance(workload, workloads.Transformer):
        model, x = _Transformer(workload), batch["ids"]
        weights = _transformer_weights(workload, weights)
    elif isinstance(workload, workloads.Lstm):
        model, x = _Lstm(workload), batch["ids"]
        weights = _lstm_weights(workload, weights)
    else:
        model, x = _ResNet(workload), batch["x"]
        weights = _resnet_weights(weights)
    shapes = jax.eval_shape(model.init, jax.random.key(0), x)
    params = jax.tree.map(jnp.asarray, dict(weights))
    wanted = jax.tree.map(lambda one: one.shape, shapes["params"])
    if wanted != jax.tree.map(lambda one: one.shape, params):
        raise ValueError(f"the exported weights do not have the shapes {wanted}")
    # A step does not read the moving averages, so they may begin with zeros.
    averages = jax.tree.map(
        lambda one: jnp.zeros(one.shape, one.dtype), shapes.get("batch_stats", {})
    )
    adam = optax.adam(workloads.LEARNING_RATE, workloads.BETA1, workloads.BETA2, workloads.EPSILON)

    def loss_of(params: Any, averages: Any, x: Any, labels: Any) -> Any:
        variables = {"params": params, "batch_stats": averages}
        logits, changed = model.apply(variables, x, mutable=["batch_stats"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), changed.get("batch_stats", {})

    @functools.partial(jax.jit, donate_argnums=0)
    def update(state: Any, x: Any, labels: Any) -> Any:
        params, averages, slots = state
        gradient = jax.value_and_grad(loss_of, has_aux=True)
        (loss, averages), gradients = gradient(params, averages, x, labels)
        changes, slots = adam.update(gradients, slots, params)
        return (optax.apply_updates(params, changes), averages, slots), loss

    state = [(params, averages, adam.init(params))]

    def step() -> float:
        state[0], loss = update(state[0], x, batch["labels"])
        return float(loss)

    names = ("flax", "jax", "optax")
    versions = {name: importlib.metadata.version(name) for name in names}
    return Built(step, sum(one.size for one in jax.tree.leaves(params)), versions)
