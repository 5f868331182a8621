"""Propagates the names of dims through the ops of a graph.

    x [batch, length, embed]  ── transpose ──►  [length, batch, embed]
                              ── mean over the last ──►  [length, batch]

Ops that move dims are handled exactly. The items of a tensor list have the names of what is written
to it. A variable of a loop has the names of its first value and those that the body gives it: a
state that starts with zeros has no names before the loop.

For any other op, a dim of the output gets the name of the input dim at the same position, counted
from the last, if the sizes are equal. This guess can be wrong. It is used only to estimate costs,
never for the layout of a tensor.
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
_MATCHED = frozenset({"Reshape", "ExpandDims", "Squeeze"})
_STACKED_ITEMS = frozenset({"TensorListStack", "TensorListGather"})
_ITEMS = frozenset({"TensorListGetItem", "TensorListPopBack"})
_WRITTEN_ITEM = {"TensorListSetItem": 2, "TensorListPushBack": 1}  # number of the input
_NO_GRADIENT = frozenset({"StopGradient", "OneHot", "Shape", "Size", "Rank"})


@dataclasses.dataclass(frozen=True)
class Known:
    """Properties of a tensor.

    Attributes:
      dims: names of its dims; of a tensor list, names of the dims of an item.
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
        self._given: set[str] = set()  # keys of tensors whose properties are not inferred
        self._entered: dict[str, Any] = {}  # by the key of the first output of an op

    def register(
        self, x: tf.Tensor, dims: Dims, *, learned: bool, weight: str | None = None
    ) -> tf.Tensor:
        """Sets the properties of a tensor; returns the tensor."""
        self._given.add(key(x))
        self._known[key(x)] = Known(tuple(dims), learned, weight, key(x))
        return x

    def enter(self, op: Any) -> Any:
        """Returns the inner graph of an op, of branches the longest; its inputs are known.

        Args:
          op: a loop, a branch or a call of a function.
        """
        name = key(op.outputs[0]) if op.outputs else f"{id(op.graph)}/{op.name}"
        if name not in self._entered:
            graphs = graph_work.inside(op)[1]
            graph = max(graphs, key=lambda one: graph_work.count(one).flops)
            self._entered[name] = graph
            self._pass_on(op, graph)
        return self._entered[name]

    def _pass_on(self, op: Any, graph: Any) -> None:
        """Gives the inputs of an inner graph the properties of the tensors that it is given."""
        self._forget(graph)  # what was inferred before its inputs were known
        given = op.inputs[len(op.inputs) - len(graph.inputs) :]  # a condition comes first
        changed = _changed(op, graph)
        for number, (x, to) in enumerate(zip(given, graph.inputs, strict=True)):
            known = self.of(x)
            if number in changed:
                known = Known(known.dims, known.learned, None, key(to))
            self._known[key(to)] = known
        is_settled = False
        while not is_settled:  # each time, a dim gets a name, or a tensor becomes learned
            is_settled = True
            for number in changed:
                before, after = key(graph.inputs[number]), self.of(graph.outputs[number])
                joined = _joined(self._known[before], after)
                if joined != self._known[before]:
                    self._known[before], is_settled = joined, False
            if not is_settled:
                self._forget(graph)

    def _forget(self, graph: Any) -> None:
        """Forgets what was inferred of the tensors of an inner graph."""
        inputs = {key(t) for t in graph.inputs}
        for op in graph.get_operations():
            for tensor in op.outputs:
                if key(tensor) not in self._given | inputs:
                    self._known.pop(key(tensor), None)
            if op.outputs and (inner := self._entered.pop(key(op.outputs[0]), None)) is not None:
                self._forget(inner)

    def rename(self, x: tf.Tensor, dims: Dims) -> None:
        """Replaces the dimension names of a tensor."""
        self._given.add(key(x))
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
        if graph_work.inside(op)[1]:
            return self._result(op, output)
        inputs = [self._known[key(t)] for t in op.inputs]
        has_gradient = output.dtype.is_floating or output.dtype == tf.variant
        learned = has_gradient and op.type not in _NO_GRADIENT
        learned = learned and any(known.learned for known in inputs)
        dims = self._dims(op, output, inputs)
        weight, root = None, key(output)
        if inputs and op.type in _SAME_TENSOR | {"Cast"}:
            weight = inputs[0].weight
        if inputs and op.type in _SAME_TENSOR:
            root = inputs[0].root
        return Known(dims, learned, weight, root)

    def _result(self, op: Any, output: tf.Tensor) -> Known:
        """Returns the properties of an output of a loop, a branch or a function."""
        graph, number = self.enter(op), output.value_index
        if op.type in op_kinds.LOOPS:
            known = self._known[key(graph.inputs[number])]
            if number not in _changed(op, graph):
                return known
        else:
            known = self.of(graph.outputs[number])
        return Known(known.dims, known.learned, None, key(output))

    def _dims(self, op: Any, output: tf.Tensor, inputs: list[Known]) -> Dims:
        shape = sizes_of(output)
        if shape is None:
            return ()
        if output.dtype == tf.variant:
            return _dims_of_items(op, inputs)
        if op.type in _STACKED_ITEMS | _ITEMS:
            dims = (*[None] * (op.type in _STACKED_ITEMS), *inputs[0].dims)
            return dims if len(dims) == len(shape) else _none(shape)
        if op.type == "Transpose":
            order = tf.get_static_value(op.inputs[1])
            if order is None:
                return _of_equal_sizes(inputs[0].dims, sizes_of(op.inputs[0]) or (), shape)
            return tuple(inputs[0].dims[i] for i in order)
        if op.type == "StridedSlice" and op.inputs[1].shape.rank == 1:
            return _sliced(op, inputs[0].dims, shape)
        if op.type == "Unpack":
            axis = op.get_attr("axis") % (len(shape) + 1)
            return (*inputs[0].dims[:axis], *inputs[0].dims[axis + 1 :])
        if op.type == "Pack":
            axis = op.get_attr("axis") % len(shape)
            of_all = [known.dims for known in inputs if len(known.dims) == len(shape) - 1]
            found = tuple(next(filter(None, dims), None) for dims in zip(*of_all, strict=True))
            return (*found[:axis], None, *found[axis:]) if of_all else _none(shape)
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


def joined_dims(dims: Dims, others: Dims) -> Dims:
    """Returns names of dims; a dim without a name gets that of the other tensor."""
    if len(dims) != len(others):
        return dims
    return tuple(a or b for a, b in zip(dims, others, strict=True))


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


def _of_equal_sizes(dims: Dims, before: tuple[int, ...], after: tuple[int, ...]) -> Dims:
    """Returns the names after an unknown permutation, of dims whose size no other dim has."""
    named = {n: dim for n, dim in zip(before, dims, strict=True) if before.count(n) == 1}
    return tuple(named.get(n) for n in after)


def _changed(op: Any, graph: Any) -> list[int]:
    """Returns the numbers of the variables of a loop that its body changes."""
    if op.type not in op_kinds.LOOPS:
        return []
    pairs = zip(graph.inputs, graph.outputs, strict=True)
    return [n for n, (before, after) in enumerate(pairs) if graph_work.root(after) is not before]


def _joined(before: Known, after: Known) -> Known:
    """Returns the properties of a variable of a loop with those of what the body gives it."""
    dims = joined_dims(before.dims or after.dims, after.dims)  # an empty list has no items
    return dataclasses.replace(before, dims=dims, learned=before.learned or after.learned)


def _dims_of_items(op: Any, inputs: list[Known]) -> Dims:
    """Returns the names of the dims of an item of the tensor list that an op returns."""
    if op.type == "TensorListFromTensor":
        return inputs[0].dims[1:]
    if op.type in _WRITTEN_ITEM:
        return inputs[_WRITTEN_ITEM[op.type]].dims
    is_list = bool(inputs) and op.inputs[0].dtype == tf.variant
    return inputs[0].dims if is_list else ()


def _sliced(op: Any, dims: Dims, shape: tuple[int, ...]) -> Dims:
    """Returns the names after x[...]; a dim of which a part is taken has none."""
    new, dots, taken = (
        op.get_attr(f"{name}_mask") for name in ("new_axis", "ellipsis", "shrink_axis")
    )
    sizes = sizes_of(op.inputs[0])
    count = op.inputs[1].shape[0]
    if sizes is None or count is None:
        return _none(shape)
    kept = [i for i in range(count) if not (new | dots) >> i & 1]
    names: list[str | None] = []
    place = 0
    for i in range(count):
        if dots >> i & 1:
            names += dims[place : place + len(dims) - len(kept)]
            place += len(dims) - len(kept)
        elif new >> i & 1:
            names.append(None)
        else:
            if not taken >> i & 1:
                is_whole = len(names) < len(shape) and shape[len(names)] == sizes[place]
                names.append(dims[place] if is_whole else None)
            place += 1
    found = (*names, *dims[place:])
    return found if len(found) == len(shape) else _none(shape)


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
