"""Rejects undeclared variables and random ops in layers: their values would differ per process.

Layers have no variables: an execution creates variables from the weight specs. A `tf.Variable` or a
Keras layer in a layer would be missing from checkpoints and weight tables. Random numbers must come
from the step context, so that every execution draws the same numbers. Every execution is checked at
two times:

    check(task)             when an experiment is built: the attributes of layers
    with refused(task): …   when a step is traced: variables created or read in it (globals,
                            closures, Keras layers that create variables in their first call)
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework.context import RANDOM_NUMBERS, passing_context
from tekso.framework.foreign_methods import foreign_method, missing_fprop
from tekso.framework.layer import Layer
from tekso.framework.params.containers import ATOMS
from tekso.framework.user_mistakes import MistakeError

_KERAS = f"{os.sep}keras{os.sep}src{os.sep}"  # in the file names of Keras
_TENSORS = (tf.Tensor, tf.Variable, tf.RaggedTensor)
_OWN = ("params", "_parent", "_children", "_weights")  # attributes of every layer
_DEPTH = 4  # of lists and dicts in an attribute
_WHY = "it would not be trained, counted or saved, and its values would differ between processes"
_CURE = (
    "declare it in the __init__ of the layer with self.weight(name, shape, dims=…, init=…), and "
    "read it in fprop as theta.name; replace a Keras layer by the corresponding layer of Tekso"
)

NO_STATE = (
    "A layer keeps no state: declare a value that steps change as a weight, self.weight(name, …, "
    "trainable=False), collect its new value with ctx.collect_statistic(self, name, sum, weight), "
    "and return it from updated_statistics"
)
"""What to write instead of an attribute that a call changes."""


class ForeignVariableError(MistakeError):
    """A layer uses a variable that is not one of its weights, or draws unseeded random numbers."""


def check(root: Layer) -> None:
    """Checks that no attribute of a layer or of its descendants has variables or undeclared layers.

    A model without any weight is also rejected if one of its layers computes by the method of
    another framework instead of `fprop`.

    Raises:
      ForeignVariableError: an attribute has; the message names the layer and the attribute.
    """
    if not root.specs():
        for layer in root.walk():
            if type(layer).fprop is Layer.fprop and foreign_method(type(layer)):
                raise ForeignVariableError(
                    f"{missing_fprop(type(layer))}. The model has no weights: declare them in "
                    "the __init__ of its layers, with self.weight(name, shape, dims=…, init=…) or "
                    "self.child(name, Linear.Params(…))"
                )
    # A layer that another one wraps shares its weights.
    known = {id(layer._weights) for layer in root.walk()}
    for layer in root.walk():
        for name, value in vars(layer).items():
            if type(value) in ATOMS or name in _OWN:
                continue
            leaves = _leaves(value, _DEPTH)
            undeclared = [x for x in leaves if isinstance(x, Layer) and id(x._weights) not in known]
            if undeclared:
                kind, call = type(undeclared[0]).__name__, "child"
                if not isinstance(value, Layer):
                    call = "child_list"
                raise ForeignVariableError(
                    f"{_called(layer)} has an attribute {name!r} with a layer of type {kind} that "
                    "is not one of its children, so its weights would be neither trained nor "
                    "saved: declare it in "
                    f"__init__ with self.{call}({name!r}, …) and Params, and call it in fprop as "
                    f"self.{name}{'' if call == 'child' else '[i]'}.fprop(theta.{name}…, x, ctx)"
                )
            others = [x for x in leaves if not isinstance(x, Layer)]
            found = [v for x in others for v in _variables_of(x)]
            # A Keras layer may create its variables in its first call.
            if found or (any(map(_is_of_keras, others)) and not root.specs()):
                what = type(value).__name__
                if found and not isinstance(value, tf.Variable):
                    what += f" with {_shown(found)}"
                raise ForeignVariableError(
                    f"{_called(layer)} has an attribute {name!r} of type {what}, but layers must "
                    f"not contain variables: {_WHY}; {_CURE}"
                )


def check_constants(root: Layer, again: Layer) -> None:
    """Checks that constants in attributes of layers are the same each time a model is built.

    Args:
      root: a layer, such as a task.
      again: the same layer, built a second time from the same Params.

    Raises:
      ForeignVariableError: a constant differs; the message names the layer and the attribute.
    """
    for layer, other in zip(root.walk(), again.walk(), strict=True):
        for name, value in vars(layer).items():
            pairs = zip(
                _leaves(value, _DEPTH), _leaves(vars(other).get(name), _DEPTH), strict=False
            )
            if any(_differ(one, another) for one, another in pairs):
                raise ForeignVariableError(
                    f"{_called(layer)} has an attribute {name!r} with different numbers each time "
                    "the layer is built, so a checkpoint would not reproduce its outputs. Draw the "
                    "numbers with a fixed seed, np.random.default_rng(0), or declare a weight: "
                    f"self.weight({name!r}, shape, dims=…, init=…, trainable=False)"
                )


def _differ(one: Any, another: Any) -> bool:
    # tf.is_tensor would look for an attribute of every other object.
    if isinstance(one, _TENSORS) and isinstance(another, _TENSORS) and hasattr(one, "numpy"):
        one, another = one.numpy(), another.numpy()
    if isinstance(one, (np.ndarray, np.generic, float)):
        return not np.array_equal(one, another, equal_nan=np.asarray(one).dtype.kind in "fc")
    return False


def check_function(root: Layer | None, function: Callable[[], Any]) -> None:
    """Traces a function without running it, and rejects variables and random ops in it.

    Args:
      root: the layer whose methods it may call, such as a task; None: no layer.
      function: takes no arguments.

    Raises:
      ForeignVariableError: the function creates or reads a variable, or draws random numbers.
    """

    def traced() -> None:
        with refused(root):
            function()

    tf.function(traced, autograph=False).get_concrete_function()


@contextlib.contextmanager
def refused(root: Layer | None, *, own: Iterable[tf.Variable] = ()) -> Iterator[None]:
    """Rejects variables, random ops and own contexts in the block, which traces a pure function.

    Args:
      root: the layer whose code is traced, such as a task, or a layer below it; None: no layer.
      own: variables of the execution. They may be read: if the layers of one replica wait for those
        of another, the execution reads the weights of the other replica inside the block.

    Raises:
      ForeignVariableError: the block creates or reads a variable, draws random numbers, or reads an
        attribute with a tensor of another trace; the message names the layer whose code does so.
      ContextError: code of a user builds a StepContext in the block.
    """

    def refuse(next_creator: Any, **kwargs: Any) -> Any:
        del next_creator
        name = kwargs.get("name") or "Variable"
        shown, frames = f"the variable {name!r}", traceback.extract_stack()
        if any(_KERAS in frame.filename for frame in frames):
            layer, where = _layer_at(root, frames)
            raise ForeignVariableError(
                f"{layer} calls a Keras layer{where}, which creates {shown}: {_WHY}; replace it by "
                "the corresponding layer of Tekso, as a child: self.child(name, Linear.Params(…)) "
                "in __init__"
            )
        raise ForeignVariableError(_message(root, frames, "creates", shown))

    while root is not None and root._parent is not None:
        root = root._parent
    if tf.executing_eagerly():  # nothing is traced
        yield
        return
    graph: Any = tf.compat.v1.get_default_graph()
    kept = _kept_tensors(root) if root is not None else []
    with _read(graph) as read, tf.variable_creator_scope(refuse), passing_context():
        before = {id(variable) for variable in (*read(), *own)}
        num_ops = len(graph.get_operations())
        try:
            yield
        except MistakeError:
            raise
        except Exception as error:  # some kinds of graphs cannot capture an eager variable
            _refuse_kept(root, graph, kept, error)
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
    _refuse_kept(root, graph, kept)
    for op in itertools.islice(graph.get_operations(), num_ops, None):
        if random := _random_op(graph, op):
            layer, where = _layer_at(root, random.traceback)
            raise ForeignVariableError(
                f"{layer} draws random numbers{where} that do not depend on the seed of the run, "
                "so every process and every execution would draw different numbers. Take them from "
                f"{RANDOM_NUMBERS}"
            )


def _kept_tensors(root: Layer) -> list[tuple[Layer, str, Any]]:
    """Returns (layer, attribute, tensor) of the tensors of graphs in attributes of layers."""
    return [
        (layer, name, leaf)
        for layer in root.walk()
        for name, value in vars(layer).items()
        if type(value) not in ATOMS and name not in _OWN
        for leaf in _leaves(value, _DEPTH)
        if isinstance(leaf, tf.Tensor) and not hasattr(leaf, "numpy")
    ]


def _refuse_kept(
    root: Layer | None,
    graph: Any,
    kept: list[tuple[Layer, str, Any]],
    error: Exception | None = None,
) -> None:
    """Rejects attributes with tensors of an earlier trace that a graph reads.

    Args:
      root: the layer whose code was traced.
      graph: the graph.
      kept: as `_kept_tensors` returns them, before the code was traced.
      error: what ended the trace.
    """
    for layer, name, tensor in kept:
        # Each trace has tensors of the same names, so only its graph tells which one is named.
        is_named = all(text in str(error) for text in (repr(tensor), str(tensor.graph)))
        if not is_named and not any(own for _, own in _captures(graph, [tensor])):
            continue
        place = traceback.extract_tb(error.__traceback__) if error else _place_of(graph, tensor)
        raise ForeignVariableError(
            f"{_called(layer)} keeps a tensor of a step in self.{name}, which another step reads"
            f"{_layer_at(root, place)[1]}: it has no value there. {NO_STATE}"
        ) from error


def _is_random(node: Any) -> bool:
    """Returns whether a node draws random numbers that do not depend on the seed of the run."""
    if node.op.startswith("Stateful"):
        return bool(node.op != "StatefulPartitionedCall")
    return ("seed2" in node.attr and not node.op.startswith("Stateless")) or node.op.startswith(
        "Rng"
    )


def _random_op(graph: Any, op: Any) -> Any:
    """Returns the op if it draws random numbers, or such an op in its functions; None: none."""
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
    """Yields a function that returns the variables read so far in a graph and its functions."""
    if hasattr(graph, "watch_variable"):  # the graph of a tf.function already records them
        yield lambda: list(graph._watched_variables)
        return
    found: list[Any] = []
    graph.watch_variable = found.append  # TensorFlow calls this attribute if it exists
    try:
        yield lambda: list(found)
    finally:
        del graph.watch_variable


def _leaves(value: Any, depth: int) -> list[Any]:
    """Returns the leaves of nested lists and dicts, down to a depth."""
    nest = list(value.values()) if isinstance(value, Mapping) else value
    if depth and isinstance(nest, (list, tuple, set, frozenset)):
        return [leaf for one in nest for leaf in _leaves(one, depth - 1)]
    return [value]


def _variables_of(value: Any) -> list[Any]:
    """Returns the variables in a value that is neither a nest nor a layer."""
    if isinstance(value, tf.Variable):
        return [value]
    if isinstance(value, tf.Module) or _is_of_keras(value):
        found: Iterable[Any] = value.variables
        return list(found)
    return []


def _is_of_keras(value: Any) -> bool:
    return hasattr(type(value), "trainable_variables")


def _is_capture_of_variable(error: BaseException) -> bool:
    """Returns whether an error was raised because a graph could not capture a variable."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    value: Any = frames[-1].f_locals.get("self")
    return bool(tf.is_tensor(value) and value.dtype == tf.resource)


def _place_of_read(graph: Any, variable: Any) -> Iterable[Any]:
    """Returns the stack frames at which a variable is read; empty if unknown."""
    return _place_of(graph, variable.handle)


def _place_of(graph: Any, tensor: Any) -> Iterable[Any]:
    """Returns the stack frames at which an outer tensor is read; empty if unknown."""
    for inner, own in _captures(graph, [tensor]):
        for op in inner.get_operations():
            if any(x is y for x in op.inputs for y in own):
                found: Iterable[Any] = op.traceback
                return found
    return ()


def _captures(graph: Any, outer: list[Any]) -> Iterator[tuple[Any, list[Any]]]:
    """Yields a graph and all functions in it, each with its placeholders for the outer tensors."""
    known = [own for given, own in getattr(graph, "captures", ()) if any(given is x for x in outer)]
    yield graph, known
    for function in graph._functions.values():
        if getattr(function, "graph", None) is not None:
            yield from _captures(function.graph, [*outer, *known])


def _message(root: Layer | None, frames: Iterable[Any], does: str, shown: str) -> str:
    name, where = _layer_at(root, frames)
    return f"{name} {does} {shown}{where}, which is not one of its weights: {_WHY}; {_CURE}"


def _layer_at(root: Layer | None, frames: Iterable[Any]) -> tuple[str, str]:
    """Returns the name of the layer whose code the innermost frame runs, and " (file:line)"."""
    frames = [frame for frame in frames if "/tensorflow/" not in frame.filename]
    layers = list(root.walk()) if root else []
    for frame in reversed(frames):
        layer = next((one for one in layers if _has_code(one, frame)), None)
        if layer is not None:
            return _called(layer), f" ({frame.filename}:{frame.lineno})"
    return _called(root) if root else "the loss", ""


def _has_code(layer: Layer, frame: Any) -> bool:
    """Returns whether a frame runs a method of the layer's class, or of its bases below `Layer`."""
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
