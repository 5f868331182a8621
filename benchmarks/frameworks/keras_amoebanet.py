"""AmoebaNet-D in Keras, as GPipe divides it: stem, two reductions, and three groups of cells."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers

from benchmarks import workloads
from benchmarks.frameworks import Weights
from benchmarks.frameworks.amoebanet_cells import OPERATIONS, OUTPUTS


class AmoebaNet:
    """Builds the model of workloads.AmoebaNet; the weights are set at the end."""

    def __init__(self, w: workloads.AmoebaNet, weights: Weights) -> None:
        self._weights = weights
        self._put: list[tuple[Any, list[str]]] = []
        images = keras.Input([w.image_size, w.image_size, 3])
        before = x = self._unit(images, w.filters // 4, (3, 3), 2, "model/stem", has_relu=False)
        is_after_reduction = False
        for i, (kind, dim) in enumerate(w.cells()):
            before, x = x, self._cell(kind, dim, x, before, is_after_reduction, f"model/cells/{i}")
            is_after_reduction = kind == "reduction"
        classifier = layers.Dense(w.classes)
        self._put.append((classifier, ["model/classifier/w", "model/classifier/b"]))
        pooled = layers.GlobalAveragePooling2D()(layers.ReLU()(x))
        self.model = keras.Model(images, classifier(pooled))
        for layer, paths in self._put:
            layer.set_weights([weights[path] for path in paths])

    def _cell(
        self, kind: str, dim: int, x: Any, before: Any, is_after_reduction: bool, path: str
    ) -> Any:
        states = [self._unit(x, dim, (1, 1), 1, f"{path}/first")]
        if is_after_reduction:
            before = self._factorized_reduction(before, dim, f"{path}/second")
        elif before.shape[-1] != dim:
            before = self._unit(before, dim, (1, 1), 1, f"{path}/second")
        states.append(before)
        table = OPERATIONS[kind]
        for i in range(0, len(table), 2):
            pair = []
            for j in (i, i + 1):
                state, name = table[j]
                stride = 2 if kind == "reduction" and state < 2 else 1
                pair.append(self._operation(states[state], name, stride, f"{path}/operations/{j}"))
            states.append(layers.Add()(pair))
        return layers.Concatenate()([states[i] for i in OUTPUTS[kind]])

    def _operation(self, x: Any, name: str, stride: int, path: str) -> Any:
        dim = x.shape[-1]
        if name == "none":
            return x
        if name == "1x1":
            return self._unit(x, dim, (1, 1), stride, path)
        if name.startswith("max"):
            return layers.MaxPooling2D(int(name[3]), stride, "same")(x)
        if name.startswith("avg"):
            return layers.AveragePooling2D(int(name[3]), stride, "same")(x)
        kernels = [(3, 3)] if name == "3x3" else [(1, 7), (7, 1)]
        units = [(dim // 4, (1, 1), 1)]
        units += [(dim // 4, kernel, stride if kernel == (3, 3) else 1) for kernel in kernels]
        for i, (outputs, kernel, strides) in enumerate([*units, (dim, (1, 1), 1)]):
            x = self._unit(x, outputs, kernel, strides, f"{path}/layers/{i}")
        return x

    def _unit(
        self,
        x: Any,
        outputs: int,
        kernel: tuple[int, int],
        stride: int,
        path: str,
        *,
        has_relu: bool = True,
    ) -> Any:
        x = layers.ReLU()(x) if has_relu else x
        return self._norm(self._conv(x, outputs, kernel, stride, f"{path}/conv/w"), path)

    def _factorized_reduction(self, x: Any, outputs: int, path: str) -> Any:
        x = layers.ReLU()(x)
        even = self._conv(x, outputs // 2, (1, 1), 2, f"{path}/even")
        missing = [(0, size % 2) for size in x.shape[1:3]]
        shifted = layers.Cropping2D(((1, 0), (1, 0)))(layers.ZeroPadding2D(missing)(x))
        odd = self._conv(shifted, outputs - outputs // 2, (1, 1), 2, f"{path}/odd")
        return self._norm(layers.Concatenate()([even, odd]), path)

    def _conv(self, x: Any, outputs: int, kernel: tuple[int, int], stride: int, weight: str) -> Any:
        conv = layers.Conv2D(outputs, kernel, stride, "same", use_bias=False)
        self._put.append((conv, [weight]))
        return conv(x)

    def _norm(self, x: Any, path: str) -> Any:
        norm = layers.BatchNormalization(
            momentum=workloads.AMOEBANET_DECAY, epsilon=workloads.AMOEBANET_EPSILON
        )
        names = ("scale", "bias", "moving_mean", "moving_variance")
        self._put.append((norm, [f"{path}/norm/{name}" for name in names]))
        return norm(x)
