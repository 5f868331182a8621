"""What a training step computes, as far as a layout decides what it costs: shapes and names only.

    x [batch, length, embed] · w [embed, mlp] -> h [batch, length, mlp]        a Product
    h pinned as [batch, length, mlp]                                           a Repin
    root mean square over embed                                                a Reduction

Work is recorded by `tracing` and priced by `costs`. It knows no mesh.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from tekso.framework.weight_spec import WeightSpec

Dims = tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class Part:
    """A tensor: its dims, sizes and bytes an element.

    Attributes:
      dims: names, None for a dim that no rule can split.
      shape: global sizes.
      itemsize: bytes of an element.
      learned: whether it gets a gradient.
      weight: path of the weight that is used here, or of the first that is like it (see `alike`);
        None for an activation.
    """

    dims: Dims
    shape: tuple[int, ...]
    itemsize: int = 4
    learned: bool = True
    weight: str | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.itemsize


@dataclasses.dataclass(frozen=True)
class MatrixProduct:
    """A sum of products of two tensors: out = einsum(form, a, b).

    Attributes:
      form: as of einsum, "bld,df->blf". A letter may have other sizes in several tensors, as the
        height of the images before and after a convolution.
      a, b, out: the tensors.
      is_lookup: a is the one-hot form of indices, and no product is computed: rows are copied
        forwards, and added up backwards.
      before_a, before_b: for earlier products of the same input, the dims that it lacks. Their
        gradients of it are added up before they are summed over devices, together with this one.
      turns: of the loop around it. The gradient of a weight that all turns use is added up before
        it is summed over devices.
    """

    form: str
    a: Part
    b: Part
    out: Part
    is_lookup: bool = False
    before_a: tuple[Dims, ...] = ()
    before_b: tuple[Dims, ...] = ()
    turns: int = 1

    @property
    def letters(self) -> tuple[str, str, str]:
        """The letters of a, b and out."""
        left, out = self.form.split("->")
        a, b = left.split(",")
        return a, b, out

    @property
    def sizes(self) -> dict[str, int]:
        """By letter how many there are of it in the product: that of the output, if it has it."""
        sizes: dict[str, int] = {}
        for letters, part in zip(self.letters, (self.a, self.b, self.out), strict=True):
            for letter, size in zip(letters, part.shape, strict=True):
                is_last_word = part is self.out
                sizes[letter] = size if is_last_word else max(size, sizes.get(letter, 1))
        return sizes


@dataclasses.dataclass(frozen=True)
class Repin:
    """A tensor that a layer pins by other names than those it had."""

    before: Dims
    after: Part


@dataclasses.dataclass(frozen=True)
class Reduction:
    """Sums (or maxima) over dims: `part` is added up over the devices that split `over`.

    Attributes:
      part: what is left.
      over: names of the dims that are summed.
      forward, backward: how many such sums the forward and the backward pass make.
    """

    part: Part
    over: tuple[str, ...]
    forward: int = 1
    backward: int = 0


@dataclasses.dataclass(frozen=True)
class Passes:
    """Elementwise work: so many times the tensor is read or written."""

    part: Part
    forward: int
    backward: int


@dataclasses.dataclass(frozen=True)
class Halo:
    """Rows of an image that a window needs of the neighbours: `width` of them along `dim`."""

    part: Part
    dim: int
    width: int


Work = MatrixProduct | Repin | Reduction | Passes | Halo


@dataclasses.dataclass(frozen=True)
class SavedTensor:
    """A tensor that waits for the backward pass, `count` times."""

    part: Part
    count: int = 1


@dataclasses.dataclass(frozen=True)
class StepWork:
    """All work of one step (of one part of the batch, where gradients are accumulated).

    Attributes:
      work: {(work, how often it is recomputed): number of times}.
      kept: activations that wait for the backward pass.
      recomputed: for every stretch that is computed again, the activations it makes meanwhile.
      weights: names of the dims of weights.
    """

    work: Mapping[tuple[Work, int], int]
    kept: tuple[SavedTensor, ...]
    recomputed: tuple[tuple[SavedTensor, ...], ...]
    weights: frozenset[str]

    @property
    def flops(self) -> int:
        """Floating-point operations of all products, forwards and backwards, on all devices."""
        total = 0
        for (work, recomputed), count in self.work.items():
            if isinstance(work, MatrixProduct) and not work.is_lookup:
                passes = 1 + recomputed + work.a.learned + work.b.learned
                total += 2 * math.prod(work.sizes.values()) * passes * count
        return total


@dataclasses.dataclass(frozen=True)
class Alike:
    """Weights or slots of equal dims, sizes and type: the first stands for all.

    Attributes:
      spec: the first.
      paths: of all.
      trained: whether they are learned.
    """

    spec: WeightSpec
    paths: tuple[str, ...]
    trained: bool = True

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.paths)


def alike(specs: Iterable[WeightSpec], *, trained: Iterable[str] | None = None) -> list[Alike]:
    """Returns specs in groups; `trained` has the paths of those that are learned, None for all."""
    learned = None if trained is None else set(trained)
    groups: dict[Any, list[WeightSpec]] = {}
    for spec in specs:
        is_trained = learned is None or spec.path in learned
        key = (spec.dims, spec.shape, spec.dtype, spec.stacked, is_trained)
        groups.setdefault(key, []).append(spec)
    return [Alike(g[0], tuple(s.path for s in g), key[-1]) for key, g in groups.items()]
