"""Simulates the memory of a traced graph: the peak bytes of its tensors on one device.

`executor.py` has the order of ops in a step, and `op_order.py` that of `changes`. A tensor is
allocated by its op and freed after the last op that reads it. An elementwise op writes its output
over an input that nothing else reads. Equal ops run once, because TensorFlow merges them. The
inputs and outputs of the graph are counted by the caller. `loop_lists.py` has the lists of loops.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tekso.framework.costs import (
    einsum_copies,
    equal_ops,
    folded_ops,
    graph_work,
    loop_iterations,
    loop_lists,
    op_kinds,
    op_order,
    tensor_reads,
)
from tekso.framework.costs.equal_ops import Merged
from tekso.framework.costs.graph_clusters import CompiledCluster
from tekso.framework.costs.graph_walks import is_cluster, needed, needed_for

_NEW = op_kinds.PRODUCTS | op_kinds.INPUT_GRADIENTS | op_kinds.FILTER_GRADIENTS
_NEW |= {"Transpose", "GatherV2", "ConcatV2", "Pack", "Pad", "Cumsum", "ReverseV2"}
_NEW |= {"TensorListStack", "TensorListFromTensor"}
_ASSIGNS = "AssignVariableOp"

COUNTED_BYTES = float(1 << 18)
"""With oneDNN, TensorFlow's memory statistics leave out all tensors of fewer bytes."""


class Change(NamedTuple):
    """What an op changes in memory.

    Attributes:
      takes: {tensor: bytes} that it allocates.
      temporary: bytes that it needs besides, while it runs.
      overwrites: (input, output) in the same memory; None: there is no such pair.
      frees: tensors that nothing reads after it.
      assigns: (tensor, name of the variable whose value it becomes); None: there is none.
      op: name of the op.
      items: {list that it allocates: number of its items, which are arrays of their own}.
    """

    takes: Mapping[str, float]
    temporary: float
    overwrites: tuple[str, str] | None
    frees: Sequence[str]
    assigns: tuple[str, str] | None
    op: str
    items: Mapping[str, int]


def peak_bytes(graph: Any, *, least: float = 0.0) -> float:
    """Returns the largest number of bytes that the ops of a graph hold at once.

    Args:
      graph: a traced graph.
      least: tensors of fewer bytes do not count.
    """
    tensors = tensors_of(graph, least=least)
    return math.fsum(tensors.constants) + peak_of(tensors.changes())


def peak_of(found: Iterable[Change]) -> float:
    """Returns the largest number of bytes that ops hold at once, given what they change."""
    sizes: dict[str, float] = {}
    held = peak = 0.0
    for change in found:
        sizes |= change.takes
        held += math.fsum(change.takes.values())
        peak = max(peak, held + change.temporary)
        if change.overwrites:
            before, after = change.overwrites
            sizes[after] = sizes.pop(before)
        held -= math.fsum(sizes.pop(name, 0.0) for name in change.frees)
    return peak


def changes_of(
    graph: Any, ops: Sequence[Any], outputs: Sequence[Any], *, least: float = 0.0
) -> Iterator[Change]:
    """Returns what some ops of a graph change in memory; see `Tensors`."""
    return Tensors(graph, ops, outputs, least=least).changes()


def tensors_of(
    graph: Any, *, least: float = 0.0, given: Mapping[str, float] | None = None
) -> Tensors:
    """Returns the tensors of a traced graph, with constants apart; see `Tensors`."""
    outputs = getattr(graph, "outputs", None) or []
    kept = folded_ops.without_constants(graph, needed(graph), outputs)
    _, live = tensor_reads.reads(kept.ops, outputs, kept.merged)
    by_iteration = loop_iterations.divided(kept.ops, outputs, kept.merged, live)
    constants = kept.constants
    if by_iteration is None:
        tensors = Tensors(graph, kept.ops, outputs, least=least, given=given)
    else:
        ops, outputs, of_bodies = by_iteration
        constants = [*constants, *of_bodies]
        tensors = Tensors(None, ops, outputs, least=least, given=given)
    tensors.constants = [size for size in constants if size >= least]
    return tensors


class Tensors:
    """The tensors of a graph: which op makes each, and which ones read it.

    Args:
      graph: the graph; None: the ops are those of a graph whose loops are divided.
      ops: the ops that run. The outputs of all others exist before and do not count.
      outputs: tensors that are not freed.
      least: tensors of fewer bytes do not count.
      given: {input: bytes} of inputs that nothing needs after the graph. Its ops free them, or use
        their memory.

    Attributes:
      ops: the ops that run, without those that TensorFlow merges with another one.
      merged: the others.
      constants: bytes of each tensor that exists before and does not count as one of the graph.
    """

    def __init__(
        self,
        graph: Any,
        ops: Sequence[Any],
        outputs: Sequence[Any],
        *,
        least: float = 0.0,
        given: Mapping[str, float] | None = None,
    ) -> None:
        self.constants: Sequence[float] = ()
        self.merged = Merged({}) if graph is None else equal_ops.merged(graph, ops)
        self.ops = [op for op in ops if op.name not in self.merged.ops]
        self.reads, live = tensor_reads.reads(self.ops, outputs, self.merged)
        self.root, self.sizes, self.lengths = _roots(self.ops, self.merged, least, live)
        self.sizes |= given or {}
        self.readers: dict[str, int] = {}
        assigned = (op.inputs[1] for op in self.ops if op.type == _ASSIGNS)
        kept = map(self.merged.name, [*outputs, *assigned])
        self.holds = {} if graph else _held_by_lists(self.ops)
        of_lists = (n for names in self.holds.values() for n in names)
        for name in [*(n for names in self.reads.values() for n in names), *of_lists, *kept]:
            if name in self.root:
                self.readers[self.root[name]] = self.readers.get(self.root[name], 0) + 1
        self._own = {op.name: self._own_of(op) for op in self.ops}
        self.temporary = {
            op.name: _inside_bytes(op, _made(op, own, self.sizes, least, kept), least, kept)
            for op, own, kept in ((op, self.own(op), live.get(op.name)) for op in self.ops)
        }

    def own(self, op: Any) -> list[str]:
        """Returns the outputs of an op that are not in the memory of another tensor."""
        return self._own[op.name]

    def _own_of(self, op: Any) -> list[str]:
        if op.type == "Placeholder":
            return []
        return [t.name for t in op.outputs if self.root.get(t.name) == t.name]

    def changes(self) -> Iterator[Change]:
        """Returns what the ops change in memory, in the order in which they get ready."""
        run = self.run()
        for op in op_order.as_they_get_ready(self.ops, self.merged):
            change = run.begin(op)
            yield change._replace(frees=run.end(op))

    def run(self) -> TensorsOfRun:
        """Returns the tensors at the start of a run."""
        return TensorsOfRun(self)


class TensorsOfRun:
    """The tensors of a graph in one run of it.

    Args:
      tensors: those of the graph.
    """

    def __init__(self, tensors: Tensors) -> None:
        self._tensors, self._readers = tensors, dict(tensors.readers)
        self._overwritten: dict[
            str, str | None
        ] = {}  # {op that runs: the input that it overwrites}

    def begin(self, op: Any) -> Change:
        """Begins an op; returns what it changes, without the tensors that are free after it."""
        all_of = self._tensors
        own = all_of.own(op)
        new = sum(all_of.sizes[name] for name in own)
        before = _overwritten(op, all_of, self._readers, new)
        self._overwritten[op.name] = before
        takes = {} if before else {name: all_of.sizes[name] for name in own}
        assigns = None
        if op.type == _ASSIGNS:
            value = all_of.root[all_of.merged.name(op.inputs[1])]
            assigns = value, _variable(op.inputs[0].op)
        overwrites = (before, own[0]) if before else None
        items = {name: all_of.lengths[name] for name in takes if name in all_of.lengths}
        return Change(takes, all_of.temporary[op.name], overwrites, (), assigns, op.name, items)

    def end(self, op: Any) -> list[str]:
        """Ends an op; returns the tensors that are free now."""
        before = self._overwritten.pop(op.name)
        root, readers = self._tensors.root, self._readers
        frees = [name for name in self._tensors.own(op) if not readers.get(name)]
        read = [root[name] for name in self._tensors.reads[op.name] if name in root]
        while read:
            name = read.pop()
            readers[name] -= 1
            if not readers[name]:
                read += [root[n] for n in self._tensors.holds.get(name, ()) if n in root]
                if name != before:
                    frees.append(name)
        return frees


def _held_by_lists(ops: Iterable[Any]) -> dict[str, list[str]]:
    """Returns {list: the tensors and lists that it contains}, of ops that make a list of others."""
    return {
        op.outputs[0].name: [tensor.name for tensor in op.inputs]
        for op in ops
        if op.type in loop_lists.GROWING and op.outputs[0].dtype == tf.variant
    }


def memory_of(graph: Any, ops: Sequence[Any], tensors: Sequence[Any]) -> list[str]:
    """Returns for each of some tensors the name of the one whose memory it has, as in `changes_of`.

    It may be a tensor that exists before, such as an input, or the handle of a variable.

    Args:
      graph: the graph.
      ops: the ops that run.
      tensors: the tensors.
    """
    merged = equal_ops.merged(graph, ops)
    root, *_ = _roots([op for op in ops if op.name not in merged.ops], merged, 0.0, {})
    found = []
    for tensor in tensors:
        name = merged.name(tensor)
        name = root.get(name, name)
        made = graph.get_tensor_by_name(name).op
        is_given = name in root and made.type in op_kinds.EXISTING_MEMORY and len(made.inputs)
        found.append(merged.name(made.inputs[0]) if is_given else name)
    return found


def _roots(
    ops: Sequence[Any], merged: Merged, least: float, live: Mapping[str, set[int]]
) -> tuple[dict[str, str], dict[str, float], dict[str, int]]:
    """Returns {tensor: the tensor whose memory it has}, the bytes of these, and lengths of lists.

    Args:
      ops: the ops that run.
      merged: ops that TensorFlow merges.
      least: tensors of fewer bytes do not count.
      live: {loop: numbers of the values that it computes}; of other loops, all.
    """
    root: dict[str, str] = {}
    sizes: dict[str, float] = {}
    lengths: dict[str, int] = {}
    for op in ops:
        lists = loop_lists.lists_of(op, least, live.get(op.name))
        shared_inputs = graph_work.shared_inputs(op)
        for number, tensor in enumerate(op.outputs):
            source = None
            if len(op.inputs):
                shared = shared_inputs[number] if shared_inputs else min(number, len(op.inputs) - 1)
                source = merged.name(op.inputs[shared])
            items = lists.get(number)
            is_empty = items is not None and not items.bytes
            is_alias = bool(shared_inputs) or op.type in op_kinds.EXISTING_MEMORY or is_empty
            root[tensor.name] = root[source] if is_alias and source in root else tensor.name
            held = 0.0 if is_alias else graph_work.size_bytes(tensor)
            held = held if held >= least else 0.0
            if items is not None and not is_alias:
                held, lengths[tensor.name] = items.bytes, items.length
            sizes.setdefault(root[tensor.name], held)
    return root, sizes, lengths


def _variable(handle: Any) -> str:
    """Returns the name of a variable that the graph of a plan has instead of a captured one."""
    return str(handle.node_def.attr["shared_name"].s.decode()) or str(handle.name)


def _overwritten(op: Any, tensors: Tensors, readers: Mapping[str, int], new: float) -> str | None:
    """Returns the input whose memory the op uses for its output."""
    if not new or len(op.outputs) != 1 or op.type in _NEW or graph_work.inside(op)[1]:
        return None
    for tensor in op.inputs:
        name = tensors.root.get(tensors.merged.name(tensor))
        if name is not None and readers.get(name) == 1 and tensors.sizes[name] == new:
            return str(name)
    return None


def _inside_bytes(op: Any, new: float, least: float, live: set[int] | None) -> float:
    """Returns the bytes that an op needs beyond its outputs, such as for graphs inside it."""
    _, inner = graph_work.inside(op)
    if op.type == "Einsum":
        return math.fsum(c.bytes for c in einsum_copies.copies(op) if c.bytes >= least)
    if not inner:
        return 0.0
    if is_cluster(op, inner):
        made = math.fsum(map(graph_work.size_bytes, op.outputs))
        # XLA allocates all temporary memory at once, so `least` is compared with the whole of it.
        temporary = CompiledCluster(inner[0]).peak_bytes() - made
        return temporary if temporary >= max(least, 0.0) else 0.0
    if live is not None:
        body = inner[0]
        outputs = [body.outputs[number] for number in sorted(live)]
        ops = needed_for(body, outputs)
        return max(0.0, peak_of(changes_of(body, ops, outputs, least=least)) - new)
    return max(0.0, max(peak_bytes(one, least=least) for one in inner) - new)


def _made(
    op: Any, own: Sequence[str], sizes: Mapping[str, float], least: float, live: set[int] | None
) -> float:
    """Returns the bytes of an op's outputs; of a list that a loop fills, those of an item."""
    items = {} if live is None else loop_lists.added_items(op, live)
    return math.fsum(
        (items[n].each if items[n].each >= least else 0.0) if n in items else sizes[tensor.name]
        for n, tensor in enumerate(op.outputs)
        if tensor.name in own
    )
