"""Divides the loops of a graph into the ops of each iteration, as TensorFlow's executor runs them.

TensorFlow runs no loop as one op: the ops of its body are ops of the graph around it.

iterations   overlap: the next one begins when its condition is known, and its ops run as soon as
             their inputs exist; at most `parallel_iterations` of them are unfinished at a time
lists        hold what iterations save; the gradient takes the last item, and frees it after use
invariants   tensors that no iteration changes stay until all iterations have ended

So the gradients of weights of several iterations exist at once, until each is added to the sum.

Source:
  lower_while_op.cc, propagator_state.cc and list_kernels.cc of TensorFlow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tekso.framework.costs import folded_ops, graph_work, loop_lists, op_kinds, tensor_reads
from tekso.framework.costs.equal_ops import Merged
from tekso.framework.costs.graph_walks import function_graph, needed_for, read_inputs

_SAVES, _TAKES = "TensorListPushBack", "TensorListPopBack"
_REPLACES, _READS = "TensorListSetItem", "TensorListGetItem"
_FULL = frozenset({"TensorListFromTensor", "ZerosLike"})
"""Ops whose list has all its items from the beginning."""

MOST_OPS = 20_000
"""Loops of more ops, over all iterations, are not divided."""


class TensorOfIteration:
    """A tensor that an op of a divided graph computes.

    Args:
      op: the op.
      tensor: what it computes.
      prefix: of its name.
      number: which output of the op it is; None: that of `tensor`.
    """

    def __init__(self, op: Any, tensor: Any, prefix: str, *, number: int | None = None) -> None:
        self.op = op
        self.value_index = tensor.value_index if number is None else number
        self.name = prefix + tensor.name
        self.shape, self.dtype = tensor.shape, tensor.dtype


class OpOfIteration:
    """An op of an iteration, or of a graph with loops; its attributes are those of `original`.

    Args:
      name: its name.
      type: its type.
      inputs: its inputs.
      control_inputs: ops for which it waits besides.
      original: the op; None: it begins or ends an iteration.
      prefix: of the names of its outputs.
    """

    def __init__(
        self,
        name: str,
        type: str,
        inputs: Sequence[Any],
        control_inputs: Sequence[Any],
        *,
        original: Any = None,
        prefix: str = "",
    ) -> None:
        self.name, self.type, self.original = name, type, original
        self.inputs, self.control_inputs = inputs, control_inputs
        outputs = () if original is None else original.outputs
        self.outputs: list[Any] = [TensorOfIteration(self, tensor, prefix) for tensor in outputs]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


class Divided(NamedTuple):
    """A graph whose loops are divided.

    Attributes:
      ops: its ops, in an order in which they can run.
      outputs: its outputs.
      constants: bytes of each constant of the bodies of loops.
    """

    ops: Sequence[Any]
    outputs: Sequence[Any]
    constants: Sequence[float]


def divided(
    ops: Sequence[Any], outputs: Sequence[Any], merged: Merged, live: Mapping[str, set[int]]
) -> Divided | None:
    """Returns a graph with the ops of each iteration of its loops; None: it has no such loops.

    Args:
      ops: the ops of the graph that run.
      outputs: tensors of the graph that something reads after it.
      merged: ops that TensorFlow merges with an earlier one.
      live: {loop: numbers of the values that it computes}.
    """
    bodies = _Bodies()
    if not live or not 0 < bodies.count(ops, live) <= MOST_OPS:
        return None
    division = _Division(bodies)
    scope = _Scope("", merged, {}, ())
    division.add(ops, live, scope)
    return Divided(division.ops, [scope.tensor(t) for t in outputs], bodies.constants)


class _Body(NamedTuple):
    graph: Any
    ops: Sequence[Any]
    merged: Merged
    live: Mapping[str, set[int]]  # of loops in it
    condition: Sequence[int]  # numbers of the values that the condition reads


class _Bodies:
    """The bodies of loops.

    Attributes:
      constants: bytes of what TensorFlow computes once for the bodies.
    """

    def __init__(self) -> None:
        self.constants: list[float] = []
        self._found: dict[tuple[int, str], _Body] = {}

    def of(self, loop: Any, live: set[int]) -> _Body:
        """Returns the body of a loop that computes some of its values."""
        key = id(loop.graph), loop.name
        if key not in self._found:
            graph = graph_work.inside(loop)[1][0]
            outputs = [graph.outputs[number] for number in sorted(live)]
            kept = folded_ops.without_constants(graph, needed_for(graph, outputs), outputs)
            self.constants += kept.constants
            ops = [op for op in kept.ops if op.type != "Placeholder"]
            _, inner = tensor_reads.reads(ops, outputs, kept.merged)
            condition = function_graph(loop, loop.get_attr("cond"))
            read = read_inputs(condition, needed_for(condition, condition.outputs))
            self._found[key] = _Body(graph, ops, kept.merged, inner, sorted(read))
        return self._found[key]

    def count(self, ops: Sequence[Any], live: Mapping[str, set[int]]) -> float:
        """Returns the number of ops of loops in all iterations; infinite: a length is unknown."""
        found = 0.0
        for op in ops:
            if op.type not in op_kinds.LOOPS:
                continue
            times = graph_work.iterations(op) if op.name in live else None
            if times is None or function_graph(op, op.get_attr("cond")) is None:
                return math.inf
            body = self.of(op, live[op.name])
            found += times * (len(body.ops) + self.count(body.ops, body.live))
        return found


class _Scope:
    """The ops and tensors of a graph, or of an iteration.

    Args:
      prefix: of the names of its ops.
      merged: ops that TensorFlow merges.
      tensors: {tensor of the graph: that of the scope} of what exists before.
      controls: ops for which all others wait.

    Attributes:
      tensors: the same of all.
      ops: {op of the graph: that of the scope}.
    """

    def __init__(
        self, prefix: str, merged: Merged, tensors: dict[str, Any], controls: Sequence[Any]
    ) -> None:
        self.prefix, self.tensors, self.ops = prefix, tensors, dict[str, Any]()
        self._merged, self._controls = merged, controls

    def tensor(self, tensor: Any) -> Any:
        """Returns the tensor of the scope for one of the graph; if none was computed, a new one."""
        name = self._merged.name(tensor)
        if name not in self.tensors:  # a constant
            op = tensor.op
            made = OpOfIteration(
                self.prefix + op.name, op.type, (), (), original=op, prefix=self.prefix
            )
            self.tensors[name] = made.outputs[tensor.value_index]
        return self.tensors[name]

    def controls(self, op: Any) -> list[Any]:
        """Returns the ops of the scope for which an op waits though it does not read of them."""
        names = map(self._merged.op_name, op.control_inputs)
        return [*self._controls, *(self.ops[name] for name in names if name in self.ops)]


class _Division:
    """Makes the ops of a divided graph.

    Args:
      bodies: bodies of loops.

    Attributes:
      ops: the ops so far.
    """

    def __init__(self, bodies: _Bodies) -> None:
        self.ops: list[Any] = []
        self._bodies = bodies

    def add(self, ops: Sequence[Any], live: Mapping[str, set[int]], scope: _Scope) -> None:
        """Adds the ops of a graph, or of an iteration."""
        for op in ops:
            if op.name in live:
                scope.ops[op.name] = self._add_loop(op, live[op.name], scope)
            else:
                scope.ops[op.name] = self._add_op(op, scope)

    def _add_op(self, op: Any, scope: _Scope) -> Any:
        inputs = [scope.tensor(tensor) for tensor in op.inputs]
        kind = "Identity" if _is_of_list(op.type, inputs) else op.type
        made = OpOfIteration(
            scope.prefix + op.name, kind, inputs, scope.controls(op),
            original=op, prefix=scope.prefix,
        )  # fmt: skip
        results: Sequence[Any] = made.outputs
        if kind == _TAKES:
            saved = graph_work.source(inputs[0]).op
            if saved.type == _SAVES:
                results, made.outputs = saved.inputs[:2], []
        scope.tensors |= {t.name: x for t, x in zip(op.outputs, results, strict=True)}
        self.ops.append(made)
        return made

    def _add_loop(self, op: Any, live: set[int], scope: _Scope) -> Any:
        """Adds all iterations of a loop; returns an op that ends when they have ended."""
        body, name = self._bodies.of(op, live), scope.prefix + op.name
        values = [scope.tensor(tensor) for tensor in op.inputs]
        kept = [values[n] for n in live if _is_kept(body.graph, n)]
        overlap, ends = op.get_attr("parallel_iterations"), list[Any]()
        before = scope.controls(op)
        for number in range(graph_work.inside(op)[0]):
            of_limit = ends[number - overlap : number - overlap + 1] if number >= overlap else []
            read = [values[n] for n in body.condition]
            begin = self._add_mark(f"{name}[{number}]", "LoopCond", read, [*before, *of_limit])
            before = [begin]
            given = dict(zip((x.name for x in body.graph.inputs), values, strict=True))
            inner = _Scope(f"{name}[{number}]/", body.merged, given, before)
            self.add(body.ops, body.live, inner)
            for n in live:
                values[n] = inner.tensor(body.graph.outputs[n])
            waits = [*inner.ops.values(), *ends[-1:]]
            ends.append(self._add_mark(f"{name}[{number}] end", "NoOp", (), waits))
        read = [values[n] for n in body.condition]
        last = self._add_mark(f"{name} last", "LoopCond", read, before)
        for n in sorted(live):
            exit_ = self._add_mark(f"{name} exit {n}", "Identity", [values[n]], [last])
            exit_.outputs = [TensorOfIteration(exit_, op.outputs[n], scope.prefix, number=0)]
            scope.tensors[op.outputs[n].name] = exit_.outputs[0]
        return self._add_mark(f"{name} end", "NoOp", kept, [last, *ends[-1:]])

    def _add_mark(self, name: str, kind: str, inputs: Sequence[Any], waits: Sequence[Any]) -> Any:
        """Adds an op that is in no graph."""
        self.ops.append(OpOfIteration(name, kind, inputs, waits))
        return self.ops[-1]


def _is_kept(body: Any, number: int) -> bool:
    """Returns whether no iteration changes a value."""
    return loop_lists.origin(body.outputs[number]) is body.inputs[number]


def _is_of_list(kind: str, inputs: Sequence[Any]) -> bool:
    """Returns whether the result of an op is in the memory of a list that it is given."""
    if kind == _REPLACES:
        return graph_work.source(inputs[0]).op.type in _FULL
    return kind == _READS
