"""The workloads in Keras 3 on TensorFlow: with train_on_batch, compiled by XLA or not."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from benchmarks import workloads
from benchmarks.frameworks import Built, UnsupportedError, Weights
from benchmarks.frameworks.keras_amoebanet import AmoebaNet


class _Table(layers.Layer):
    """The embedding with positions, which is also the softmax."""

    def __init__(self, w: workloads.Transformer) -> None:
        super().__init__()
        self.table = layers.Embedding(w.vocab_size, w.dim)
        self.scale = math.sqrt(w.dim)
        self.positions = workloads.sinusoids(w.length, w.dim)

    def build(self, shape: Any) -> None:
        """Makes the table."""
        self.table.build(shape)
        self.built = True

    def call(self, x: Any, as_softmax: bool = False) -> Any:
        """Returns embedded tokens, or the scores of all tokens."""
        if as_softmax:
            return ops.matmul(x, ops.transpose(self.table.embeddings))
        return self.table(x) * self.scale + self.positions


def _transformer(w: workloads.Transformer, weights: Weights) -> Any:
    path, values = "model/stack/layers", [weights["model/embedding/table"]]
    ids = keras.Input([w.length], dtype="int32")
    table = _Table(w)
    x = table(ids)
    for i in range(w.num_layers):
        y = layers.LayerNormalization(epsilon=workloads.NORM_EPSILON)(x)
        attention = layers.MultiHeadAttention(w.num_heads, w.dim // w.num_heads)
        x = x + attention(y, y, use_causal_mask=True)
        y = layers.LayerNormalization(epsilon=workloads.NORM_EPSILON)(x)
        x = x + layers.Dense(w.dim)(layers.Dense(w.hidden_dim, activation="relu")(y))
        names = ["attention_norm/scale", "attention_norm/bias"]
        names += [f"attention/{one}" for one in ("q", "q_bias", "k", "k_bias", "v", "v_bias")]
        names += ["attention/out", "attention/out_bias"]
        names += ["feed_forward_norm/scale", "feed_forward_norm/bias"]
        names += [f"feed_forward/{one}" for one in ("output/w", "output/b", "hidden/w", "hidden/b")]
        # The layers are sorted by depth: hidden precedes output.
        names[-4:] = [*names[-2:], *names[-4:-2]]
        values += [weights[f"{path}/{i}/{name}"] for name in names]
    x = layers.LayerNormalization(epsilon=workloads.NORM_EPSILON)(x)
    values += [weights["model/final_norm/scale"], weights["model/final_norm/bias"]]
    model = keras.Model(ids, table(x, as_softmax=True))
    model.set_weights(values)
    return model


def _lstm(w: workloads.Lstm, weights: Weights) -> Any:
    model = keras.Sequential([keras.Input([w.length], dtype="int32")])
    model.add(layers.Embedding(w.vocab_size, w.dim))
    values = [weights["model/embedding/table"]]
    # Tekso adds 1 to the forget gate; Keras begins its bias with 1. Both order gates i, f, g, o.
    forget = np.repeat(np.array([0, 1, 0, 0], np.float32), w.dim)
    for i in range(w.num_layers):
        model.add(layers.LSTM(w.dim, return_sequences=True))
        cell = f"model/stack/layers/{i}/cell"
        values += [
            weights[f"{cell}/{name}"].reshape(w.dim, -1) for name in ("w_input", "w_recurrent")
        ]
        values.append(weights[f"{cell}/b"].reshape(-1) + forget)
    model.add(layers.Dense(w.vocab_size))
    values += [weights["model/softmax/w"].T, weights["model/softmax/b"]]
    model.set_weights(values)
    return model


class _ConvNorm(layers.Layer):
    """A convolution without bias, padded alike on both sides, and batch normalisation."""

    def __init__(self, width: int, kernel: int, stride: int, path: str) -> None:
        super().__init__()
        self.path_of_weights = path
        self.pad = layers.ZeroPadding2D(kernel // 2)
        self.conv = layers.Conv2D(width, kernel, stride, "valid", use_bias=False)
        self.norm = layers.BatchNormalization(
            momentum=workloads.BATCH_NORM_DECAY, epsilon=workloads.BATCH_NORM_EPSILON
        )

    def call(self, x: Any, training: bool = False) -> Any:
        """Returns norm(conv(x))."""
        return self.norm(self.conv(self.pad(x)), training=training)

    def put(self, weights: Weights) -> None:
        """Sets the weights."""
        path = self.path_of_weights
        self.conv.set_weights([weights[f"{path}/conv/w"]])
        names = ("scale", "bias", "moving_mean", "moving_variance")
        self.norm.set_weights([weights[f"{path}/norm/{name}"] for name in names])


def _resnet(w: workloads.ResNet, weights: Weights) -> Any:
    units = []

    def unit(x: Any, *sizes: Any) -> Any:
        units.append(_ConvNorm(*sizes))
        return units[-1](x)

    images = keras.Input([w.image_size, w.image_size, 3])
    x = layers.ReLU()(unit(images, w.width, 7, 2, "model/stem/conv"))
    x = layers.MaxPooling2D(3, 2)(layers.ZeroPadding2D(1)(x))
    inputs, number = w.width, 0
    for group, count in enumerate(w.num_blocks):
        width = w.width * 2**group
        for i in range(count):
            stride, path = 2 if group and not i else 1, f"model/blocks/{number}"
            y = layers.ReLU()(unit(x, width, 3, stride, f"{path}/convs/0"))
            y = unit(y, width, 3, 1, f"{path}/convs/1")
            if stride != 1 or inputs != width:
                x = unit(x, width, 1, stride, f"{path}/shortcut")
            x, inputs, number = layers.ReLU()(layers.Add()([x, y])), width, number + 1
    classifier = layers.Dense(w.classes)
    model = keras.Model(images, classifier(layers.GlobalAveragePooling2D()(x)))
    for one in units:
        one.put(weights)
    classifier.set_weights([weights["model/classifier/w"], weights["model/classifier/b"]])
    return model


def build(workload: workloads.Workload, weights: Weights, variant: str) -> Built:
    """Returns the workload; the variant is "graph" or "xla"."""
    if isinstance(workload, workloads.BeamSearch):
        raise UnsupportedError("Keras has no beam search")
    if isinstance(workload, workloads.Conformer | workloads.FrontEnd):
        raise UnsupportedError("speech is compared with PyTorch only")
    batch = workload.batch()
    if isinstance(workload, workloads.Transformer):
        model, x = _transformer(workload, weights), batch["ids"]
    elif isinstance(workload, workloads.Lstm):
        model, x = _lstm(workload, weights), batch["ids"]
    elif isinstance(workload, workloads.AmoebaNet):
        model, x = AmoebaNet(workload, weights).model, batch["x"]
    else:
        model, x = _resnet(workload, weights), batch["x"]
    model.compile(
        optimizer=keras.optimizers.Adam(
            workloads.LEARNING_RATE,
            workloads.BETA1,
            workloads.BETA2,
            workloads.EPSILON,
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=variant == "xla",
    )

    def step() -> float:
        model.reset_metrics()  # train_on_batch returns the mean of all losses since
        return float(model.train_on_batch(x, batch["labels"]))

    count = sum(math.prod(weight.shape) for weight in model.trainable_weights)
    return Built(step, count, {"keras": keras.__version__, "tensorflow": tf.__version__})
