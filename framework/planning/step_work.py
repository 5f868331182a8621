"""The work of a training step whose cost depends on the layout, as shapes and dimension names.

    x [batch, length, embed] · w [embed, mlp] -> h [batch, length, mlp]        a MatrixProduct
    h constrained to [batch, length, mlp]                                      a Reshard
    root mean square over embed                                                a Reduction

tracing.py records the work, and cost_model.py computes its cost. Work is independent of a mesh.
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
    """A tensor: its dims, sizes and bytes per element.

    Attributes:
      dims: names; None for a dim that no rule can shard.
      shape: global sizes.
      itemsize: bytes of an element.
      learned: whether it gets a gradient.
      weight: for a weight, its path, or the path of the first weight of its group (see `alike`);
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
      form: an einsum equation, "bld,df->blf". A letter may have different sizes in different
        tensors, such as the height of images before and after a convolution.
      a, b, out: the tensors.
      is_lookup: a is the one-hot form of indices, and no product is computed: the forward pass
        copies rows, and the backward pass sums them.
      before_a, before_b: for each earlier product with the same input, the dims of its other factor
        that the input does not have. The gradients of the input are summed on each device before
        one all-reduce.
      iterations: number of iterations of the loop around it. The gradient of a weight that all
        iterations use is summed on each device before the all-reduce.
    """

    form: str
    a: Part
    b: Part
    out: Part
    is_lookup: bool = False
    before_a: tuple[Dims, ...] = ()
    before_b: tuple[Dims, ...] = ()
    iterations: int = 1

    @property
    def letters(self) -> tuple[str, str, str]:
        """The letters of a, b and out."""
        left, out = self.form.split("->")
        a, b = left.split(",")
        return a, b, out

    @property
    def sizes(self) -> dict[str, int]:
        """{letter: its size in the product}: the size in the output, if it is there."""
        sizes: dict[str, int] = {}
        for letters, part in zip(self.letters, (self.a, self.b, self.out), strict=True):
            for letter, size in zip(letters, part.shape, strict=True):
                is_last_word = part is self.out
                sizes[letter] = size if is_last_word else max(size, sizes.get(letter, 1))
        return sizes


@dataclasses.dataclass(frozen=True)
class Reshard:
    """A sharding constraint with other dimension names than the tensor had before."""

    before: Dims
    after: Part


@dataclasses.dataclass(frozen=True)
class Reduction:
    """Sums (or maxima) over dims: `part` is all-reduced over the devices that shard `over`.

    Attributes:
      part: the result.
      over: names of the dims that are summed.
      forward, backward: number of such sums in the forward and in the backward pass.
    """

    part: Part
    over: tuple[str, ...]
    forward: int = 1
    backward: int = 0


@dataclasses.dataclass(frozen=True)
class Passes:
    """Elementwise work: how often the tensor is read or written, forward and backward."""

    part: Part
    forward: int
    backward: int


@dataclasses.dataclass(frozen=True)
class ReplicaSum:
    """A sum over the replicas of data-parallel execution: `part` is all-reduced.

    Attributes:
      part: the tensor; if it is learned, its gradient is summed too.
    """

    part: Part


@dataclasses.dataclass(frozen=True)
class Halo:
    """Rows of an image that a window needs from neighbouring parts: `width` rows along `dim`."""

    part: Part
    dim: int
    width: int


Work = MatrixProduct | Reshard | Reduction | Passes | Halo | ReplicaSum


@dataclasses.dataclass(frozen=True)
class SavedTensor:
    """An activation saved for the backward pass, `count` times."""

    part: Part
    count: int = 1


@dataclasses.dataclass(frozen=True)
class StepWork:
    """All work of one step, or of one accumulation step.

    Attributes:
      work: {(work, how often it is recomputed): number of times}.
      saved: saved activations.
      recomputed: for every recomputed part of the step, the activations that it saves meanwhile.
      weights: names of the dims of weights.
      unsized: names of the ops whose results have an unknown size.
      replicas: number of replicas of data-parallel execution, each of which has this work; 1 for a
        mesh, whose devices share it.
      list_loops: lines of the loops that DTensor cannot compile, as they need lists of tensors.
    """

    work: Mapping[tuple[Work, int], int]
    saved: tuple[SavedTensor, ...]
    recomputed: tuple[tuple[SavedTensor, ...], ...]
    weights: frozenset[str]
    unsized: tuple[str, ...] = ()
    replicas: int = 1
    list_loops: tuple[str, ...] = ()

    @property
    def flops(self) -> int:
        """Floating-point operations of all products, forward and backward, of the whole batch."""
        total = 0
        for (work, recomputed), count in self.work.items():
            if isinstance(work, MatrixProduct) and not work.is_lookup:
                passes = 1 + recomputed + work.a.learned + work.b.learned
                total += 2 * math.prod(work.sizes.values()) * passes * count
        return total * self.replicas


@dataclasses.dataclass(frozen=True)
class Alike:
    """A group of weights or slots with equal dims, sizes and type.

    Attributes:
      spec: spec of the first one, which represents all.
      paths: paths of all.
      trained: whether they are learned.
    """

    spec: WeightSpec
    paths: tuple[str, ...]
    trained: bool = True

    @property
    def count(self) -> int:
        """Number of weights or slots in the group."""
        return len(self.paths)


def alike(specs: Iterable[WeightSpec], *, trained: Iterable[str] | None = None) -> list[Alike]:
    """Returns specs in groups; `trained` has the paths of the learned ones, None for all."""
    learned = None if trained is None else set(trained)
    groups: dict[Any, list[WeightSpec]] = {}
    for spec in specs:
        is_trained = learned is None or spec.path in learned
        key = (spec.dims, spec.shape, spec.dtype, spec.stacked, is_trained)
        groups.setdefault(key, []).append(spec)
    return [Alike(g[0], tuple(s.path for s in g), key[-1]) for key, g in groups.items()]
