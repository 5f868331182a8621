"""Counts the work of a traced graph: floating-point operations, and bytes that are written.

A multiplication and an addition are two operations. An op that is neither a product nor a
convolution counts one operation per output element; a sum counts one per input element. The body
of a loop counts once per iteration.
"""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tekso.framework.costs import graph_walks, op_kinds
from tekso.framework.costs.loop_counts import counted_iterations

ITERATIONS = "_iterations"
"""Attribute with the number of iterations of a loop of a compiled program."""

_OTHER_SUMS = frozenset({"BiasAddGrad", "L2Loss", "SegmentSum"})
"""Sums whose dims are not an input."""


class GraphWork(NamedTuple):
    """The work of a graph.

    Attributes:
      flops: floating-point operations.
      bytes_written: bytes of all floating-point outputs of its ops.
      product_bytes: bytes of the outputs of products and convolutions among them.
    """

    flops: float
    bytes_written: float
    product_bytes: float = 0.0


def count(graph: Any) -> GraphWork:
    """Returns the work of the ops that run, including ops inside loops and function calls.

    TensorFlow removes ops that no output of a function needs, such as the gradient of a batch.
    """
    flops = written = products = 0.0
    for op in graph_walks.needed(graph):
        times, inner = inside(op)
        if inner:
            found = [count(g) for g in inner]
            flops += times * max(w.flops for w in found)
            written += times * max(w.bytes_written for w in found)
            products += times * max(w.product_bytes for w in found)
            continue
        if op.type in op_kinds.FREE or not any(t.dtype.is_floating for t in op.outputs):
            continue
        flops += op_flops(op)
        own = sum(size_bytes(t) for t in op.outputs if t.dtype.is_floating)
        written += own
        products += own if op.type in op_kinds.PRODUCTS else 0
    return GraphWork(flops, written, products)


def inside(op: Any) -> tuple[int, list[Any]]:
    """Returns how often an op runs its inner graphs, and these graphs; it runs one at a time."""
    if op.type in op_kinds.LOOPS:
        times = iterations(op)
        return 1 if times is None else times, _graphs(op, op.get_attr("body"))
    if op.type in ("If", "StatelessIf"):
        return 1, _graphs(op, op.get_attr("then_branch"), op.get_attr("else_branch"))
    if op.type in ("Case", "StatelessCase"):
        return 1, _graphs(op, *op.get_attr("branches"))
    if op.type in op_kinds.CALLS:
        return 1, _graphs(op, op.get_attr("f"))
    return 0, []


def iterations(loop: Any) -> int | None:
    """Returns the largest number of iterations of a loop; None: unknown."""
    if ITERATIONS in loop.node_def.attr:
        return int(loop.node_def.attr[ITERATIONS].i)
    found = tf.get_static_value(loop.inputs[1])
    return counted_iterations(loop) if found is None or found < 0 else int(found)


def uncounted_loops(graph: Any) -> list[Any]:
    """Returns the loops, also those within others and in functions, whose length is unknown."""
    found = []
    for op in graph.get_operations():
        if op.type in op_kinds.LOOPS and iterations(op) is None:
            found.append(op)
        for inner in inside(op)[1]:
            found += uncounted_loops(inner)
    return found


def unsized_ops(graph: Any) -> list[Any]:
    """Returns the ops, also those in loops and functions, whose results have an unknown size."""
    found = []
    for op in graph_walks.needed(graph):
        inner = inside(op)[1]
        for one in inner:
            found += unsized_ops(one)
        numbers = [t for t in op.outputs if t.dtype.is_floating]
        if not inner and op.type not in op_kinds.INSTANT:
            found += [op] if any(not t.shape.is_fully_defined() for t in numbers) else []
    return found


def _graphs(op: Any, *called: Any) -> list[Any]:
    found = (graph_walks.function_graph(op, one) for one in called)
    return [graph for graph in found if graph is not None]


def shared_inputs(op: Any) -> Sequence[int]:
    """Returns for each output the number of the input in whose memory it is; []: in none.

    A `Select` with a scalar condition returns one of its inputs. For a step that is applied, that
    is the first of the two. TensorFlow removes products with 1, and sums that add nothing, such as
    those that undo a broadcast without repetitions.
    """
    if op.type == "Select" and op.inputs[0].shape.rank == 0:
        return [1]
    if op.type in ("Mul", "RealDiv"):
        return _product_with_one(op)
    if op.type in op_kinds.SUMS:
        given, made = op.inputs[0].shape.num_elements(), op.outputs[0].shape.num_elements()
        return [0] if given is not None and given == made else []
    is_shared = op.type in op_kinds.SAME_MEMORY and len(op.inputs)
    return range(len(op.outputs)) if is_shared else ()


def _product_with_one(op: Any) -> Sequence[int]:
    for number in (0, 1) if op.type == "Mul" else (0,):
        factor = op.inputs[1 - number]
        if factor.shape.num_elements() != 1:
            continue
        if (factor := source(factor)).op.type == "Const":
            value = tf.make_ndarray(factor.op.get_attr("value"))
            if value == 1 and op.inputs[number].shape == op.outputs[0].shape:
                return [number]
    return []


def source(tensor: Any) -> Any:
    """Returns the tensor of which a tensor is another name, of a reshape or an identity."""
    while tensor.op.type in op_kinds.SAME_MEMORY and len(tensor.op.inputs):
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor


def root(tensor: Any) -> Any:
    """Returns the tensor in whose memory a tensor is."""
    while shared := shared_inputs(tensor.op):
        tensor = tensor.op.inputs[shared[tensor.value_index]]
    return tensor


def size(tensor: Any) -> int:
    """Returns the number of elements of a tensor; a dim of unknown size counts as 1."""
    shape = tensor.shape
    return 0 if shape.rank is None else math.prod(n or 1 for n in shape.as_list())


def size_bytes(tensor: Any) -> float:
    """Returns the bytes of a tensor; 0 for a handle, or a list of other tensors."""
    return float(size(tensor) * tensor.dtype.size)


def op_flops(op: Any) -> float:
    """Returns the floating-point operations of an op that runs no inner graph."""
    out = size(op.outputs[0])
    if op.type == "Einsum":
        return _einsum_flops(op)
    if op.type in op_kinds.MATRIX_PRODUCTS:
        transposed = op.get_attr("transpose_a" if op.type == "MatMul" else "adj_x")
        inner = op.inputs[0].shape[-2 if transposed else -1]
        return 2.0 * out * (inner or 1)
    if op.type in op_kinds.INPUT_GRADIENTS:  # a transposed convolution
        added = op.inputs[1].shape[: 2 if op.type in op_kinds.DEPTHWISE else -1]
        return 2.0 * size(op.inputs[2]) * _product(added)
    if op.type in op_kinds.FILTER_GRADIENTS:
        return 2.0 * size(op.inputs[2]) * _filter_size(op)
    if op.type in ("Conv2D", "Conv3D"):
        return 2.0 * out * _product(op.inputs[1].shape[:-1])
    if op.type == "DepthwiseConv2dNative":
        return 2.0 * out * _product(op.inputs[1].shape[:2])
    if op.type in op_kinds.SUMS | _OTHER_SUMS:
        return float(size(op.inputs[0]))
    if op.type in ("AvgPool", "MaxPool", "AvgPool3D", "MaxPool3D"):
        return float(out * math.prod(op.get_attr("ksize")))
    return 0.0 if op.type in op_kinds.MOVES else float(out)


def _product(shape: tf.TensorShape) -> float:
    return float(math.prod(shape.as_list()))


def _filter_size(op: Any) -> int:
    """Returns of how many products each number of a convolution is the sum, from a gradient of it.

    A filter has the channels of one group; of a depthwise convolution, a sum is of one channel.
    """
    sizes = filter_sizes(op)
    return math.prod(sizes[: 2 if op.type in op_kinds.DEPTHWISE else -1]) if sizes else 1


def filter_sizes(op: Any) -> list[int]:
    """Returns the shape of the filter of a convolution or a gradient of one; []: unknown."""
    # A gradient may read the sizes from a ShapeN, whose value TensorFlow does not tell.
    of_filter = op.outputs[0] if op.type in op_kinds.FILTER_GRADIENTS else op.inputs[1]
    shape = of_filter.shape
    return shape.as_list() if shape.is_fully_defined() else []


def summed_channels(op: Any) -> int:
    """Returns the channels, of one group, of what a convolution or a gradient of one computes.

    Of a filter's gradient, they are the last dim of the filter. 0: unknown.
    """
    sizes = filter_sizes(op)
    if not sizes:
        return 0
    *_, before, after = sizes
    if op.type in op_kinds.INPUT_GRADIENTS:
        return before
    groups = max(1, (op.inputs[0].shape[-1] or before) // max(1, before))
    return after // groups


def einsum_terms(op: Any) -> list[str]:
    """Returns the letters of the inputs of an Einsum, then of its output; of "..." too."""
    inputs, output = op.get_attr("equation").decode().split("->")
    terms = inputs.split(",")
    unused = "".join(x for x in string.ascii_letters if x not in inputs)
    counts = [
        tensor.shape.rank - len(term.replace("...", "")) if "..." in term else 0
        for term, tensor in zip(terms, op.inputs, strict=True)
    ]
    lead = unused[: max(counts)]
    found = [
        term.replace("...", lead[len(lead) - count :])
        for term, count in zip(terms, counts, strict=True)
    ]
    return [*found, output.replace("...", lead)]


def _einsum_flops(op: Any) -> float:
    sizes: dict[str, int] = {}
    terms = einsum_terms(op)[:-1]
    for term, tensor in zip(terms, op.inputs, strict=True):
        for letter, n in zip(term, tensor.shape.as_list(), strict=True):
            sizes[letter] = max(n or 1, sizes.get(letter, 1))  # a dim of "..." may be repeated
    return (2.0 if len(terms) > 1 else 1.0) * math.prod(sizes.values())
