"""Finds ops of layers that crash DTensor, or that it silently computes wrong.

A traced step is searched before it runs, including the bodies of loops, branches and functions.
Errors name the line of code that created the op.
"""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf

from tekso.framework.costs.op_kinds import BRANCHES
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.workarounds.einsum_layouts import (
    contradiction,
    dims_of_one_operand,
    shifted_dims,
)
from tekso.framework.execution.workarounds.op_places import (
    TAPE,
    forward_of,
    is_of_layer,
    ops_of,
    place_of,
    whose,
)
from tekso.framework.execution.workarounds.op_substitutes import WITHOUT_LAYOUTS

_AXES = {"ConcatV2": -1, "Split": 0, "SplitV": 2}
"""{type: input with the axis}"""
_TOP_K = "TopKV2"
GRADIENTS = {"Cholesky", "DiagPart", "Einsum", "Qr", "Softsign", "Split", "SplitV", _TOP_K}
"""Types of ops that a mesh accepts, and whose gradients it may refuse."""
_DRAWS = ("Random", "TruncatedNormal", "Multinomial")  # parts of the types of random ops


def refuse_unsupported(graph: tf.Graph) -> None:
    """Rejects a graph with ops that are unsupported on a mesh.

    Raises:
      ExecutionError: there is such an op; the message names its line and what to write instead.
    """
    refuse_ops(ops_of(graph))


def refuse_ops(ops: Iterable[tf.Operation], *, of_layers: bool = False) -> None:
    """Rejects ops that are unsupported on a mesh; see `refuse_unsupported`.

    Args:
      ops: the ops.
      of_layers: whether only those that a custom layer created, or whose gradient they are, count.
    """
    for op in ops:
        problem = _problem(op)
        if problem is None:
            continue
        forward = forward_of(op) if of_layers else op
        if not of_layers or (forward is not None and is_of_layer(forward)):
            # The op may be of a gradient, which has no line of the layer.
            at = shifted_dims(op) if op.type == "Einsum" else _sorting(op)
            raise ExecutionError(f"{place_of(at) if at else whose(op)}: on a mesh, {problem}")


def _problem(op: tf.Operation) -> str | None:
    if op.type == "StridedSlice":
        strides = tf.get_static_value(op.inputs[3])
        is_constant = tf.get_static_value(op.inputs[0]) is not None  # folded, so harmless
        if op.get_attr("new_axis_mask") and not is_constant:
            return f"x[:, None] crashes DTensor: write tf.expand_dims(x, {_new_axis(op)})"
        if strides is not None and (strides < 0).any():
            return (
                "a slice with a negative step gives wrong values along a sharded dim: write "
                "workarounds.reverse(ctx, x, axis) of tekso.framework; if dim 0 is not the batch, "
                'with the names of the dims: dims=(None, "batch")'
            )
    elif op.type in _AXES:
        axis, rank = tf.get_static_value(op.inputs[_AXES[op.type]]), op.outputs[0].shape.rank
        is_index = op.outputs[0].dtype.is_integer  # or a shape
        is_constant = tf.get_static_value(op.outputs[0]) is not None
        if axis is not None and axis < 0 and rank is not None and not is_index and not is_constant:
            return (
                "tf.concat with a negative axis, or the gradient of such a tf.split, gives wrong "
                f"values if that dim is sharded: write axis {axis + rank} instead of {axis}; if a "
                "function of TensorFlow calls it, compute the same in another way"
            )
    elif op.type == "SelectV2":
        if op.inputs[0].shape.rank == 0 and op.outputs[0].shape.rank != 0:
            return (
                "tf.where with a scalar condition crashes DTensor: write "
                "tf.where(tf.reshape(condition, [1]), …)"
            )
    elif op.type == "ScatterNd":
        if _sorting(op) is not None:
            return (
                "the gradient of tf.math.top_k or tf.sort can fail if another dim is sharded: use "
                "indices of tf.math.top_k or tf.argsort, and get the values by "
                "tf.gather(x, indices, batch_dims=…)"
            )
    elif op.type == "GatherNd":
        if "/pfor/" in op.name:  # vectorized over the stages, whose dim is sharded
            return (
                "tf.gather_nd of all stages at once fails: write tf.gather(x, indices, "
                "batch_dims=…), or use --execution=pipelined"
            )
    elif op.type == "Einsum":
        return _problem_of_einsum(op)
    elif op.type in BRANCHES:
        if any(output.dtype == tf.variant for output in op.outputs):
            return (
                "the gradient of tf.cond, tf.case or tf.switch_case does not compile: compute "
                "all branches, and choose with tf.where"
            )
    elif op.type in WITHOUT_LAYOUTS:
        if not all(map(_is_constant, op.inputs)):
            return f"{op.type} does not compile: use {WITHOUT_LAYOUTS[op.type]}"
    elif any(word in op.type for word in _DRAWS):
        return (
            f"{op.type} draws numbers that depend on the layout of tensors: draw them with "
            "ctx.uniform or ctx.normal, or use the layer Dropout"
        )
    return None


def _is_constant(x: tf.Tensor) -> bool:
    """Returns whether a tensor is computed from constants alone."""
    seen: set[str] = set()
    open_tensors = [x]
    while open_tensors:
        tensor = open_tensors.pop()
        if tensor.op.name in seen or tf.get_static_value(tensor) is not None:
            continue
        seen.add(tensor.op.name)
        if not tensor.op.inputs:
            return False
        open_tensors += tensor.op.inputs
    return True


def _new_axis(op: tf.Operation) -> int:
    """Returns the axis of the output that the first None of a slice adds."""
    new, whole, taken = (
        op.get_attr(f"{name}_mask") for name in ("new_axis", "ellipsis", "shrink_axis")
    )
    first = (new & -new).bit_length() - 1
    taken &= ~new  # a None counts, whatever else is said of its place
    if whole & ((1 << first) - 1):  # after the dots: counted from the end
        places = op.inputs[1].shape[0]
        dropped = (taken >> first).bit_count()
        return int(op.outputs[0].shape.rank - (places - first) + dropped)
    return int(first - (taken & ((1 << first) - 1)).bit_count())


def _sorting(op: tf.Operation) -> tf.Operation | None:
    """Returns the op whose sorted values have this gradient, or None.

    Defect: in the gradient of TopKV2, DTensor scatters by indices of the whole tensor into a shard.
    """
    if op.type != "ScatterNd" or TAPE not in op.name:
        return None
    if f"/{_TOP_K}/" in op.name:  # vectorized over the stages of a pipeline
        return op
    before = [op.inputs[0].op]
    for each in before:
        if each.type == _TOP_K:
            return each
        if each.type in ("ExpandDims", "Reshape", "AddV2", "Identity"):
            before += [tensor.op for tensor in each.inputs]
    return None


def _problem_of_einsum(op: tf.Operation) -> str | None:
    if "..." in (equation := op.get_attr("equation").decode()):
        return (
            f"an einsum with '...', as {equation!r}, does not compile: write a letter for each dim "
            "instead of '...', such as \"bti,ij->btj\""
        )
    if shifted_dims(op) is not None:
        return (
            "an einsum, or its gradient, sums over two dims of this x[i], which gives wrong "
            "values if x or the other tensor is sharded; whether one is, only the compiled step "
            "knows, so every mesh refuses it: write tf.squeeze(x[i : i + 1], 0), also for other "
            "dims, or tf.tensordot"
        )
    axis = contradiction(op)
    if axis is not None:
        return (
            f"this einsum sums over two dims, and axis {axis} shards a different one of them "
            "in each operand, which gives wrong values: constrain one operand with "
            "ctx.constrain as the other one is sharded"
        )
    if dims := dims_of_one_operand(op):
        which = " and ".join(map(repr, dims))
        return (
            f"this einsum sums over the dim{'s' if len(dims) > 1 else ''} {which} of one operand "
            "alone, which gives wrong values if an axis shards another summed dim of the other "
            "operand: sum over it before, with tf.reduce_sum"
        )
    return None
