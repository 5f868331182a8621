"""Finds einsums whose result DTensor multiplied by a number of devices.

Defect: if one axis shards different summed dims in the two operands of an einsum, DTensor gathers
the operands, so that every device has the whole product, and then sums it over the devices as well.
The layouts are known only from the compiled program: each device must have as small a share of the
summed dims as there are devices whose products are added.

    abc,bcd->ad     local shapes [8, 4, 2] and [4, 2, 6] of the same global shapes: shares of 1
    all-reduce of 2 devices: 2 times the product

The all-reduce may be that of a sum of products, also of the sum that a loop has computed.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

from tekso.framework.costs.op_kinds import LOOPS
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.workarounds.einsum_layouts import contracted_dims
from tekso.framework.execution.workarounds.op_places import whose
from tekso.framework.execution.workarounds.retracing import LOOP_PARTS

_ALIKE = ("Reshape", "Identity", "Cast")
_SUMS = ("AddV2", "AddN")  # DTensor reduces a sum instead of its terms, also after a loop
_REDUCE = "CollectiveReduceV2"  # inputs: tensor, number of devices, …
_STAGE = "part/"  # before the names of ops that a stage cut from a graph
_TRACED = "__"  # begins the names of functions that DTensor has not partitioned
_UNKNOWN = 10**9  # shares: more than there are devices

_known: set[str] = set()  # functions that have been searched; those of loops change their contents
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
    for name in sorted(new):
        if name.startswith(_TRACED) or name.endswith(LOOP_PARTS):
            continue
        for einsum, devices, shapes in _added(_Program(library.get_function_def, name)):
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

    def __init__(self, library: Callable[[str], Any], name: str) -> None:
        definition = library(name)
        self._library, self._definition = library, definition
        self.nodes: Mapping[str, Any] = {node.name: node for node in definition.node_def}
        self._arguments = {
            argument.name: definition.arg_attr[i].attr
            for i, argument in enumerate(definition.signature.input_arg)
            if i in definition.arg_attr
        }

    def body(self, loop: Any) -> _Program | None:
        """Returns the body of a loop; None if it was removed: the compilation failed."""
        try:
            return _Program(self._library, loop.attr["body"].func.name)
        except tf.errors.NotFoundError:
            return None

    def output(self, tensor: str) -> str:
        """Returns the tensor of this body that becomes an output of its loop."""
        results = self._definition.signature.output_arg
        returned: str = self._definition.ret[results[_index(tensor)].name]
        return returned

    def node(self, tensor: str) -> Any:
        """Returns the op of a tensor; None for an argument."""
        return self.nodes.get(tensor.partition(":")[0])

    def shape(self, tensor: str) -> list[int] | None:
        """Returns the shape of a tensor; None if it is not known."""
        name = tensor.partition(":")[0]
        node = self.nodes.get(name)
        attributes = node.attr if node is not None else self._arguments.get(name, {})
        if "_output_shapes" not in attributes:
            return None
        shapes = attributes["_output_shapes"].list.shape
        index = _index(tensor)
        return [dim.size for dim in shapes[index].dim] if index < len(shapes) else None


def _index(tensor: str) -> int:
    """Returns which output of its op a tensor is."""
    found = tensor.rpartition(":")[2]
    return int(found) if found.isdigit() else 0


Added = tuple[Any, int, list[list[int]]]
"""An einsum, over how many devices it is summed, and the shapes of its operands on a device."""


def _added(program: _Program) -> Iterator[Added]:
    """Yields the einsums that are summed over devices, in a program and its loops."""
    for node in program.nodes.values():
        if node.op == _REDUCE:
            yield from _terms(program, node.name, 1, set())
        elif node.op in LOOPS and (body := program.body(node)) is not None:
            yield from _added(body)


def _terms(program: _Program, tensor: str, devices: int, seen: set[Any]) -> Iterator[Added]:
    """Yields the einsums whose sum is a tensor, given the devices over which it is summed later."""
    node = program.node(tensor)
    if node is None or (node.name, devices) in seen:
        return
    seen.add((node.name, devices))
    given = [x for x in node.input if not x.startswith("^")]
    if node.op == _REDUCE:
        size = program.node(given[1])
        if size is not None and size.op == "Const":
            devices *= int(tf.make_ndarray(size.attr["value"].tensor))
            yield from _terms(program, given[0], devices, seen)
    elif node.op in _ALIKE:
        yield from _terms(program, given[0], devices, seen)
    elif node.op in _SUMS:
        for term in given:
            yield from _terms(program, term, devices, seen)
    elif node.op in LOOPS:
        if (body := program.body(node)) is not None:
            yield from _terms(body, body.output(tensor), devices, set())
    elif node.op == "Einsum":
        shapes = [program.shape(x) for x in given]
        if all(shape is not None for shape in shapes):
            yield node, devices, [shape for shape in shapes if shape is not None]


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
