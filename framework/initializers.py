"""Initializers: initial values of weights, drawn on the host in blocks.

A weight is drawn in blocks of 65,536 elements in row-major order, each from a generator seeded with
(seed, weight path, block). So a process can draw only a slice of a weight, initial values do not
depend on the layout, and layer i of a repeated stack has the same initial values as layer i of an
unrolled stack.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tekso.framework.params import REQUIRED, Configurable, param

BLOCK_SIZE = 65_536


class Initializer(Configurable):
    """Base class of all initializers. A subclass defines `block(generator, size, fans)`.

        class Half(Initializer):
            def block(self, generator, size, fans):
                return generator.uniform(0, 0.5, size).astype(np.float32)

    A weight takes its Params: `self.weight(..., init=Half.Params())`.
    """

    class Params(Configurable.Params):
        """Params of an initializer."""

    def block(self, generator: np.random.Generator, size: int, fans: Fans) -> np.ndarray:
        """Returns `size` float32 numbers that depend only on the generator's state and the fans.

        Args:
          generator: the generator of this block.
          size: number of elements, of a block in row-major order of the weight.
          fans: numbers of inputs and outputs, `fans.fan_in` and `fans.fan_out`.

        Shapes:
          returns: [size]
        """
        raise NotImplementedError(f"{type(self).__name__} has no block()")


class Fans(NamedTuple):
    """The number of inputs of each output unit, and of outputs of each input unit."""

    fan_in: int
    fan_out: int


class Constant(Initializer):
    """All elements have the same value."""

    class Params(Initializer.Params):
        """Params of Constant."""

        value: float = param("The value of every element.", default=0.0)

    def block(self, generator: np.random.Generator, size: int, fans: Fans) -> np.ndarray:
        """See `Initializer`."""
        return np.full(size, self.params.value, np.float32)


class Zeros(Constant):
    """Every element is 0."""

    class Params(Constant.Params):
        """Params of Zeros."""


class Ones(Constant):
    """Every element is 1."""

    class Params(Constant.Params):
        """Params of Ones."""

        value: float = param("The value of every element.", default=1.0)


class Values(Initializer):
    """Given values, in row-major order of the weight; at most 65,536.

    Raises:
      ValueError: the weight has another number of elements.
    """

    class Params(Initializer.Params):
        """Params of Values."""

        values: list[float] = param("The values.", default=REQUIRED)

    def block(self, generator: np.random.Generator, size: int, fans: Fans) -> np.ndarray:
        """See `Initializer`."""
        found = np.asarray(self.params.values, np.float32)
        if len(found) != size or size > BLOCK_SIZE:
            raise ValueError(
                f"Values has {len(found)} values for a weight of {size} elements, but must have as "
                f"many as the weight, and at most {BLOCK_SIZE}"
            )
        return found


class Normal(Initializer):
    """Normal distribution with mean 0."""

    class Params(Initializer.Params):
        """Params of Normal."""

        stddev: float = param("Standard deviation.", default=1.0)

    def block(self, generator: np.random.Generator, size: int, fans: Fans) -> np.ndarray:
        """See `Initializer`."""
        return _normal(generator, size) * np.float32(self.params.stddev)


class TruncatedNormal(Normal):
    """Normal distribution; values beyond two standard deviations are redrawn."""

    class Params(Normal.Params):
        """Params of TruncatedNormal."""

    def block(self, generator: np.random.Generator, size: int, fans: Fans) -> np.ndarray:
        """See `Initializer`."""
        return _truncated_normal(generator, size) * np.float32(self.params.stddev)


class Uniform(Initializer):
    """Uniform distribution on [-limit, limit)."""

    class Params(Initializer.Params):
        """Params of Uniform."""

        limit: float = param("Largest absolute value.", default=1.0)

    def block(self, generator: np.random.Generator, size: int, fans: Fans) -> np.ndarray:
        """See `Initializer`."""
        return _uniform(generator, size) * np.float32(self.params.limit)


class GlorotUniform(Initializer):
    """Uniform distribution on +-scale * sqrt(6 / (fan_in + fan_out)).

    Source: Glorot & Bengio 2010, eq. 16.
    """

    class Params(Initializer.Params):
        """Params of GlorotUniform."""

        scale: float = param("Factor on the limit.", default=1.0)

    def block(self, generator: np.random.Generator, size: int, fans: Fans) -> np.ndarray:
        """See `Initializer`."""
        limit = self.params.scale * math.sqrt(6.0 / (fans.fan_in + fans.fan_out))
        return _uniform(generator, size) * np.float32(limit)


class GlorotNormal(Initializer):
    """Normal distribution with standard deviation scale * sqrt(2 / (fan_in + fan_out)).

    Source: Glorot & Bengio 2010, section 4.2.1.
    """

    class Params(Initializer.Params):
        """Params of GlorotNormal."""

        scale: float = param("Factor on the standard deviation.", default=1.0)

    def block(self, generator: np.random.Generator, size: int, fans: Fans) -> np.ndarray:
        """See `Initializer`."""
        stddev = self.params.scale * math.sqrt(2.0 / (fans.fan_in + fans.fan_out))
        return _normal(generator, size) * np.float32(stddev)


class HeNormal(Initializer):
    """Normal distribution with standard deviation scale * sqrt(2 / fan_in), for ReLU layers.

    Source: He et al. 2015, eq. 10.
    """

    class Params(Initializer.Params):
        """Params of HeNormal."""

        scale: float = param("Factor on the standard deviation.", default=1.0)

    def block(self, generator: np.random.Generator, size: int, fans: Fans) -> np.ndarray:
        """See `Initializer`."""
        stddev = self.params.scale * math.sqrt(2.0 / fans.fan_in)
        return _normal(generator, size) * np.float32(stddev)


class LecunNormal(Initializer):
    """Normal distribution with standard deviation scale / sqrt(fan_in).

    A linear layer with such weights preserves the variance of its input.

    Source: LeCun et al. 1998, "Efficient BackProp", eq. 16.
    """

    class Params(Initializer.Params):
        """Params of LecunNormal."""

        scale: float = param("Factor on the standard deviation.", default=1.0)

    def block(self, generator: np.random.Generator, size: int, fans: Fans) -> np.ndarray:
        """See `Initializer`."""
        stddev = self.params.scale / math.sqrt(fans.fan_in)
        return _normal(generator, size) * np.float32(stddev)


def draw(
    initializer: Initializer,
    shape: Sequence[int],
    *,
    seed: int,
    path: str,
    fans: Fans,
    slices: Sequence[slice] | None = None,
) -> np.ndarray:
    """Returns the initial values of a weight, or of a slice of it.

    Args:
      initializer: the initializer.
      shape: shape of the whole weight.
      seed: seed of the run.
      path: path of the weight.
      fans: fans of the weight.
      slices: one slice per dim; None: the whole weight.

    Shapes:
      returns: float32; `shape`, or the shape of the slice
    Raises:
      ValueError: the slice of dim 0 has a step other than 1.
    """
    size = math.prod(shape)
    if isinstance(initializer, Constant):
        part = tuple(len(range(*s.indices(n))) for s, n in zip(slices or (), shape, strict=False))
        found: np.ndarray = initializer.block(np.random.default_rng(0), 1, fans)[0] * np.ones(
            part if slices is not None else tuple(shape), np.float32
        )
        return found
    start, stop = _flat_range(shape, slices)
    first = start // BLOCK_SIZE
    blocks = []
    for block in range(first, -(-stop // BLOCK_SIZE)):
        count = min(BLOCK_SIZE, size - block * BLOCK_SIZE)
        blocks.append(initializer.block(_generator(seed, path, block), count, fans))
    flat = np.concatenate(blocks) if blocks else np.zeros(0, np.float32)
    if slices is None or not shape:
        return flat.reshape(shape)
    # The blocks contain whole rows of dim 0, from the first to the last selected row.
    row = size // shape[0]
    drawn = flat[start - first * BLOCK_SIZE :][: stop - start]
    rows = drawn.reshape((stop - start) // row, *shape[1:])
    return rows[(slice(None), *slices[1:])]


def _flat_range(shape: Sequence[int], slices: Sequence[slice] | None) -> tuple[int, int]:
    size = math.prod(shape)
    if slices is None or not shape:
        return 0, size
    start, stop, step = slices[0].indices(shape[0])
    if step != 1:
        raise ValueError(f"slices must have step 1, but dim 0 has {slices[0]}")
    row = size // shape[0]
    return start * row, max(start, stop) * row


def _generator(seed: int, path: str, block: int) -> np.random.Generator:
    digest = hashlib.sha256(f"{seed}\0{path}\0{block}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=np.frombuffer(digest[:16], np.uint64)))


def _normal(generator: np.random.Generator, size: int) -> np.ndarray:
    return generator.standard_normal(size, np.float32)


def _truncated_normal(generator: np.random.Generator, size: int) -> np.ndarray:
    x = _normal(generator, size)
    while (outside := np.flatnonzero(np.abs(x) > 2)).size:
        x[outside] = _normal(generator, outside.size)
    return x


def _uniform(generator: np.random.Generator, size: int) -> np.ndarray:
    return generator.random(size, np.float32) * np.float32(2) - np.float32(1)
