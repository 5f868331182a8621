"""Counts the operations of a forward pass by layer: of each op, the layer whose method creates it.

    encoder.fprop(theta, …)  ─►  ops in the name scope "layer_3/"  ─►  "model/encoder"

`fprop` and every other method of a layer whose first argument is `theta` are observed. Ops within
loops and functions belong to the layer that creates them there, else to the one that creates the
loop.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from tekso.framework import task_results
from tekso.framework.context import StepContext
from tekso.framework.costs import graph_walks, graph_work, op_kinds
from tekso.framework.foreign_variables import refused
from tekso.framework.layer import Layer
from tekso.framework.signature import Signature, num_examples
from tekso.framework.symbolic import new_graph, placeholders, placeholders_of_batch
from tekso.framework.task import Task
from tekso.framework.theta import SEPARATOR

LOSS = "loss"
"""The part of ops that no layer creates: those of the task itself."""

_SCOPE = "of_layer_"
_OWNER = re.compile(rf"{_SCOPE}(\d+)/")
_MOST_OF_A_LIST = 8
"""Layers of a list that are parts of their own if a model has nothing else."""


def layer_flops(task: Task, batch: Signature) -> dict[str, float]:
    """Returns {path of a layer: floating-point operations of its own ops in a forward pass}.

    The paths are in the order in which the layers compute. The loss is traced, not computed.

    Args:
      task: the task.
      batch: signature of the batch.
    """
    layers = [layer for layer in task.walk() if layer is not task]
    with new_graph().as_default() as graph, _observed(layers), refused(task):
        theta = task.theta(placeholders(task.specs()))
        arrays = placeholders_of_batch(batch)
        ctx = StepContext(mode="train", num_examples=num_examples(batch))
        task_results.loss(task, theta, arrays, ctx)
    paths = [layer.path for layer in layers]
    found = _count(graph, None)
    own = {paths[number]: flops for number, flops in found.items() if number is not None}
    return {**own, LOSS: found[None]}


def by_part(flops: Mapping[str, float]) -> dict[str, float]:
    """Returns {part: floating-point operations}: the first layers below what all have in common.

    The layers of a list are one part, such as "model/blocks (sum of 4)".

    Args:
      flops: as of `layer_flops`.
    """
    own = {path: value for path, value in flops.items() if path != LOSS}
    depth = common_depth(own)
    parts: dict[str, float] = {}
    numbers: dict[str, set[str]] = {}
    for path, value in own.items():
        names = path.split(SEPARATOR)
        name, number = SEPARATOR.join(names[: depth + 1]), names[depth + 1 : depth + 2]
        parts[name] = parts.get(name, 0.0) + value
        if number and number[0].isdecimal():
            numbers.setdefault(name, set()).add(number[0])
    counts = {name: len(numbers.get(name, ())) for name in parts}
    found = {summed(name, counts[name]): parts[name] for name in parts}
    return {**found, LOSS: flops[LOSS]} if LOSS in flops else found


def summed(part: str, count: int) -> str:
    """Returns the name of a part whose figure is the sum over the layers of a list."""
    return f"{part} (sum of {count})" if count > 1 else part


def common_depth(names: Collection[str]) -> int:
    """Returns how many parts all paths begin with; not those of a list of many layers.

    A part of the model has the path up to there, and one name more.

    Args:
      names: paths of layers or of pieces.
    """
    paths = [name.split(SEPARATOR) for name in names if not _is_above(name, names)]
    depth = 0
    while paths and all(len(path) > depth + 1 for path in paths):
        below = {path[depth + 1] for path in paths}
        is_long_list = len(below) > _MOST_OF_A_LIST and all(name.isdecimal() for name in below)
        if len({path[depth] for path in paths}) > 1 or is_long_list:
            break
        depth += 1
    return depth


def _is_above(path: str, others: Iterable[str]) -> bool:
    return any(other.startswith(f"{path}{SEPARATOR}") for other in others)


@contextlib.contextmanager
def _observed(layers: list[Layer]) -> Iterator[None]:
    """Creates the ops of each layer in a name scope of its own in the block."""
    replaced: list[tuple[Layer, str]] = []
    try:
        for number, layer in enumerate(layers):
            for name in _computing(type(layer)):
                method = getattr(layer, name)
                layer.__dict__[name] = functools.partial(_scoped, f"{_SCOPE}{number}/", method)
                replaced.append((layer, name))
        yield
    finally:
        for layer, name in replaced:
            del layer.__dict__[name]


def _computing(kind: type[Layer]) -> list[str]:
    """Returns the names of `fprop` and of other public methods of a class that take theta."""

    def takes_theta(method: Callable[..., Any]) -> bool:
        return [*inspect.signature(method).parameters][1:2] == ["theta"]

    return [
        name
        for name, method in inspect.getmembers(kind, inspect.isfunction)
        if name == "fprop" or (not name.startswith("_") and takes_theta(method))
    ]


def _scoped(scope: str, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
    with tf.name_scope(scope):  # ends with "/": not below the scope of the caller
        return method(*args, **options)


def _count(graph: Any, owner: int | None) -> dict[int | None, float]:
    """Returns {number of a layer: operations} of a graph; `owner` is that of unscoped ops."""
    found: dict[int | None, float] = {owner: 0.0}
    for op in graph_walks.needed(graph):
        scopes = _OWNER.findall(op.name)
        own = int(scopes[-1]) if scopes else owner
        times, inner = graph_work.inside(op)
        if inner:
            most = max((_count(one, own) for one in inner), key=lambda one: sum(one.values()))
            for number, flops in most.items():
                found[number] = found.get(number, 0.0) + times * flops
        elif op.type not in op_kinds.FREE and any(t.dtype.is_floating for t in op.outputs):
            found[own] = found.get(own, 0.0) + graph_work.op_flops(op)
    return found
