"""Refuses what would have other values in every process: undeclared variables, random numbers.

Layers hold no variables: an execution makes them from the weight specs. The weights of a
`tf.Variable` or a Keras layer that a layer brings along are in no checkpoint and no table. Random
numbers come from the step's context, so that every execution draws the same. Both are found in two
ways, in every execution:

    check(task)             when an experiment is built: attributes of layers
    with refused(task): …   when a step is traced: what is made or read inside (globals, closures,
                            Keras layers that make their variables at the first call)
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework.layer import Layer

_DEPTH = 4  # of lists and dicts in an attribute
_WHY = "it would be neither learned, counted nor saved, and have other values in every process"
_CURE = (
    "declare it in the __init__ of the layer by self.weight(name, shape, dims=…, init=…), and read "
    "it in fprop as theta.name; of a Keras layer, use the layer of Tekso"
)


class ForeignVariableError(ValueError):
    """A layer has or reads a variable that it has not declared as a weight, or random numbers."""


def check(root: Layer) -> None:
    """Checks that no attribute of a layer, or of one below it, has variables or undeclared layers.

    Raises:
      ForeignVariableError: one has; names the layer and the attribute.
    """
    layers, has_weights = {id(layer) for layer in root.walk()}, bool(root.specs())
    for layer in root.walk():
        for name, value in vars(layer).items():
            if name in ("params", "_parent", "_children", "_weights"):
                continue
            leaves = _leaves(value, _DEPTH)
            undeclared = [x for x in leaves if isinstance(x, Layer) and id(x) not in layers]
            if undeclared:
                kind, call = type(undeclared[0]).__name__, "child"
                if not isinstance(value, Layer):
                    call = "child_list"
                raise ForeignVariableError(
                    f"{_called(layer)} has an attribute {name!r} with a layer of type {kind} that "
                    "is none of its children, so its weights would be neither learned nor saved: "
                    "declare it in "
                    f"__init__ by self.{call}({name!r}, …), with Params, and call it in fprop as "
                    f"self.{name}{'' if call == 'child' else '[i]'}.fprop(theta.{name}…, x, ctx)"
                )
            others = [x for x in leaves if not isinstance(x, Layer)]
            found = [v for x in others for v in _variables_of(x)]
            # A layer of Keras may make its variables when it is called.
            if found or (not has_weights and any(map(_is_of_keras, others))):
                what = type(value).__name__
                if found and not isinstance(value, tf.Variable):
                    what += f" with {_shown(found)}"
                raise ForeignVariableError(
                    f"{_called(layer)} has an attribute {name!r} of type {what}: a layer holds no "
                    f"variables; {_WHY}: {_CURE}"
                )


def check_constants(root: Layer, again: Layer) -> None:
    """Checks that constants in attributes of layers are the same whenever a model is built.

    Args:
      root: the layer, such as a task.
      again: the same, built a second time from the same Params.

    Raises:
      ForeignVariableError: one differs; names the layer and the attribute.
    """
    for layer, other in zip(root.walk(), again.walk(), strict=True):
        for name, value in vars(layer).items():
            pairs = zip(
                _leaves(value, _DEPTH), _leaves(vars(other).get(name), _DEPTH), strict=False
            )
            if any(_differ(one, another) for one, another in pairs):
                raise ForeignVariableError(
                    f"{_called(layer)} has an attribute {name!r} with other numbers each time the "
                    "layer is built, so a checkpoint would not give the same outputs again. Draw "
                    "them with a fixed seed, np.random.default_rng(0); or declare a weight: "
                    f"self.weight({name!r}, shape, dims=…, init=…, trainable=False)"
                )


def _differ(one: Any, another: Any) -> bool:
    if tf.is_tensor(one) and tf.is_tensor(another) and hasattr(one, "numpy"):
        one, another = one.numpy(), another.numpy()
    if isinstance(one, (np.ndarray, np.generic, float)):
        return not np.array_equal(one, another, equal_nan=np.asarray(one).dtype.kind in "fc")
    return False


def check_function(root: Layer | None, function: Callable[[], Any]) -> None:
    """Traces a function, without running it, and refuses variables and random numbers in it.

    Args:
      root: the layer whose methods it may call, such as a task; None: there is none.
      function: takes no arguments.

    Raises:
      ForeignVariableError: it makes or reads a variable, or draws random numbers.
    """

    @tf.function(autograph=False)
    def traced() -> None:
        with refused(root):
            function()

    traced.get_concrete_function()


@contextlib.contextmanager
def refused(root: Layer | None, *, own: Iterable[Any] = ()) -> Iterator[None]:
    """Refuses variables that are made or read in the block, which traces a pure function.

    Args:
      root: the layer, such as a task, whose code is traced, or any below it; None: there is none.
      own: variables of the execution: where the layers of one replica wait for those of another, it
        reads the weights of the other replica inside the block.

    Raises:
      ForeignVariableError: names the variable, and the layer whose code makes or reads it.
    """

    def refuse(next_creator: Any, **kwargs: Any) -> Any:
        del next_creator
        name = kwargs.get("name") or "Variable"
        shown = f"the variable {name!r}"
        raise ForeignVariableError(_message(root, traceback.extract_stack(), "makes", shown))

    while root is not None and root._parent is not None:
        root = root._parent
    if tf.executing_eagerly():  # nothing is traced
        yield
        return
    graph: Any = tf.compat.v1.get_default_graph()
    with _read(graph) as read, tf.variable_creator_scope(refuse):
        before = {id(variable) for variable in (*read(), *own)}
        num_ops = len(graph.get_operations())
        try:
            yield
        except ForeignVariableError:
            raise
        except Exception as error:  # a variable is not there for every kind of graph
            found = [v for v in read() if id(v) not in before]
            if found or _is_capture_of_variable(error):
                frames = traceback.extract_tb(error.__traceback__)
                shown = _shown(found) if found else "a variable"
                raise ForeignVariableError(_message(root, frames, "reads", shown)) from error
            raise
        found = [v for v in read() if id(v) not in before]
    if found:
        place = _place_of_read(graph, found[0])
        raise ForeignVariableError(_message(root, place, "reads", _shown(found)))
    for op in itertools.islice(graph.get_operations(), num_ops, None):
        if random := _random_op(graph, op):
            layer, where = _layer_at(root, random.traceback)
            raise ForeignVariableError(
                f"{layer} draws random numbers{where} that no seed of the run decides, so every "
                "process and every execution would draw others. Take them from the context: "
                "ctx.uniform(self, shape), tf.math.ndtri(ctx.uniform(self, shape)) for normal "
                "ones, or ops.dropout(ctx, x, rate, self)"
            )


def _is_random(node: Any) -> bool:
    """Whether a node draws other numbers each time, whatever the seed of the run."""
    if node.op.startswith("Stateful"):
        return bool(node.op != "StatefulPartitionedCall")
    return ("seed2" in node.attr and not node.op.startswith("Stateless")) or node.op.startswith(
        "Rng"
    )


def _random_op(graph: Any, op: Any) -> Any:
    """Returns the op, or one in the functions that it calls, that draws random numbers; or None."""
    if _is_random(op.node_def):
        return op
    for name in ("f", "body", "cond", "then_branch", "else_branch"):
        with contextlib.suppress(ValueError):
            function = graph._get_function(op.get_attr(name).name)
            inner = getattr(function, "graph", None)
            for one in inner.get_operations() if inner is not None else ():
                if found := _random_op(inner, one):
                    return found
    return None


@contextlib.contextmanager
def _read(graph: Any) -> Iterator[Any]:
    """Yields a function that returns the variables read in a graph so far, functions included."""
    if hasattr(graph, "watch_variable"):  # of a tf.function; what functions in it read, it knows
        yield lambda: list(graph._watched_variables)
        return
    found: list[Any] = []
    graph.watch_variable = found.append  # TensorFlow calls it if there is one
    try:
        yield lambda: list(found)
    finally:
        del graph.watch_variable


def _leaves(value: Any, depth: int) -> list[Any]:
    """What nests of lists and dicts hold, down to a depth."""
    nest = list(value.values()) if isinstance(value, Mapping) else value
    if depth and isinstance(nest, (list, tuple, set, frozenset)):
        return [leaf for one in nest for leaf in _leaves(one, depth - 1)]
    return [value]


def _variables_of(value: Any) -> list[Any]:
    """The variables of an attribute that is no nest, and no layer."""
    if isinstance(value, tf.Variable):
        return [value]
    if isinstance(value, tf.Module) or _is_of_keras(value):
        found: Iterable[Any] = value.variables
        return list(found)
    return []


def _is_of_keras(value: Any) -> bool:
    return hasattr(type(value), "trainable_variables")


def _is_capture_of_variable(error: BaseException) -> bool:
    """Whether a loop or a function could not take in a variable of which its graph has none."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    value: Any = frames[-1].f_locals.get("self")
    return bool(tf.is_tensor(value) and value.dtype == tf.resource)


def _place_of_read(graph: Any, variable: Any) -> Iterable[Any]:
    """Where in the user's code a variable is read, as frames; empty if it is not known."""
    handle = variable.handle
    for inner, own in _captures(graph, [handle]):
        for op in inner.get_operations():
            if any(x is y for x in op.inputs for y in own):
                return op.traceback
    return ()


def _captures(graph: Any, outer: list[Any]) -> Iterator[tuple[Any, list[Any]]]:
    """Yields a graph and all functions in it, with what a tensor from outside is called there."""
    known = [own for given, own in getattr(graph, "captures", ()) if any(given is x for x in outer)]
    yield graph, known
    for function in graph._functions.values():
        if getattr(function, "graph", None) is not None:
            yield from _captures(function.graph, [*outer, *known])


def _message(root: Layer | None, frames: Iterable[Any], does: str, shown: str) -> str:
    name, where = _layer_at(root, frames)
    return f"{name} {does} {shown}{where}, which is none of its weights; {_WHY}: {_CURE}"


def _layer_at(root: Layer | None, frames: Iterable[Any]) -> tuple[str, str]:
    """Returns what the layer is called whose code the innermost frame runs, and " (file:line)"."""
    frames = [frame for frame in frames if "/tensorflow/" not in frame.filename]
    layers = list(root.walk()) if root else []
    for frame in reversed(frames):
        layer = next((one for one in layers if _has_code(one, frame)), None)
        if layer is not None:
            return _called(layer), f" ({frame.filename}:{frame.lineno})"
    return _called(root) if root else "the loss", ""


def _has_code(layer: Layer, frame: Any) -> bool:
    """Whether a line is in a method that the class of a layer, below `Layer`, defines."""
    for kind in type(layer).__mro__:
        if kind is Layer:
            return False
        for method in vars(kind).values():
            code = getattr(inspect.unwrap(method) if callable(method) else None, "__code__", None)
            if code is None or code.co_filename != frame.filename:
                continue
            lines = [line for _, _, line in code.co_lines() if line is not None]
            if code.co_firstlineno <= frame.lineno <= max(lines):
                return True
    return False


def _called(layer: Layer) -> str:
    return f"{layer.path} ({type(layer).__name__})" if layer.path else type(layer).__name__


def _shown(variables: list[Any]) -> str:
    first = variables[0]
    more = f" and {len(variables) - 1} more" if len(variables) > 1 else ""
    return f"the variable {first.name!r} {list(first.shape)}{more}"
