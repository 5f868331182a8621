"""Finds the collectives, and their axes, in the program that one device of a mesh runs.

DTensor compiles a step to functions that every device runs on its shards. Collectives are ops in
these functions ("CollectiveReduceV2"). Each has a table of group keys, and devices with the same
key exchange data:

    group keys [0 1 2 3 0 1 2 3] on data:2;model:4   ->  0 and 4 exchange data: over "data"

On CPU and GPU, an all-gather is an all-reduce of a tensor that is 0 except for the device's own
shard, whose position depends on the number of the device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework.function_def_to_graph import function_def_to_graph

from tekso.framework.costs import loop_counts
from tekso.framework.costs.op_kinds import BRANCHES, CALLS, LOOPS
from tekso.framework.execution.mesh.rules import MeshShape

_ALIKE = ("Reshape", "Identity", "IdentityN")  # ops whose outputs have the elements of an input
_UPDATE = "TensorStridedSliceUpdate"  # inputs: zeros, begin, end, strides, shard
_KINDS = {
    "CollectiveReduce": "all-reduce",
    "CollectiveGather": "all-gather",
    "CollectiveReduceScatter": "reduce-scatter",
    "CollectiveAllToAll": "all-to-all",
    "CollectivePermute": "permute",
    "CollectiveBcastSend": "broadcast",
}


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A collective of one tensor.

    Attributes:
      kind: as in Collective.
      axes: the mesh axes of the collective.
      bytes: as in Collective.
      times: number of executions in a run of the program.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    times: int


class PartitionedProgram:
    """The program of one device.

    Args:
      function: returns the FunctionDef with this name; None if there is none.
      mesh: axes of the mesh.

    Attributes:
      unknown_loops: names of loops whose number of iterations cannot be read from the program; they
        are counted as one iteration.
    """

    def __init__(self, function: Callable[[str], Any], mesh: MeshShape) -> None:
        self._function, self._mesh = function, mesh
        self._places = np.indices([size for _, size in mesh.axes]).reshape(len(mesh.axes), -1)
        self.unknown_loops: list[str] = []

    def exchanges(self, name: str, *, times: int = 1) -> list[Exchange]:
        """Returns the collectives of `times` runs of a function."""
        return list(self._in(_Frame(self._function(name)), times))

    def _in(self, frame: _Frame, times: int) -> Iterator[Exchange]:
        for node in frame.nodes.values():
            if node.op in LOOPS:
                yield from self._in_loop(frame, node, times)
            elif node.op in CALLS:
                yield from self._in(self._called(frame, node, node.attr["f"].func.name), times)
            elif node.op in BRANCHES:
                yield from self._in_branches(frame, node, times)
            elif node.op.startswith("Collective"):
                yield from self._of(frame, node, times)

    def _called(self, frame: _Frame, node: Any, name: str, *, skip: int = 0) -> _Frame:
        return _Frame(self._function(name), frame, list(node.input)[skip:])

    def _in_loop(self, frame: _Frame, node: Any, times: int) -> Iterator[Exchange]:
        body = self._called(frame, node, node.attr["body"].func.name)
        found = list(self._in(body, 1))
        if not found:
            return
        length = _length(self._function, frame, node)
        if length is None:
            self.unknown_loops.append(node.name)
            length = 1
        for one in found:
            yield dataclasses.replace(one, times=one.times * length * times)

    def _in_branches(self, frame: _Frame, node: Any, times: int) -> Iterator[Exchange]:
        """Yields the collectives of the branch with the most bytes."""
        functions = [node.attr[a].func for a in ("then_branch", "else_branch") if a in node.attr]
        functions += list(node.attr["branches"].list.func)
        ways = [list(self._in(self._called(frame, node, f.name, skip=1), times)) for f in functions]
        yield from max(ways, key=lambda way: sum(x.bytes * x.times for x in way), default=[])

    def _of(self, frame: _Frame, node: Any, times: int) -> Iterator[Exchange]:
        stem = node.op.rstrip("0123456789").removesuffix("V")
        if stem not in _KINDS:  # an op that only starts or ends a collective
            return
        kind, inputs = _KINDS[stem], _data_inputs(node)
        group_size, axes = self._group(frame, inputs[1], inputs[2])
        if group_size == 1:
            return
        if kind == "all-reduce" and _is_gather(frame, inputs[0]):
            kind = "all-gather"
        scale = group_size if kind == "reduce-scatter" else 1
        yield Exchange(kind, axes, _num_bytes(node, "T") * scale, times)

    def _group(self, frame: _Frame, size: str, key: str) -> tuple[int, tuple[str, ...]]:
        """Returns the number of devices of a group, and the axes along which they differ."""
        keys = frame.table(key)
        if keys is None or keys.size != self._mesh.size:
            count = frame.scalar(size)
            known = [name for name, n in self._mesh.axes if n == count]
            return count or self._mesh.size, tuple(known[:1] or self._mesh.names)
        group = self._places[:, keys.reshape(-1) == keys.flat[0]]
        varies = [len(set(row)) > 1 for row in group.tolist()]
        axes = tuple(name for name, vary in zip(self._mesh.names, varies, strict=True) if vary)
        return group.shape[1], axes


class _Frame:
    """A call of a function, with the tensors that its caller passes as arguments."""

    def __init__(
        self, definition: Any, caller: _Frame | None = None, inputs: list[str] | None = None
    ) -> None:
        self.definition = definition
        self.nodes: Mapping[str, Any] = {node.name: node for node in definition.node_def}
        names = [argument.name for argument in definition.signature.input_arg]
        self._caller = caller
        self._given = dict(zip(names, [x for x in inputs or [] if x[:1] != "^"], strict=False))

    def producer(self, tensor: str) -> tuple[_Frame, Any] | None:
        """Returns the call and the op that compute a tensor, skipping reshapes and identities."""
        name, _, output = tensor.partition(":")
        node = self.nodes.get(name)
        if node is None:
            outer = self._given.get(name)
            return self._caller.producer(outer) if self._caller and outer else None
        if node.op in _ALIKE:
            index = int(output.rpartition(":")[2]) if node.op == "IdentityN" else 0
            return self.producer(node.input[index])
        return self, node

    def constant(self, tensor: str) -> np.ndarray | None:
        """Returns the value of a constant tensor; None if it is not constant."""
        made = self.producer(tensor)
        if made is None or made[1].op != "Const":
            return None
        value: np.ndarray = tf.make_ndarray(made[1].attr["value"].tensor)
        return value

    def scalar(self, tensor: str) -> int | None:
        """Returns the value of a constant scalar integer; None for other tensors."""
        value = self.constant(tensor)
        if value is None or value.size != 1 or value.dtype.kind not in "iu":
            return None
        return int(value.reshape(-1)[0])

    def table(self, tensor: str) -> np.ndarray | None:
        """Returns the constant table from which a device reads a value by its number, or None."""
        made = self.producer(tensor)
        while made is not None and made[1].op in ("Slice", "GatherV2", "StridedSlice", "Squeeze"):
            made = made[0].producer(made[1].input[0])
        if made is None or made[1].op != "Const":
            return None
        value: np.ndarray = tf.make_ndarray(made[1].attr["value"].tensor)
        return value


def loop_lengths(function: Callable[[str], Any], name: str) -> dict[str, int | None]:
    """Returns {loop of a function: number of iterations}; None if it cannot be read.

    Args:
      function: as in `PartitionedProgram`.
      name: the function.
    """
    frame = _Frame(function(name))
    nodes = [node for node in frame.nodes.values() if node.op in LOOPS]
    return {node.name: _length(function, frame, node) for node in nodes}


def _length(function: Callable[[str], Any], frame: _Frame, loop: Any) -> int | None:
    """Returns the number of iterations of a loop; None if it cannot be read."""
    condition, body = (_counters(function(loop.attr[n].func.name)) for n in ("cond", "body"))
    found = loop_counts.run_counters(condition, body, [frame.scalar(x) for x in _data_inputs(loop)])
    return None if found is None else found.length


def _counters(function: Any) -> Any:
    """Returns a function as a graph of its outputs that are integers or conditions.

    The other outputs are None, and the ops that only they need are left out.
    """
    signature, nodes = function.signature, {node.name: node for node in function.node_def}
    types = [tf.as_dtype(output.type) for output in signature.output_arg]
    is_kept = [dtype.is_integer or dtype.is_bool for dtype in types]
    made = type(function)(arg_attr=function.arg_attr)
    made.signature.CopyFrom(signature)
    del made.signature.output_arg[:], made.signature.control_output[:]
    open_tensors = []
    for output, keeps in zip(signature.output_arg, is_kept, strict=True):
        if keeps:
            made.signature.output_arg.append(output)
            made.ret[output.name] = function.ret[output.name]
            open_tensors.append(function.ret[output.name])
    while open_tensors:
        node = nodes.pop(open_tensors.pop().partition(":")[0], None)
        if node is not None:
            inputs = _data_inputs(node)
            made.node_def.append(node)
            made.node_def[-1].input[:] = inputs
            open_tensors += inputs
    graph = graph_of(made)
    kept = iter(graph.outputs)
    graph.outputs = [next(kept) if keeps else None for keeps in is_kept]
    return graph


class _WithAllFunctions(tf.Graph):  # type: ignore[misc]
    """A graph that has every function, by its name alone."""

    def _is_function(self, name: str) -> bool:
        return True


def graph_of(function: Any, input_shapes: Sequence[Any] | None = None) -> Any:
    """Returns a function as a graph, without the functions that its ops run.

    Defect: DTensor removes functions of loops from the library of the process, at random, if it
    compiled other loops before, and TensorFlow makes no graph of a function that runs them.

    Args:
      function: its definition.
      input_shapes: shapes of its arguments; None where one is not known.
    """
    with _WithAllFunctions().as_default():
        return function_def_to_graph(function, input_shapes=input_shapes)


def _is_gather(frame: _Frame, tensor: str) -> bool:
    """Returns whether a reduced tensor is 0 except for a shard at a computed position."""
    made = frame.producer(tensor)
    return made is not None and made[1].op == _UPDATE and made[0].constant(made[1].input[1]) is None


def _num_bytes(node: Any, dtype: str) -> int:
    shape = node.attr["_output_shapes"].list.shape[0]
    found: int = math.prod(dim.size for dim in shape.dim) * tf.as_dtype(node.attr[dtype].type).size
    return found


def _data_inputs(node: Any) -> list[str]:
    return [x for x in node.input if not x.startswith("^")]
