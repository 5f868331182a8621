"""Finds products whose operands DTensor would combine wrongly.

Defect: if an einsum sums over two dims, and one mesh axis shards the first of them in one operand
and the second in the other, DTensor computes wrong values without an error: each device multiplies
the sums of its own shards. With consistent rules, the layers of Tekso have no such product. A layer
that names the dims of its weights differently than those of its activations can have one.
"""

from __future__ import annotations

import tensorflow as tf
from tensorflow.experimental import dtensor


def contracted_dims(op: tf.Operation) -> tuple[list[str], set[str]]:
    """Returns the dims of each operand of an einsum, and those that it sums in both of two."""
    operands, _, result = op.get_attr("equation").decode().partition("->")
    names = operands.split(",")
    return names, set.intersection(*map(set, names)) - set(result) if len(names) == 2 else set()


def contradiction(op: tf.Operation) -> str | None:
    """Returns the axis that shards different contracted dims of an einsum's operands, or None.

    It is found if each operand was constrained or is a variable.
    """
    names, contracted = contracted_dims(op)
    if len(contracted) < 2:
        return None
    layouts = [_layout(_source(tensor)) for tensor in op.inputs]
    one, other = (
        {axis: dim for dim, axis in zip(dims, layout, strict=False) if dim in contracted}
        for dims, layout in zip(names, layouts, strict=True)
    )
    shared = (set(one) & set(other)) - {dtensor.UNSHARDED}
    return next((axis for axis in sorted(shared) if one[axis] != other[axis]), None)


def dims_of_one_operand(op: tf.Operation) -> list[str]:
    """Returns the dims of an einsum over which it sums one of two operands alone.

    The defect above is possible for these whatever the layouts are, and usual if one dim of the
    model is summed in both operands.
    """
    operands, _, result = op.get_attr("equation").decode().partition("->")
    names = operands.split(",")
    if len(names) != 2:
        return []
    alone = (set(names[0]) ^ set(names[1])) - set(result)
    return sorted(dim for dim in alone if dim.isalpha())


def shifted_dims(op: tf.Operation) -> tf.Operation | None:
    """Returns the index op before a dim of an einsum that contracts two dims, or None.

    Defect: of `x[0]` and `x[:, 0]`, DTensor mistakes which of the later dims is sharded. x itself
    may be replicated: then the other operand determines the layout of `x[0]`.
    """
    names, contracted = contracted_dims(op)
    if len(contracted) < 2:
        return None
    for dims, tensor in zip(names, op.inputs, strict=True):
        first = _first_index(source := _source(tensor))
        if first is not None and any(dim in contracted for dim in dims[first:]):
            return source
    return None


def _first_index(source: tf.Operation) -> int | None:
    """Returns the first dim with an index: 2 of x[:, :, 0] and, of rank 3, of x[..., 0]."""
    if source.type != "StridedSlice" or not (mask := source.get_attr("shrink_axis_mask")):
        return None
    first: int = (mask & -mask).bit_length() - 1
    if source.get_attr("ellipsis_mask") in range(1, 2**first):
        first += int(source.inputs[0].shape.rank) - int(source.inputs[1].shape[0])
    return first


def _source(tensor: tf.Tensor) -> tf.Operation:
    """Returns the op that made a tensor, before ops that keep its layout."""
    op = tensor.op
    while op.type in ("Identity", "Cast"):
        op = op.inputs[0].op
    return op


def _layout(source: tf.Operation) -> list[str]:
    """Returns the axis of each dim of a constrained tensor or a variable; []: unknown."""
    found = None
    if source.type == "Relayout":
        found = dtensor.Layout.from_string(source.get_attr("layout").decode())
    elif source.type == "ReadVariableOp":
        found = _layout_of_variable(source.inputs[0])
    return [] if found is None else list(found.sharding_specs)


def _layout_of_variable(resource: tf.Tensor) -> dtensor.Layout | None:
    while tf.is_symbolic_tensor(resource):
        captures = resource.graph.captures
        outer = [outside for outside, inside in captures if inside is resource]
        if not outer:
            return None
        resource = outer[0]
    with tf.init_scope():  # the functions of dtensor must be called eagerly
        return dtensor.fetch_layout(resource) if dtensor.is_dtensor(resource) else None
