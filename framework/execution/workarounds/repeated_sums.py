"""Finds einsums whose result DTensor multiplied by a number of devices.

Defect: if one axis shards different summed dims in the two operands of an einsum, DTensor gathers
the operands, so that every device has the whole product, and then sums it over the devices as well.
The layouts are known only from the compiled program: each device must have as small a share of the
summed dims as there are devices whose products are added.

    abc,bcd->ad     local shapes [8, 4, 2] and [4, 2, 6] of the same global shapes: shares of 1
    all-reduce of 2 devices: 2 times the product
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.workarounds.einsum_layouts import contracted_dims
from tekso.framework.execution.workarounds.op_places import whose

_ALIKE = ("Reshape", "Identity", "Cast")
_REDUCE = "CollectiveReduceV2"  # inputs: tensor, number of devices, …
_STAGE = "part/"  # before the names of ops that a stage cut from a graph
_TRACED = "__"  # begins the names of functions that DTensor has not partitioned
_UNKNOWN = 10**9  # shares: more than there are devices

_known: set[str] = set()  # functions that have been searched
_lock = threading.Lock()


def refuse_repeated_sums(ops: Iterable[tf.Operation]) -> None:
    """Rejects wrong products in the programs that DTensor compiled since the last call.

    Args:
      ops: the ops of the graphs that it may have compiled.

    Raises:
      ExecutionError: there is one; the message names its line and what to write instead.
    """
    products = [op for op in ops if op.type == "Einsum" and len(contracted_dims(op)[1]) > 1]
    if not products:
        return
    by_name: dict[str, list[tf.Operation]] = {}
    for op in products:
        by_name.setdefault(op.name, []).append(op)
    library = context.context()
    with _lock:
        new = set(library.list_function_names()) - _known
        _known.update(new)
    for name in sorted(name for name in new if not name.startswith(_TRACED)):
        for einsum, devices, shapes in _added(_Program(library.get_function_def(name))):
            # Each function, such as the body of a loop, may have another einsum of the same name.
            equation = einsum.attr["equation"].s
            alike = by_name.get(einsum.name.removeprefix(_STAGE), [])
            alike = [op for op in alike if op.get_attr("equation") == equation]
            if alike and all(devices > _shares(op, shapes) for op in alike):
                raise ExecutionError(
                    f"{whose(alike[0])}: on this mesh, DTensor multiplies this einsum by "
                    f"{devices // _shares(alike[0], shapes)}, because one axis shards different "
                    "summed dims of its operands: constrain one operand with ctx.constrain as the "
                    "other one is sharded"
                )


class _Program:
    """A function of one device, with the shapes of its shards."""

    def __init__(self, definition: Any) -> None:
        self.nodes: Mapping[str, Any] = {node.name: node for node in definition.node_def}
        self._arguments = {
            argument.name: definition.arg_attr[i].attr
            for i, argument in enumerate(definition.signature.input_arg)
            if i in definition.arg_attr
        }

    def node(self, tensor: str) -> Any:
        """Returns the op of a tensor; None for an argument."""
        return self.nodes.get(tensor.partition(":")[0])

    def shape(self, tensor: str) -> list[int] | None:
        """Returns the shape of a tensor; None if it is not known."""
        name, _, output = tensor.partition(":")
        node = self.nodes.get(name)
        attributes = node.attr if node is not None else self._arguments.get(name, {})
        if "_output_shapes" not in attributes:
            return None
        shapes = attributes["_output_shapes"].list.shape
        index = int(output.rpartition(":")[2] or 0)
        return [dim.size for dim in shapes[index].dim] if index < len(shapes) else None


def _added(program: _Program) -> Iterator[tuple[Any, int, list[list[int]]]]:
    """Yields the node of each einsum that is summed over devices, their number, and its shapes."""
    for node in program.nodes.values():
        if node.op != _REDUCE:
            continue
        devices, source = 1, node
        while source is not None and source.op in (*_ALIKE, _REDUCE):
            if source.op == _REDUCE:
                devices *= _devices(program.node(source.input[1]))
            source = program.node(source.input[0])
        if source is not None and source.op == "Einsum" and devices:
            shapes = [program.shape(x) for x in source.input if not x.startswith("^")]
            if all(shape is not None for shape in shapes):
                yield source, devices, [shape for shape in shapes if shape is not None]


def _devices(size: Any) -> int:
    """Returns the number of devices of a sum, from the op of its second input; 0: unknown."""
    if size is None or size.op != "Const":
        return 0
    return int(tf.make_ndarray(size.attr["value"].tensor))


def _shares(op: tf.Operation, shapes: Sequence[Sequence[int]]) -> int:
    """Returns into how many shares the summed dims of an einsum are divided, given local shapes."""
    operands, summed = contracted_dims(op)
    counts: dict[str, int] = {}
    for dims, tensor, local in zip(operands, op.inputs, shapes, strict=True):
        whole = tensor.shape.as_list()
        if len(dims) != len(local) or None in whole:
            return _UNKNOWN  # "..." in the equation, or a dim without a size
        for dim, size, part in zip(dims, whole, local, strict=True):
            if dim in summed:
                counts[dim] = max(counts.get(dim, 1), size // max(part, 1))
    return math.prod(counts.values())
