"""Records the work of a step while tracing.py traces it."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tekso.framework.costs import graph_work, op_kinds
from tekso.framework.execution.workarounds.op_places import place_of
from tekso.framework.planning import dim_names
from tekso.framework.planning.dim_names import DimNames, sizes_of
from tekso.framework.planning.step_work import (
    Alike,
    Dims,
    MatrixProduct,
    Part,
    Passes,
    Reduction,
    SavedTensor,
    StepWork,
    Work,
)
from tekso.framework.symbolic import placeholder
from tekso.framework.weight_spec import WeightSpec

_SAVES_ITS_INPUTS = frozenset({"Mul", "RealDiv", "SquaredDifference", "Square", "Log"})
_SAVES_ITS_OUTPUT = frozenset({"Exp", "Sigmoid", "Tanh", "Sqrt", "Rsqrt", "Softmax", "Softplus"})


@dataclasses.dataclass
class Region:
    """A part of the step: the whole step, the body of a loop, or a recomputed part.

    Attributes:
      count: how often it runs in total.
      iterations: how often it runs for each run of the part around it.
      recomputed: how often its forward pass is recomputed.
      first, last: range of its ops in the graph.
      within: of a loop that is not recomputed: the part around it, which has its saved activations.
      saved: {name of a tensor: saved activation}.
    """

    count: int
    iterations: int
    recomputed: int
    first: int = 0
    last: int = 0
    within: Region | None = None
    saved: dict[str, SavedTensor] = dataclasses.field(default_factory=dict)

    @property
    def is_recomputed(self) -> bool:
        """Whether the backward pass recomputes it."""
        return self.within is None


class Mark(NamedTuple):
    """The numbers of ops, works and parts of a recorder at some time, and the uses of tensors."""

    ops: int
    work: int
    regions: int
    used: dict[str, list[Dims]]


class Recorder:
    """The recorded work of a step; shared by all copies of the context."""

    def __init__(self, graph: tf.Graph) -> None:
        self.names = DimNames()
        self._work: list[tuple[int, Work, Region]] = []  # (index of its op, work, part)
        self.whole = Region(1, 1, 0)
        self.regions: list[Region] = []
        self._graph = graph
        self._used: dict[str, list[Dims]] = {}
        self._forgotten: list[range] = []  # of ops in the graph
        self.list_loops: list[str] = []  # lines of loops that have, or save, lists of tensors

    @property
    def num_ops(self) -> int:
        """Number of ops in the graph so far."""
        return len(self._graph.get_operations())

    def weights(
        self, groups: Iterable[Alike], specs: Mapping[str, WeightSpec], dtype: str
    ) -> dict[str, tf.Tensor]:
        """Returns a placeholder for every weight, as layers get it.

        Args:
          groups: the weights in groups; work refers to the first one of a group.
          specs: specs of the weights.
          dtype: type to which float32 weights are cast.
        """
        found = {}
        for group in groups:
            for path in group.paths:
                spec = specs[path]
                x = placeholder(spec)
                self.names.register(x, spec.dims, learned=group.trained, weight=group.spec.path)
                is_cast = spec.trainable and spec.dtype == "float32"
                found[path] = tf.cast(x, dtype) if is_cast else x
        return found

    def array(self, shape: Sequence[int], dtype: Any) -> tf.Tensor:
        """Returns a placeholder for an array of a batch."""
        x = placeholder(tf.TensorSpec(shape, dtype))
        dims = ("batch",) + (None,) * (len(shape) - 1)
        return self.names.register(x, dims[: len(shape)], learned=False)

    def step_work(self, specs: Mapping[str, WeightSpec]) -> StepWork:
        """Reads the graph, and returns all work.

        Args:
          specs: specs of all weights of the task.
        """
        self.read_graph()
        return StepWork(
            dict(self.counted()),
            tuple(self.whole.saved.values()),
            tuple(tuple(one.saved.values()) for one in self.regions if one.is_recomputed),
            frozenset(d for spec in specs.values() for d in spec.dims if d is not None),
            tuple(op.name for op in graph_work.unsized_ops(self._graph)),
            list_loops=tuple(self.list_loops),
        )

    def add(self, work: Work, region: Region, *, index: int | None = None) -> None:
        """Records a piece of work; `index`: index of its op in the graph, None for the last op."""
        self._work.append((self.num_ops if index is None else index, work, region))

    def mark(self) -> Mark:
        """Returns a mark of what was recorded so far."""
        used = {name: list(dims) for name, dims in self._used.items()}
        return Mark(self.num_ops, len(self._work), len(self.regions), used)

    def forget(self, since: Mark) -> None:
        """Forgets what was recorded since a mark, with the ops that were added to the graph."""
        self._forgotten.append(range(since.ops, self.num_ops))
        del self._work[since.work :], self.regions[since.regions :]
        self._used = since.used

    def counted(self) -> collections.Counter[tuple[Work, int]]:
        """Returns {(work, how often it is recomputed): number of times}.

        The last work of a part is its output, which no gradient needs, so it is not recomputed.
        """
        last = {
            id(region): max((i for i, _, s in self._work if s is region), default=None)
            for region in self.regions
            if region.is_recomputed
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
                self.save(x, region)
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

    def save(self, x: tf.Tensor, region: Region, *, count: int = 1) -> None:
        """Records that an activation is saved for the backward pass."""
        known = self.names.of(x)
        if known.weight is None and x.shape.rank:
            region.saved.setdefault(known.root, SavedTensor(self.part(x), count))

    def read_graph(self) -> None:
        """Records ops that layers use directly: products, convolutions, sums, elementwise ops."""
        for index, op in enumerate(self._graph.get_operations()):
            if any(index in forgotten for forgotten in self._forgotten):
                continue
            inner = [s for s in self.regions if s.first <= index < s.last]
            region = min(inner, key=lambda s: s.last - s.first, default=self.whole)
            self._read(index, op, region)
        for region in reversed(self.regions):  # inner ones come after those around them
            if region.within is not None:
                _pass_on(region.saved, region.within, times=region.iterations)

    def _read(self, index: int, op: Any, region: Region) -> None:
        times, graphs = graph_work.inside(op)
        if graphs:
            self._read_inside(index, op, region, times)
        elif op.outputs and op.outputs[0].dtype.is_floating:
            self._read_op(index, op, region)

    def _read_inside(self, index: int, op: Any, region: Region, times: int) -> None:
        """Records the ops of the body of a loop, of a function, or of the longest branch."""
        graph = self.names.enter(op)
        is_loop = op.type in op_kinds.LOOPS
        inner = Region(region.count * times, times, region.recomputed) if is_loop else region
        for one in graph.get_operations():
            self._read(index, one, inner)
        if is_loop:
            own: dict[str, SavedTensor] = {}
            outer = {self.names.of(x).root for x in op.inputs}
            for name, saved in inner.saved.items():
                (region.saved if name in outer else own).setdefault(name, saved)
            has_list = any(t.dtype == tf.variant for t in graph.inputs)
            if has_list or (own and any(map(_is_differentiated, op.outputs))):
                self.list_loops.append(place_of(op))
            _pass_on(own, region, times=times)

    def _read_op(self, index: int, op: Any, region: Region) -> None:
        form, y = dim_names.einsum_form(op), op.outputs[0]
        if form is not None:
            a, b = op.inputs
            self.multiply(form, a, b, y, region, index=index)
        elif op.type in op_kinds.CONVOLUTIONS:
            self._convolve(index, op, region)
        elif op.type in dim_names.REDUCTIONS:
            dims = self.names.of(op.inputs[0]).dims
            over = [dims[i] for i in sorted(dim_names.reduced_dims(op)) if i < len(dims)]
            named = tuple(d for d in over if d is not None)
            if named:
                self.add(Reduction(self.part(y), named), region, index=index)
        elif op.type in _SAVES_ITS_INPUTS | _SAVES_ITS_OUTPUT and self.names.of(y).learned:
            self.add(Passes(self.part(y), 3, 3), region, index=index)
            saved = op.inputs if op.type in _SAVES_ITS_INPUTS else [y]
            for x in saved:
                if x.shape == y.shape:
                    self.save(x, region)

    def _convolve(self, index: int, op: Any, region: Region) -> None:
        """Records a convolution; a transposed one has the products of that with the same filter.

        So the input of a transposed convolution is where its windows end: the output of the other.
        """
        is_transposed = op.type in op_kinds.INPUT_GRADIENTS
        x, w = op.inputs[2 if is_transposed else 0], op.inputs[1]
        image, filters, out = (self.part(t) for t in (x, w, op.outputs[0]))
        if op.get_attr("data_format").decode().startswith("NC"):
            image, out = (_channels_last(part) for part in (image, out))
        if filters.learned:
            self.save(x, region)
        if is_transposed:
            image, out = dataclasses.replace(out, learned=image.learned), image
        count = len(image.shape) - 2
        space, kernel = "xyz"[:count], "jkl"[:count]
        *_, before, after = filters.shape
        form = f"b{space}i,{kernel}io->b{space}o"
        if op.type in op_kinds.DEPTHWISE:
            form = f"b{space}i,{kernel}io->b{space}io"
            out = dataclasses.replace(
                out, dims=(*out.dims[:-1], None, None), shape=(*out.shape[:-1], before, after)
            )
        # With groups, a number of the result depends on the channels of one of them only.
        image = dataclasses.replace(image, shape=(*image.shape[:-1], before))
        self.add(
            MatrixProduct(form, image, filters, out, iterations=region.iterations),
            region,
            index=index,
        )


def _is_differentiated(x: tf.Tensor) -> bool:
    """Returns whether a tensor is used other than by stop_gradient."""
    return any(
        any(map(_is_differentiated, op.outputs)) if op.type == "Identity" else True
        for op in x.consumers()
        if x.dtype.is_floating and op.type != "StopGradient"
    )


def _pass_on(saved: Mapping[str, SavedTensor], to: Region, *, times: int) -> None:
    """Adds what every iteration of a loop saves to what the part around it saves."""
    for name, one in saved.items():
        to.saved.setdefault(name, dataclasses.replace(one, count=one.count * times))


def _channels_last(part: Part) -> Part:
    """Returns images [batch, channels, ...] with the channels at the end."""
    dims, shape = ((x[0], *x[2:], x[1]) for x in (part.dims, part.shape))
    return dataclasses.replace(part, dims=dims, shape=shape)
