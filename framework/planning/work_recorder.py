"""Records the work of a step while tracing.py traces it."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import tensorflow as tf

from tekso.framework.planning import dim_names
from tekso.framework.planning.dim_names import DimNames, sizes_of
from tekso.framework.planning.step_work import (
    Dims,
    MatrixProduct,
    Part,
    Passes,
    Reduction,
    SavedTensor,
    Work,
)

_KEEPS_ITS_INPUTS = frozenset({"Mul", "RealDiv", "SquaredDifference", "Square", "Log"})
_KEEPS_ITS_OUTPUT = frozenset({"Exp", "Sigmoid", "Tanh", "Sqrt", "Rsqrt", "Softmax", "Softplus"})


@dataclasses.dataclass
class Region:
    """A part of the step: the whole step, the body of a loop, or a recomputed part.

    Attributes:
      count: how often it runs in total.
      iterations: how often it runs for each run of the part around it.
      recomputed: how often its forward pass is recomputed.
      first, last: range of its ops in the graph.
      saved: {name of a tensor: saved activation}.
    """

    count: int
    iterations: int
    recomputed: int
    first: int = 0
    last: int = 0
    saved: dict[str, SavedTensor] = dataclasses.field(default_factory=dict)


class Recorder:
    """The recorded work of a step; shared by all copies of the context."""

    def __init__(self, graph: tf.Graph) -> None:
        self.names = DimNames()
        self._work: list[tuple[int, Work, Region]] = []  # (index of its op, work, part)
        self.whole = Region(1, 1, 0)
        self.regions: list[Region] = []
        self._graph = graph
        self._used: dict[str, list[Dims]] = {}

    @property
    def num_ops(self) -> int:
        """Number of ops in the graph so far."""
        return len(self._graph.get_operations())

    def add(self, work: Work, region: Region, *, index: int | None = None) -> None:
        """Records a piece of work; `index`: index of its op in the graph, None for the last op."""
        self._work.append((self.num_ops if index is None else index, work, region))

    def counted(self) -> collections.Counter[tuple[Work, int]]:
        """Returns {(work, how often it is recomputed): number of times}.

        The last work of a part is its output, which no gradient needs, so it is not recomputed.
        """
        last = {
            id(region): max((i for i, _, s in self._work if s is region), default=None)
            for region in self.regions
        }
        work: collections.Counter[tuple[Work, int]] = collections.Counter()
        for index, piece, region in self._work:
            is_last = last.get(id(region)) == index
            work[piece, region.recomputed - is_last] += region.count
        return work

    def multiply(
        self,
        form: str,
        a: tf.Tensor,
        b: tf.Tensor,
        out: tf.Tensor,
        region: Region,
        *,
        index: int | None = None,
    ) -> None:
        """Records a product of two tensors, which are saved for the backward pass."""
        parts = [self.part(x) for x in (a, b, out)]
        letters = dim_names.letters_of(form)
        before = []
        for own, other, x in ((0, 1, a), (1, 0, b)):
            pairs = zip(letters[other], parts[other].dims, strict=True)
            lacking = tuple(dim for letter, dim in pairs if letter not in letters[own])
            earlier = self._used.setdefault(self.names.of(x).root, [])
            before.append(tuple(earlier))
            earlier.append(lacking)
            if parts[other].learned:
                self.keep(x, region)
        product = MatrixProduct(
            form,
            parts[0],
            parts[1],
            parts[2],
            before_a=before[0],
            before_b=before[1],
            iterations=region.iterations,
        )
        self.add(product, region, index=index)

    def part(self, x: tf.Tensor, dims: Dims | None = None) -> Part:
        """Returns a tensor as a Part, with its own dimension names or with `dims`."""
        known = self.names.of(x)
        own = known.dims if dims is None else dims
        return Part(tuple(own), sizes_of(x) or (), x.dtype.size, known.learned, known.weight)

    def keep(self, x: tf.Tensor, region: Region, *, count: int = 1) -> None:
        """Records that an activation is saved for the backward pass."""
        known = self.names.of(x)
        if known.weight is None and x.shape.rank:
            region.saved.setdefault(known.root, SavedTensor(self.part(x), count))

    def read_graph(self) -> None:
        """Records ops that layers use directly: products, sums, elementwise ops."""
        for index, op in enumerate(self._graph.get_operations()):
            if not op.outputs or not op.outputs[0].dtype.is_floating:
                continue
            inner = [s for s in self.regions if s.first <= index < s.last]
            region = min(inner, key=lambda s: s.last - s.first, default=self.whole)
            self._read(index, op, region)

    def _read(self, index: int, op: Any, region: Region) -> None:
        form, y = dim_names.einsum_form(op), op.outputs[0]
        if form is not None:
            a, b = op.inputs
            self.multiply(form, a, b, y, region, index=index)
        elif op.type in dim_names.REDUCTIONS:
            dims = self.names.of(op.inputs[0]).dims
            over = [dims[i] for i in sorted(dim_names.reduced_dims(op)) if i < len(dims)]
            named = tuple(d for d in over if d is not None)
            if named:
                self.add(Reduction(self.part(y), named), region, index=index)
        elif op.type in _KEEPS_ITS_INPUTS | _KEEPS_ITS_OUTPUT and self.names.of(y).learned:
            self.add(Passes(self.part(y), 3, 3), region, index=index)
            saved = op.inputs if op.type in _KEEPS_ITS_INPUTS else [y]
            for x in saved:
                if x.shape == y.shape:
                    self.keep(x, region)
