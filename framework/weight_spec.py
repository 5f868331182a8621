"""WeightSpec: shape, dims, dtype and initial values of a weight, before it is allocated."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tekso.framework import initializers
from tekso.framework.initializers import Fans, Initializer
from tekso.framework.theta import SEPARATOR

STACK_DIM = "layers"  # the leading dim over which the weights of a repeated layer are stacked
ANY_INDEX = "*"

_NO_FANS = Fans(1, 1)


class SpecPlace(NamedTuple):
    """Where a layer is below another one; by default, it is that one.

    Attributes:
      path: the path to the layer, with a separator at the end if it is not empty.
      template: the path with "*" for the index of every stack dim, in the same form.
      stacks: sizes of the stacks that contain the layer, outermost first.
    """

    path: str = ""
    template: str = ""
    stacks: tuple[int, ...] = ()

    def of_child(self, name: str, stack_size: int | None) -> SpecPlace:
        """Returns the place of a child of the layer, which may be a stack of that size."""
        path, template = f"{self.path}{name}{SEPARATOR}", f"{self.template}{name}{SEPARATOR}"
        if stack_size is None:
            return SpecPlace(path, template, self.stacks)
        return SpecPlace(path, f"{template}{ANY_INDEX}{SEPARATOR}", (*self.stacks, stack_size))


@dataclasses.dataclass(frozen=True)
class WeightSpec:
    """The declaration of a weight, known before anything is allocated.

    Attributes:
      path: path of the weight in theta: "decoder/layers/ffn/w".
      shape: shape, with the stack dims first.
      dims: a name for every dim, or None for a dim that is never sharded.
      init: draws the initial values.
      dtype: "float32", "bfloat16", …
      trainable: whether a learner changes it; statistics are not trainable.
      stacked: number of leading stack dims (each named "layers").
      fans: fan_in and fan_out of one layer's weight.
      template: the path with "*" for the index of every stack dim: the paths of the weights if the
        stack were unrolled. Initial values are drawn from these paths.
      scale: the factor of products with the weight, if a setting of the layer determines it
        without changing the weight; None: no such factor. See `framework/run/weight_scales.py`.
      most: the largest value of an element after an update; None: no limit.
    """

    path: str
    shape: tuple[int, ...]
    dims: tuple[str | None, ...]
    init: Initializer
    dtype: str = "float32"
    trainable: bool = True
    stacked: int = 0
    fans: Fans = _NO_FANS
    template: str = ""
    scale: float | None = None
    most: float | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of all elements."""
        found: int = self.size * tf.as_dtype(self.dtype).size
        return found

    def below(self, place: SpecPlace) -> WeightSpec:
        """Returns the spec as a layer above declares it, from which `place` is the layer's."""
        return dataclasses.replace(
            self,
            path=place.path + self.path,
            shape=(*place.stacks, *self.shape),
            dims=(*[STACK_DIM] * len(place.stacks), *self.dims),
            stacked=len(place.stacks) + self.stacked,
            template=place.template + self.template,
        )

    def described(self) -> dict[str, Any]:
        """Returns what a checkpoint says of the weight: shape, dims, dtype and scale, for JSON."""
        scale = {} if self.scale is None else {"scale": self.scale}
        return {"shape": list(self.shape), "dims": list(self.dims), "dtype": self.dtype, **scale}

    def initial_value(self, seed: int, slices: Sequence[slice] | None = None) -> np.ndarray:
        """Returns the initial values of the whole weight, or of a slice.

        Args:
          seed: seed of the run.
          slices: one slice per dim; None: the whole weight.

        Returns: array of `dtype`, with `shape` or the shape of the slice.
        """
        slices = tuple(slices) if slices is not None else None
        inner_shape, inner = self.shape[self.stacked :], slices and slices[self.stacked :]
        ranges = [
            range(n)[slices[d]] if slices is not None else range(n)
            for d, n in enumerate(self.shape[: self.stacked])
        ]
        parts = [
            initializers.draw(
                self.init,
                inner_shape,
                seed=seed,
                path=self.path_of_layer(index),
                fans=self.fans,
                slices=inner,
            )
            for index in itertools.product(*ranges)
        ]
        if self.stacked:
            value = np.stack(parts).reshape(*map(len, ranges), *parts[0].shape)
        else:
            value = parts[0]
        return value.astype(tf.as_dtype(self.dtype).as_numpy_dtype)

    def path_of_layer(self, index: Sequence[int]) -> str:
        """Returns the path that one layer of a repeated stack has in an unrolled one."""
        path = self.template
        for i in index:
            path = path.replace(ANY_INDEX, str(i), 1)
        return path
