"""Propagates the names of dims through the ops of a graph.

    x [batch, length, embed]  ── transpose ──►  [length, batch, embed]
                              ── mean over the last ──►  [length, batch]

Ops that move dims are handled exactly. For any other op, a dim of the output gets the name of the
input dim at the same position, counted from the last, if the sizes are equal. This guess can be
wrong. It is used only to estimate costs, never for the layout of a tensor.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import tensorflow as tf

from tekso.framework.costs import graph_work, op_kinds
from tekso.framework.planning.step_work import Dims

REDUCTIONS = op_kinds.SUMS | {"Any", "All"}

_SAME_TENSOR = frozenset({"Identity", "Reshape", "ExpandDims", "Squeeze", "Transpose"})
_MATCHED = frozenset({"Reshape", "ExpandDims", "Squeeze", "StridedSlice", "Pack", "Unpack"})
_NO_GRADIENT = frozenset({"StopGradient", "OneHot", "Shape", "Size", "Rank"})


@dataclasses.dataclass(frozen=True)
class Known:
    """Properties of a tensor.

    Attributes:
      dims: names of its dims.
      learned: whether it depends on a weight, so that it gets a gradient.
      weight: path of the weight if it is a cast or reshaped weight; otherwise None.
      root: key of the tensor that it is a reshaped form of; otherwise its own key.
    """

    dims: Dims
    learned: bool
    weight: str | None
    root: str


class DimNames:
    """Properties of the tensors of a graph and of those inside it, inferred on demand."""

    def __init__(self) -> None:
        self._known: dict[str, Known] = {}  # by `key`

    def register(
        self, x: tf.Tensor, dims: Dims, *, learned: bool, weight: str | None = None
    ) -> tf.Tensor:
        """Sets the properties of a tensor; returns the tensor."""
        self._known[key(x)] = Known(tuple(dims), learned, weight, key(x))
        return x

    def pass_on(self, x: tf.Tensor, to: tf.Tensor, *, is_changed: bool) -> None:
        """Gives the input of an inner graph the properties of the tensor that it is given.

        Args:
          x: the tensor.
          to: the input.
          is_changed: whether later iterations of a loop are given what the graph computes.
        """
        known = self.of(x)
        if is_changed:
            known = Known(known.dims, to.dtype.is_floating, None, key(to))
        self._known[key(to)] = known

    def rename(self, x: tf.Tensor, dims: Dims) -> None:
        """Replaces the dimension names of a tensor."""
        self._known[key(x)] = dataclasses.replace(self.of(x), dims=tuple(dims))

    def of(self, x: tf.Tensor) -> Known:
        """Returns the properties of a tensor."""
        waiting = [x]
        while waiting:
            last = waiting[-1]
            missing = [t for t in last.op.inputs if key(t) not in self._known]
            if key(last) in self._known or not missing:
                waiting.pop()
                if key(last) not in self._known:
                    for output in last.op.outputs:
                        self._known[key(output)] = self._infer(last.op, output)
            else:
                waiting += missing
        return self._known[key(x)]

    def _infer(self, op: Any, output: tf.Tensor) -> Known:
        inputs = [self._known[key(t)] for t in op.inputs]
        learned = output.dtype.is_floating and op.type not in _NO_GRADIENT
        learned = learned and any(known.learned for known in inputs)
        dims = self._dims(op, output, inputs)
        weight, root = None, key(output)
        if inputs and op.type in _SAME_TENSOR | {"Cast"}:
            weight = inputs[0].weight
        if inputs and op.type in _SAME_TENSOR:
            root = inputs[0].root
        return Known(dims, learned, weight, root)

    def _dims(self, op: Any, output: tf.Tensor, inputs: list[Known]) -> Dims:
        shape = sizes_of(output)
        if shape is None:
            return ()
        if op.type == "Transpose":
            order = tf.get_static_value(op.inputs[1])
            return tuple(inputs[0].dims[i] for i in order) if order is not None else _none(shape)
        if op.type in REDUCTIONS:
            dropped = reduced_dims(op)
            if op.get_attr("keep_dims"):
                return tuple(None if i in dropped else d for i, d in enumerate(inputs[0].dims))
            return tuple(d for i, d in enumerate(inputs[0].dims) if i not in dropped)
        form = einsum_form(op)
        if form is not None:
            letters = letters_of(form)
            names: dict[str, str | None] = {}
            for part, known in zip(letters, inputs, strict=False):
                for letter, dim in zip(part, known.dims, strict=True):
                    names[letter] = names.get(letter) or dim
            return tuple(names.get(letter) for letter in letters[-1])
        if op.type in ("GatherV2", "Gather"):
            return _gathered(op, inputs, shape)
        if op.type in _MATCHED and inputs:
            first = sizes_of(op.inputs[0])
            return _matched(inputs[0].dims, first, shape) if first is not None else _none(shape)
        return _aligned(op, inputs, shape)


def key(x: tf.Tensor) -> str:
    """Returns a name of a tensor that no tensor of another graph has."""
    return f"{id(x.graph)}/{x.name}"


def sizes_of(x: tf.Tensor) -> tuple[int, ...] | None:
    """Returns the sizes of a tensor, with 1 for unknown sizes; None if the rank is unknown."""
    if x.shape.rank is None:
        return None
    return tuple(n or 1 for n in x.shape.as_list())


def reduced_dims(op: Any) -> set[int]:
    """Returns the dims over which an op sums."""
    axes = tf.get_static_value(op.inputs[1])
    rank = op.inputs[0].shape.rank
    if axes is None:
        return set()
    return {int(axis) % rank for axis in axes.reshape(-1)} if rank else set()


def einsum_form(op: Any) -> str | None:
    """Returns the einsum equation of a product of two tensors; None for any other op."""
    ranks = [t.shape.rank for t in op.inputs]
    if op.type not in op_kinds.MATRIX_PRODUCTS or len(ranks) != 2 or None in ranks:
        return None
    if op.type == "Einsum":
        *terms, output = graph_work.einsum_terms(op)
        return f"{','.join(terms)}->{output}"
    lead = "abcdefgh"[: max(ranks) - 2]
    of_a, of_b = (lead[len(lead) + 2 - rank :] for rank in ranks)  # the other one is repeated
    adjoint = ("transpose_a", "transpose_b") if op.type == "MatMul" else ("adj_x", "adj_y")
    left, right = (op.get_attr(name) for name in adjoint)
    a, b = ("yx" if left else "xy"), ("zy" if right else "yz")
    return f"{of_a}{a},{of_b}{b}->{lead}xz"


def letters_of(form: str) -> list[str]:
    """Returns the letters of the inputs of an equation, followed by those of the output."""
    left, out = form.split("->")
    return [*left.split(","), out]


def _none(shape: tuple[int, ...]) -> Dims:
    return (None,) * len(shape)


def _gathered(op: Any, inputs: list[Known], shape: tuple[int, ...]) -> Dims:
    axis = tf.get_static_value(op.inputs[2]) if op.type == "GatherV2" else 0
    batch_dims = op.get_attr("batch_dims") if op.type == "GatherV2" else 0
    if axis is None or batch_dims:
        return _none(shape)
    rank = len(inputs[0].dims)
    if not rank:
        return _none(shape)
    axis = int(axis) % rank
    dims = (*inputs[0].dims[:axis], *inputs[1].dims, *inputs[0].dims[axis + 1 :])
    return dims if len(dims) == len(shape) else _none(shape)


def _matched(dims: Dims, before: tuple[int, ...], after: tuple[int, ...]) -> Dims:
    """Returns the names after a reshape, by groups of dims with equal products.

    A merged dim gets the first name of its group. If the total sizes differ (a slice, a new dim),
    dims with equal sizes keep their names, in order.
    """
    if math.prod(before) != math.prod(after):
        names: list[str | None] = []
        start = 0
        for size in after:
            found = next((i for i in range(start, len(before)) if before[i] == size), None)
            names.append(dims[found] if found is not None and size > 1 else None)
            start = start if found is None or size == 1 else found + 1
        return tuple(names)
    result: list[str | None] = [None] * len(after)
    i = j = 0
    while i < len(before) and j < len(after):
        left, right, first_i, first_j = before[i], after[j], i, j
        while left != right:
            if left < right:
                i += 1
                left *= before[i]
            else:
                j += 1
                right *= after[j]
        if first_j == j:
            result[j] = next((d for d in dims[first_i : i + 1] if d is not None), None)
        i, j = i + 1, j + 1
    return tuple(result)


def _aligned(op: Any, inputs: list[Known], shape: tuple[int, ...]) -> Dims:
    names: list[str | None] = [None] * len(shape)
    for x, known in zip(op.inputs, inputs, strict=True):
        sizes = sizes_of(x)
        if sizes is None or len(sizes) != len(known.dims):
            continue
        for back in range(1, min(len(sizes), len(shape)) + 1):
            if names[-back] is None and sizes[-back] == shape[-back] and shape[-back] > 1:
                names[-back] = known.dims[-back]
    return tuple(names)
