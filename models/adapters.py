"""Merges adapters into the matrices that they update: weights and Params of the plain model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import numpy as np

from tekso.framework.layer import Layer
from tekso.framework.params import Params
from tekso.framework.params import tree as params_tree
from tekso.framework.theta import SEPARATOR
from tekso.models.layers.lora import Lora
from tekso.models.layers.projections import AdaptedLayer

P = TypeVar("P", bound=Params)


def without_adapters(params: P) -> P:
    """Returns a copy of Params in which every adapter is None."""
    plain = params.copy()
    adapters = [p for p, value, _ in params_tree.walk(plain) if isinstance(value, Lora.Params)]
    return plain.set({path: None for path in adapters})


def merged_weights(layer: Layer, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns {path: weight} of the layer without adapters: w + (alpha / rank) * a @ b.

    Args:
      layer: a task or a layer, with adapters.
      weights: {path from the layer: weight}, with those of the adapters.

    Shapes:
      returns: shapes and dtypes of the weights
    """
    specs, plain = layer.specs(), dict(weights)
    for part in layer.walk():
        if not isinstance(part, AdaptedLayer):
            continue
        for name, lora in part.adapted():
            path = SEPARATOR.join(filter(None, [part.path, name]))
            a, b = (plain.pop(f"{path}_lora_{factor}") for factor in "ab")
            stacked = specs[path].stacked + part.num_separate
            plain[path] = lora.merged(plain[path], a, b, stacked=stacked)
    return plain
