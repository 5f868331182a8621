"""Pieces: a model as an ordered list of parts, between which a pipeline may cut it into stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.layer import Layer
from tekso.framework.theta import SEPARATOR, Theta

Flow: TypeAlias = dict[str, tf.Tensor]
"""What is handed from piece to piece: named tensors, whose dim 0 counts examples."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a model that is never cut.

    Attributes:
      name: what is computed, as a path: "embedding", "stack/layers/0", …, "softmax".
      layers: the layers whose weights it reads, by their paths from the model. Two pieces may read
        the same layer (an embedding and the softmax that is tied to it).
      run: `run(theta, flow, ctx) -> flow`, pure. Of the model's theta it reads `layers` alone.
    """

    name: str
    layers: Mapping[str, Layer]
    run: Callable[[Theta, Flow, StepContext], Flow]

    def owns(self, path: str) -> bool:
        """Whether the weight at a path from the model is read by this piece."""
        return any(path.startswith(layer_path + SEPARATOR) for layer_path in self.layers)

    def theta(self, flat: Mapping[str, Any]) -> Theta:
        """Returns the part of the model's theta that `run` reads.

        Args:
          flat: {path from the model: tensor} of at least the weights that this piece reads.
        """
        root = Theta()
        for path, layer in self.layers.items():
            prefix = path + SEPARATOR
            own = {p[len(prefix) :]: t for p, t in flat.items() if p.startswith(prefix)}
            node = root
            *parents, name = path.split(SEPARATOR)
            for parent in parents:
                node = node.setdefault(parent, Theta())
            node[name] = layer.theta(own)
        return root
