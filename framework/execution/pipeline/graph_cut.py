"""Cuts one traced step into functions that run at different times, such as forward and backward.

    early inputs ──► forward ops ──► outputs
                         │ saved activations
    late inputs ─────► backward ops ──► gradients

The step is traced once. Its inputs include the gradients of its outputs, which arrive later. Ops
that depend on a late input are the backward pass. The tensors that they read from other ops are
either saved in between or recomputed. Every function is a subgraph of one graph, so all of them
compute the same numbers. Tensors that depend only on lasting inputs (such as a cast weight) are
always recomputed: saved, they would exist once for each micro-batch. Control dependencies of the
backward pass on the forward pass (a check, a message) are dropped, because those ops ran already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tekso.framework.costs.op_kinds import LOOPS
from tekso.framework.execution.pipeline.graph_effects import effects as effects_of
from tekso.framework.symbolic import spec_of


class GraphCut:
    """A traced function of early and late inputs, from which subgraphs are cut as functions.

    Args:
      concrete: a concrete function of flat tensors.
      num_late: how many of its last inputs arrive late.
      num_lasting: how many of its first inputs are available whenever a subgraph runs.
    """

    def __init__(self, concrete: Any, num_late: int, *, num_lasting: int) -> None:
        self._graph = concrete.graph
        num_given = len(concrete.inputs) - len(concrete.captured_inputs)
        self._captured = list(
            zip(concrete.inputs[num_given:], concrete.captured_inputs, strict=True)
        )
        self.early: list[tf.Tensor] = list(concrete.inputs[: num_given - num_late])
        self.late: list[tf.Tensor] = list(concrete.inputs[num_given - num_late : num_given])
        self.lasting: list[tf.Tensor] = self.early[:num_lasting]
        self._def = self._graph.as_graph_def()
        self._has_loops = _has_loops(self._def)
        self._of_passing = self._reached(t.op for t in self.early[num_lasting:])
        self._of_late = self._reached(t.op for t in self.late)

    def _reached(self, sources: Iterable[tf.Operation]) -> set[str]:
        """Returns the names of these ops and of all ops that depend on any of them."""
        names = {op.name for op in sources}
        for op in self._graph.get_operations():  # in topological order
            before = (*(t.op for t in op.inputs), *op.control_inputs)
            if any(other.name in names for other in before):
                names.add(op.name)
        return names

    def early_effects(self) -> list[tf.Operation]:
        """Returns the ops with side effects that do not depend on late inputs."""
        return [op for op in effects_of(self._graph) if op.name not in self._of_late]

    def is_late(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor depends on a late input."""
        return tensor.op.name in self._of_late

    def saved_for(self, outputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the early tensors, inputs included, that the late ops computing `outputs` read.

        It omits constants and tensors that depend only on lasting inputs: they are recomputed.
        """
        saved: dict[str, tf.Tensor] = {}
        for op in self._above(outputs, stop=lambda t: not self.is_late(t)):
            for tensor in op.inputs:
                if not self.is_late(tensor) and tensor.op.name in self._of_passing:
                    saved[tensor.name] = tensor
        for tensor in outputs:
            if not self.is_late(tensor) and tensor.op.name in self._of_passing:
                saved[tensor.name] = tensor  # a gradient that does not depend on late inputs
        return list(saved.values())

    def saved_between(
        self, first: Sequence[tf.Tensor], then: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Returns tensors of late ops computing `first` that other ops computing `then` read."""
        done = {op.name for op in self._above(first, stop=lambda t: not self.is_late(t))}
        saved: dict[str, tf.Tensor] = {}

        def is_done(tensor: tf.Tensor) -> bool:
            return tensor.op.name in done or not self.is_late(tensor)

        for op in self._above(then, stop=is_done):
            for tensor in op.inputs:
                if tensor.op.name in done:
                    saved[tensor.name] = tensor
        for tensor in then:
            if tensor.op.name in done:
                saved[tensor.name] = tensor
        late = {t.name for t in self.late}
        return [t for t in saved.values() if t.name not in late]

    def taken(self, feeds: Sequence[tf.Tensor], outputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the tensors of `feeds` that the ops computing `outputs` from them read."""
        known = {t.name for t in feeds}
        above = self._above(outputs, stop=lambda t: t.name in known)
        used = {t.name for op in above for t in op.inputs} | {t.name for t in outputs}
        return [t for t in feeds if t.name in used]

    def _above(
        self, tensors: Sequence[tf.Tensor], *, stop: Callable[[tf.Tensor], bool]
    ) -> list[tf.Operation]:
        """Returns the ops that tensors depend on, up to tensors where `stop` holds; no effects."""
        return self._with_all_above([t.op for t in tensors if not stop(t)], stop=stop)

    def _with_all_above(
        self,
        ops: Sequence[tf.Operation],
        *,
        stop: Callable[[tf.Tensor], bool],
        has_effects: bool = False,
    ) -> list[tf.Operation]:
        """Returns these ops and all ops that they depend on, up to tensors where `stop` holds.

        Control dependencies on early ops are followed only if `has_effects`.
        """
        found: dict[str, tf.Operation] = {}
        todo = list(ops)
        while todo:
            op = todo.pop()
            if op.name not in found:
                found[op.name] = op
                todo += [t.op for t in op.inputs if not stop(t)]
                before = [c for c in op.control_inputs if has_effects or c.name in self._of_late]
                todo += [c for c in before if not any(stop(t) for t in c.outputs)]
        return list(found.values())

    def function(
        self,
        feeds: Sequence[tf.Tensor],
        fetches: Sequence[tf.Tensor],
        saved: Sequence[tf.Tensor] = (),
        effects: Sequence[tf.Operation] | None = None,
        *,
        inlined: bool = False,
    ) -> Subgraph:
        """Returns a function from some tensors of the graph to others.

        Args:
          feeds: the inputs of the function. Those that it does not need are omitted.
          fetches: the tensors that it returns.
          saved: tensors that it returns in addition, by name.
          effects: ops that run even if no returned tensor depends on them; None: this subgraph is
            not part of the forward pass.
          inlined: whether it adds its ops to the graph in which it is called; otherwise, it is
            compiled here.

        Raises:
          ValueError: the fetches depend on an input that is not fed.
        """
        feeds = list({t.name: t for t in feeds}.values())
        wanted = list({t.name: t for t in (*fetches, *saved)}.values())
        known = {t.name for t in feeds} | {inner.name for inner, _ in self._captured}
        roots = [*(t.op for t in wanted if t.name not in known), *(effects or ())]
        found = self._with_all_above(
            roots, stop=lambda t: t.name in known, has_effects=effects is not None
        )
        ops = {op.name: op for op in found}
        missing = [t.name for t in (*self.early, *self.late) if t.op.name in ops]
        if missing:
            raise ValueError(f"the outputs depend on the inputs {missing}, which are not fed")
        part = tf.compat.v1.GraphDef(versions=self._def.versions, library=self._def.library)
        used = {t.name for op in ops.values() for t in op.inputs} & known
        for node in self._def.node:
            if node.name in ops:
                copy = part.node.add()
                copy.CopyFrom(node)
                copy.attr.pop("_class", None)  # colocation with an op that may be omitted here
                del copy.input[:]
                copy.input.extend(i for i in node.input if i[0] != "^" or i[1:] in ops)
        feeds = [t for t in feeds if t.name in used or t.name in {w.name for w in wanted}]
        captured = {inner.name: value for inner, value in self._captured}
        made = [t.name for t in wanted if t.name not in known]

        def run(*values: tf.Tensor) -> list[tf.Tensor]:
            graph = tf.compat.v1.get_default_graph()
            given = {name: graph.capture(x) for name, x in captured.items()}
            given |= {t.name: x for t, x in zip(feeds, values, strict=True)}
            inputs = {name: x for name, x in given.items() if name in used}
            found = tf.graph_util.import_graph_def(
                part, input_map=inputs, return_elements=made, name="part"
            )
            given |= dict(zip(made, found, strict=True))
            return [given[t.name] for t in wanted]

        return Subgraph(
            run,
            feeds,
            wanted,
            fetches,
            saved,
            ops=[op for op in self._graph.get_operations() if op.name in ops],
            has_loops=self._has_loops,
            inlined=inlined,
        )


def _has_loops(graph_def: Any) -> bool:
    bodies = [f.node_def for f in graph_def.library.function]
    return any(node.op in LOOPS for nodes in (graph_def.node, *bodies) for node in nodes)


class Subgraph:
    """A subgraph as a function of a mapping from tensor names to values.

    Attributes:
      feeds: names of its inputs.
      has_loops: whether the graph from which it was cut has loops.
      ops: its ops in the traced graph.
      outputs: tensors of this graph that it returns.
    """

    def __init__(
        self,
        run: Callable[..., list[tf.Tensor]],
        feeds: Sequence[tf.Tensor],
        wanted: Sequence[tf.Tensor],
        fetches: Sequence[tf.Tensor],
        saved: Sequence[tf.Tensor],
        *,
        ops: Sequence[tf.Operation],
        has_loops: bool,
        inlined: bool,
    ) -> None:
        self.ops, self.outputs = ops, wanted
        self._run, self._call, self.has_loops = run, run, has_loops
        self.feeds = [t.name for t in feeds]
        self._signature = [*map(spec_of, feeds)]
        if not inlined:
            self.trace_again()
        position = {t.name: i for i, t in enumerate(wanted)}
        self._fetches = [position[t.name] for t in fetches]
        self._saved = {t.name: position[t.name] for t in saved}

    def trace_again(self) -> None:
        """Makes another function of the same ops."""
        function = tf.function(self._run, autograph=False)
        self._call = function.get_concrete_function(*self._signature)

    def __call__(
        self, known: Mapping[str, tf.Tensor]
    ) -> tuple[list[tf.Tensor], dict[str, tf.Tensor]]:
        """Returns the fetches in order, and the saved tensors by name."""
        return self.arranged(self._call(*[known[name] for name in self.feeds]))

    def arranged(self, found: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Returns values of `outputs` as `__call__` does: the fetches, and {name: saved tensor}."""
        return [found[i] for i in self._fetches], {n: found[i] for n, i in self._saved.items()}
