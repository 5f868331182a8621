"""Records the work of a step while it is traced; `tracing` tells it what primitives compute."""

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
class Stretch:
    """A part of the step: the whole, the body of a loop, or what is computed again.

    Attributes:
      count: how often it is gone through, in all.
      turns: how often for every time that what is around it is gone through.
      recomputed: how often its forward pass is done again.
      first, last: which ops of the graph are its own.
      kept: by name of a tensor, what waits in it for the backward pass.
    """

    count: int
    turns: int
    recomputed: int
    first: int = 0
    last: int = 0
    kept: dict[str, SavedTensor] = dataclasses.field(default_factory=dict)


class Recorder:
    """What is found while a step is traced; shared by all copies of the context."""

    def __init__(self, graph: tf.Graph) -> None:
        self.names = DimNames()
        self._work: list[tuple[int, Work, Stretch]] = []  # the first: the op it stands for
        self.whole = Stretch(1, 1, 0)
        self.stretches: list[Stretch] = []
        self._graph = graph
        self._used: dict[str, list[Dims]] = {}

    @property
    def num_ops(self) -> int:
        """Ops of the graph so far."""
        return len(self._graph.get_operations())

    def add(self, work: Work, stretch: Stretch, *, index: int | None = None) -> None:
        """Notes a piece of work; `index`: the op of the graph that does it, None for the last."""
        self._work.append((self.num_ops if index is None else index, work, stretch))

    def counted(self) -> collections.Counter[tuple[Work, int]]:
        """Returns how often every piece of work is done, by how often it is recomputed.

        What a stretch does last leaves it, and no gradient needs it again.
        """
        last = {
            id(stretch): max((i for i, _, s in self._work if s is stretch), default=None)
            for stretch in self.stretches
        }
        work: collections.Counter[tuple[Work, int]] = collections.Counter()
        for index, piece, stretch in self._work:
            is_last = last.get(id(stretch)) == index
            work[piece, stretch.recomputed - is_last] += stretch.count
        return work

    def multiply(
        self,
        form: str,
        a: tf.Tensor,
        b: tf.Tensor,
        out: tf.Tensor,
        stretch: Stretch,
        *,
        index: int | None = None,
    ) -> None:
        """Notes a product of two tensors, and that they wait for the backward pass."""
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
                self.keep(x, stretch)
        product = MatrixProduct(
            form,
            parts[0],
            parts[1],
            parts[2],
            before_a=before[0],
            before_b=before[1],
            turns=stretch.turns,
        )
        self.add(product, stretch, index=index)

    def part(self, x: tf.Tensor, dims: Dims | None = None) -> Part:
        """Returns what is known of a tensor, by its own names or by others."""
        known = self.names.of(x)
        own = known.dims if dims is None else dims
        return Part(tuple(own), sizes_of(x) or (), x.dtype.size, known.learned, known.weight)

    def keep(self, x: tf.Tensor, stretch: Stretch, *, count: int = 1) -> None:
        """Notes that an activation waits for the backward pass."""
        known = self.names.of(x)
        if known.weight is None and x.shape.rank:
            stretch.kept.setdefault(known.root, SavedTensor(self.part(x), count))

    def read_graph(self) -> None:
        """Notes what layers computed without a primitive: products, sums, elementwise ops."""
        for index, op in enumerate(self._graph.get_operations()):
            if not op.outputs or not op.outputs[0].dtype.is_floating:
                continue
            inner = [s for s in self.stretches if s.first <= index < s.last]
            stretch = min(inner, key=lambda s: s.last - s.first, default=self.whole)
            self._read(index, op, stretch)

    def _read(self, index: int, op: Any, stretch: Stretch) -> None:
        form, y = dim_names.einsum_form(op), op.outputs[0]
        if form is not None:
            a, b = op.inputs
            self.multiply(form, a, b, y, stretch, index=index)
        elif op.type in dim_names.REDUCTIONS:
            dims = self.names.of(op.inputs[0]).dims
            over = [dims[i] for i in sorted(dim_names.reduced_dims(op)) if i < len(dims)]
            named = tuple(d for d in over if d is not None)
            if named:
                self.add(Reduction(self.part(y), named), stretch, index=index)
        elif op.type in _KEEPS_ITS_INPUTS | _KEEPS_ITS_OUTPUT and self.names.of(y).learned:
            self.add(Passes(self.part(y), 3, 3), stretch, index=index)
            kept = op.inputs if op.type in _KEEPS_ITS_INPUTS else [y]
            for x in kept:
                if x.shape == y.shape:
                    self.keep(x, stretch)
