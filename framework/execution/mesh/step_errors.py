"""Compiles steps for a mesh, and shortens DTensor's errors to one line."""

from __future__ import annotations

import contextlib
import functools
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tekso.framework import graph_errors
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.workarounds.compiler import cut_messages
from tekso.framework.execution.workarounds.op_places import described, ops_of, place_of_lookup
from tekso.framework.execution.workarounds.op_substitutes import SUBSTITUTES
from tekso.framework.execution.workarounds.repeated_sums import refuse_repeated_sums
from tekso.framework.execution.workarounds.retracing import DUPLICATE_NAME, retraced
from tekso.framework.execution.workarounds.unsupported_ops import refuse_unsupported

_OF_DTENSOR = ("dtensor", DUPLICATE_NAME)
_OF_COMPILER = re.compile(r"(?:(\S+:\d+):\d+: )?error: (?!'builtin.module')(.*)")
_MADE_OUTSIDE = re.compile(r"got a regular tensor for input \d+ \(shape (\[[^\]]*\])\)")
_SURPLUS = re.compile(r"^loc\(.*\)\): |\. Please file a feature request to .*")
Traced = Sequence[weakref.ref[tf.Graph]]
"""Graphs that were traced; only their functions keep them."""
ADVICE = (
    "Remove rules and extra axes one by one to find the one that does not work. "
    'docs/meshes.md, "Custom layers", lists the ops that custom layers should not use'
)


def compiled(
    step: Callable[..., Any],
    where: str,
    *,
    advice: str = ADVICE,
    graphs: list[weakref.ref[tf.Graph]] | None = None,
) -> Callable[..., Any]:
    """Returns a step as a program of a mesh: a tf.function with the errors of `explained`.

    Everything that is traced is searched for unsupported ops: training and evaluation, forward and
    backward. What is compiled is searched for wrong products, after its first run.

    Args:
      step: a function of tensors.
      where: as in `explained`.
      advice: as in `explained`.
      graphs: an empty list, to which the graphs are added that are traced.
    """
    traced = [] if graphs is None else graphs

    @functools.wraps(step)
    def checked(*args: Any) -> Any:
        outputs = step(*args)
        graph = tf.compat.v1.get_default_graph()
        traced.append(weakref.ref(graph))
        refuse_unsupported(graph)  # during tracing, before it runs
        return outputs

    program = retraced(checked)

    @functools.wraps(step)
    def run(*args: Any) -> Any:
        count = len(traced)
        outputs = program(*args)
        if new := traced[count:]:
            refuse_repeated_sums(ops_of_all(new))
        return outputs

    return explained(run, where, advice=advice, traced=traced)


def ops_of_all(traced: Traced) -> Iterator[tf.Operation]:
    """Yields the ops of the graphs that still exist."""
    for reference in traced:
        graph = reference()
        if graph is not None:
            yield from ops_of(graph)


@contextlib.contextmanager
def with_lines(traced: Callable[[], Traced]) -> Iterator[None]:
    """Gives the error of a lookup in the block, which has no stack on a mesh, the line of its op.

    DTensor computes after the call, so that a step fails where its results are read.

    Args:
      traced: returns the graphs that the block runs.
    """
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        if (rows := graph_errors.rows_of_lookup(error)) is not None:
            graph_errors.set_place(error, place_of_lookup(ops_of_all(traced()), rows))
        raise


def explained(
    step: Callable[..., Any], where: str, *, advice: str = ADVICE, traced: Traced = ()
) -> Callable[..., Any]:
    """Returns `step` with an ExecutionError if DTensor cannot partition its program over the mesh.

    Args:
      step: a tf.function.
      where: the mesh, the rules and the extra axes, for the message.
      advice: end of the message: what to do.
      traced: graphs with the lines of the ops of `step`; the caller may add to it.
    """
    cut_messages()

    @functools.wraps(step)
    def run(*args: Any) -> Any:
        try:
            return step(*args)
        except (
            tf.errors.InternalError,
            tf.errors.InvalidArgumentError,
            tf.errors.UnimplementedError,
            tf.errors.UnknownError,
        ) as error:
            message = str(error)
            if found := _MADE_OUTSIDE.search(message):
                raise ExecutionError(
                    f"a layer reads a tensor of shape {found[1]} that was made outside of the "
                    "step, such as self.scale = tf.constant(…) in __init__; a mesh cannot read it: "
                    "keep an array of NumPy instead, self.scale = np.array(…, np.float32)"
                ) from None
            if not any(word in message for word in _OF_DTENSOR):
                raise
            raise _not_compiled(where, _reason(message, traced, advice)) from None

    return run


def lists_of_loop(where: str, place: str) -> ExecutionError:
    """Returns the error of a step with a loop of TensorFlow, as DTensor's, without compiling it.

    Args:
      where: as in `explained`.
      place: the line of the loop.
    """
    kind = "EmptyTensorList"  # of its gradient, or of its TensorArray
    reason = f"{place}: {kind}: 'tf.{kind}' op does not implement layout propagation"
    return _not_compiled(where, f"{reason}. Write {SUBSTITUTES[kind]} instead")


def _not_compiled(where: str, reason: str) -> ExecutionError:
    return ExecutionError(f"TensorFlow's DTensor cannot compile this step for {where}: {reason}")


def _reason(message: str, traced: Traced, advice: str) -> str:
    """Returns the reason in a message of DTensor, with the line of the layer, and the advice."""
    found = _OF_COMPILER.search(message)
    reason = _SURPLUS.sub("", found.group(2) if found else message.partition("\n")[0])
    graphs = [graph for reference in traced if (graph := reference()) is not None]
    op = described(message, graphs)
    if op is not None:
        kind, place = op
        reason = f"{place}: {kind}: {reason}"
        if kind in SUBSTITUTES:
            advice = f"Write {SUBSTITUTES[kind]} instead"
    elif found and found.group(1) and "/tensorflow/" not in found.group(1):
        reason = f"{found.group(1)}: {reason}"
    return f"{reason[:700]}. {advice}"
