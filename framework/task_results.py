"""Return types of the methods of `Task`, and functions that call the methods and check the results.

For each method there is a function with the same name. It calls the method, and raises a
`TaskError` with the method, its source line and the returned value if the result is invalid.
Executions and runs call these functions instead of the methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar

import numpy as np
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.exports import ExportedFunction, ExportedTexts
from tekso.framework.input.input import Input
from tekso.framework.input.unread import UnreadInput, unset_error
from tekso.framework.layer import Layer
from tekso.framework.params import Params
from tekso.framework.params.types import type_name
from tekso.framework.pieces import LOSS_SUM, METRICS, Flow, Piece
from tekso.framework.source_lines import place_of
from tekso.framework.task_values import (
    PAIRS,
    SUM_OF_LOSSES,
    Batch,
    Decoded,
    LossSums,
    Program,
    Scored,
    SeveralLossSums,
    TaskError,
    scalar,
    shown,
)
from tekso.framework.theta import Theta

_Result = TypeVar("_Result")
_TASK = "tekso.framework.task"  # the module of the class Task, whose loss runs the pieces


class _Task(Protocol):
    """The methods of a task that this file uses; documented in `Task`."""

    def walk(self) -> Iterable[Layer]: ...

    def loss_weight(self, batch: Batch) -> Any: ...

    def loss(self, theta: Theta, batch: Batch, ctx: StepContext) -> Any: ...

    def pieces(self) -> Any: ...

    def predict(self, theta: Theta, batch: Batch, ctx: StepContext) -> Any: ...

    def count(self, batch: Mapping[str, np.ndarray]) -> Any: ...

    def summarize(self, sums: Mapping[str, tuple[float, float]]) -> Any: ...

    def check_inputs(self, inputs: Mapping[str, Any]) -> Any: ...

    def equal_losses(self, batch: Mapping[str, np.ndarray]) -> Any: ...

    def decode(self, program: Program, input: Input) -> Any: ...

    def score(
        self, program: Program, input: Input, *, is_last: bool, stopped: Callable[[], bool]
    ) -> Any: ...

    def exports(self, input: Input) -> Any: ...

    def text_exports(self, input: Input) -> Any: ...

    def setting_to_try(self, eval_inputs: Mapping[str, Any]) -> Any: ...


def complete(params: Params, input: Input) -> Params:
    """Returns `complete(params, input)` of the task class of the Params.

    Raises:
      TaskError: the Params are not those of a task, or `complete` does not return Params of the
        same type.
      ValueError: `complete` reads what is not known of the input before its data is read.
    """
    owner = params.owner
    if owner is None or not hasattr(owner, "complete"):
        name = type_name(type(params)) if owner is None else owner.__name__
        raise TaskError(
            f"task is Params of {name}, but {name} is not a task: a task contains the model and a "
            "loss, for example Classification.Params(model=Mlp.Params())"
        )
    try:
        found = owner.complete(params, input)
    except AttributeError as error:
        is_unread = error.obj is input and not isinstance(input, Input)
        if not is_unread and not isinstance(error.obj, UnreadInput):
            raise
        raise unset_error(params, method_of(owner, "complete"), error.name or "") from error
    if isinstance(found, type(params)):
        return found
    raise TaskError(
        f"{method_of(owner, 'complete')} returns {shown(found)}, but must return "
        f"{type_name(type(params))}: return params, or a completed copy (params = params.copy())"
    )


def check_inputs(task: _Task, inputs: Mapping[str, Any]) -> list[str]:
    """Returns the warnings of `task.check_inputs(inputs)`.

    Raises:
      TaskError: the result is neither None nor a list of str.
    """
    found = task.check_inputs(inputs)
    if found is None:
        return []
    if not isinstance(found, list) or not all(isinstance(line, str) for line in found):
        raise _error(task, "check_inputs", found, "warnings, a list of str, or None")
    return found


def loss_weight(task: _Task, batch: Batch) -> tf.Tensor:
    """Returns `task.loss_weight(batch)` in float32; the batch may have NumPy arrays.

    Shapes:
      returns: []; [losses] of a task with several losses

    Raises:
      TaskError: the result is not a scalar number.
    """
    what = f"the result of {method_of(task, 'loss_weight')}"
    want = "sum the weights of the examples"
    most_dims = 1 if getattr(task, "losses", ()) else 0
    weight = scalar(task.loss_weight(as_tensors(batch)), what, want, most_dims=most_dims)
    return tf.cast(weight, tf.float32)


def loss(task: _Task, theta: Theta, batch: Batch, ctx: StepContext) -> LossSums:
    """Returns `task.loss(theta, batch, ctx)`; the batch may have NumPy arrays.

    Raises:
      TaskError: the result is not `LossSums`.
    """
    return loss_sums(task, "loss", task.loss(theta, as_tensors(batch), ctx))


def loss_sums(task: object, name: str, found: Any) -> LossSums:
    """Returns the result of a method of a task, which must be `LossSums`.

    Raises:
      TaskError: it is not.
    """
    if isinstance(found, LossSums):
        return found
    want = f"LossSums(loss_sum, metrics): {SUM_OF_LOSSES}; metrics are {PAIRS}"
    raise _error(task, name, found, want)


def pieces(task: _Task) -> list[Piece]:
    """Returns `task.pieces()`.

    Raises:
      TaskError: the result is not a list of pieces; or a layer overrides fprop() but not pieces(),
        from which the loss is computed.
    """
    own: object = task
    for layer in task.walk():
        if layer is own or not hasattr(layer, "pieces"):
            continue
        if (overriding := overrides(layer, "fprop")) is not None:
            name = type(layer).__name__
            raise TaskError(
                f"{method_of(overriding[0], 'fprop')} overrides what "
                f"{method_of(overriding[1], 'pieces')} computes, but the loss of "
                f"{type(task).__name__} uses pieces(), so this fprop() would be ignored: "
                f"override pieces() in {name} as well, so that both compute the same"
            )
    found = task.pieces()
    if isinstance(found, (list, tuple)) and found and all(isinstance(p, Piece) for p in found):
        return list(found)
    raise _error(task, "pieces", found, "a list of at least one Piece(name, layers, run)")


def overrides(layer: object, method: str) -> tuple[type, type] | None:
    """Returns the class that overrides a method, and its base class that defines `pieces`.

    The overriding method is then inconsistent with `pieces`. None: `pieces` is defined in the same
    class as the method, or in a subclass.
    """
    order = type(layer).__mro__
    one, pieces = (next(c for c in order if name in vars(c)) for name in (method, "pieces"))
    return (one, pieces) if order.index(one) < order.index(pieces) else None


def sums_of_flow(task: _Task, flow: Flow) -> LossSums:
    """Returns the sums that the last piece of a task adds to the flow.

    Raises:
      TaskError: they are missing.
    """
    if not isinstance(flow, dict) or LOSS_SUM not in flow or METRICS not in flow:
        given = sorted(flow) if isinstance(flow, dict) else shown(flow)
        raise TaskError(
            f"the last piece of {method_of(task, 'pieces')} returns {given}, but must add "
            f"{LOSS_SUM!r} and {METRICS!r} to its input: {{**flow, {LOSS_SUM!r}: "
            f"tf.reduce_sum(...), {METRICS!r}: {{}}}}"
        )
    kind = SeveralLossSums if getattr(task, "losses", ()) else LossSums
    return kind(flow[LOSS_SUM], flow[METRICS])


def predict(task: _Task, theta: Theta, batch: Batch, ctx: StepContext) -> dict[str, tf.Tensor]:
    """Returns `task.predict(theta, batch, ctx)`; the batch may have NumPy arrays.

    Raises:
      TaskError: the result is not a dict of tensors.
    """
    return _by_name(task, "predict", task.predict(theta, as_tensors(batch), ctx), tf.Tensor)


def count(task: _Task, batch: Mapping[str, np.ndarray]) -> tuple[int, str]:
    """Returns `task.count(batch)`.

    Raises:
      TaskError: the result is not a pair of a number and a unit.
    """
    found = task.count(batch)
    is_pair = isinstance(found, tuple) and len(found) == 2
    if is_pair and isinstance(found[0], (int, np.integer)) and isinstance(found[1], str):
        return int(found[0]), found[1]
    raise _error(task, "count", found, 'a pair of a whole number and its unit: (1200, "tokens")')


def summarize(task: _Task, sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Returns `task.summarize(sums)` with all figures converted to float.

    Raises:
      TaskError: the result is not a dict of numbers.
    """
    figures = task.summarize(sums)
    try:
        return {str(name): float(value) for name, value in figures.items()}
    except (AttributeError, TypeError, ValueError):
        want = "{name: number}: super().summarize(sums) with your changes and additions"
        raise _error(task, "summarize", figures, want) from None


def goals_of(params: Params) -> dict[str, Any]:
    """Returns `goals_of(params)` of the task class of the Params.

    Raises:
      TaskError: the result is not a dict of "min" and "max".
    """
    owner: Any = params.owner
    found = owner.goals_of(params)
    if isinstance(found, dict) and all(goal in ("min", "max") for goal in found.values()):
        return found
    raise _error(owner, "goals_of", found, '{metric: "min" or "max"}')


def equal_losses(
    task: _Task, batch: Mapping[str, np.ndarray]
) -> tuple[Mapping[str, Any], Mapping[str, Any], str] | None:
    """Returns `task.equal_losses(batch)`.

    Raises:
      TaskError: the result is neither two batches and a text, nor None.
    """
    found = task.equal_losses(batch)
    match found:
        case None | (Mapping(), Mapping(), str()):
            return found
    raise _error(task, "equal_losses", found, "(batch, batch, what is wrong) or None")


def decode(task: _Task, program: Program, input: Input) -> Decoded | None:
    """Returns `task.decode(program, input)`.

    Raises:
      TaskError: the result is neither `Decoded` nor None.
    """
    return _or_none(task, "decode", task.decode(program, input), Decoded)


def decodes_data(params: Params) -> bool:
    """Returns `decodes_data(params)` of the task class of the Params.

    Raises:
      TaskError: the result is not a bool.
    """
    owner: Any = params.owner
    found = owner.decodes_data(params)
    if isinstance(found, bool):
        return found
    raise _error(owner, "decodes_data", found, "True or False")


def score(
    task: _Task, program: Program, input: Input, *, is_last: bool, stopped: Callable[[], bool]
) -> Scored | None:
    """Returns `task.score(program, input, …)`.

    Raises:
      TaskError: the result is neither `Scored` nor None.
    """
    found = task.score(program, input, is_last=is_last, stopped=stopped)
    return _or_none(task, "score", found, Scored)


def exports(task: _Task, input: Input) -> dict[str, ExportedFunction]:
    """Returns `task.exports(input)`.

    Raises:
      TaskError: the result is not a dict of `ExportedFunction`s.
    """
    return _by_name(task, "exports", task.exports(input), ExportedFunction)


def text_exports(task: _Task, input: Input) -> dict[str, ExportedTexts]:
    """Returns `task.text_exports(input)`.

    Raises:
      TaskError: the result is not a dict of `ExportedTexts`.
    """
    return _by_name(task, "text_exports", task.text_exports(input), ExportedTexts)


def setting_to_try(task: _Task, eval_inputs: Mapping[str, Any]) -> str | None:
    """Returns `task.setting_to_try(eval_inputs)`.

    Raises:
      TaskError: the result is neither "path=value" nor None.
    """
    found = task.setting_to_try(eval_inputs)
    if found is None or (isinstance(found, str) and "=" in found):
        return found
    raise _error(task, "setting_to_try", found, '"path=value" or None')


def method_of(task: object, name: str) -> str:
    """Returns the name of a method with its file and line, for error messages."""
    owner = task if isinstance(task, type) else type(task)
    return f"{owner.__name__}.{name}{place_of(getattr(task, name))}"


def source_of_loss(task: _Task) -> str:
    """Returns what computes the loss, with its file and line: `loss`, or the last of the pieces.

    It is `sums` if the last piece is a private method that calls it, as that of `Classification`.
    """
    if type(task).loss.__module__ != _TASK:
        return method_of(task, "loss")
    function = pieces(task)[-1].function
    owner = getattr(function, "__self__", None)
    name = getattr(function, "__name__", "loss")
    if owner is not None and name == "_run_sums" and hasattr(owner, "sums"):
        return method_of(owner, "sums")
    of = f"{type(task).__name__}.pieces: " if owner is None else f"{type(owner).__name__}."
    return f"{of}{name}{place_of(function)}"


def as_tensors(batch: Mapping[str, Any]) -> dict[str, tf.Tensor]:
    """Returns a batch with NumPy arrays converted to tensors; other values are unchanged."""
    return {
        name: tf.convert_to_tensor(array) if isinstance(array, np.ndarray) else array
        for name, array in batch.items()
    }


def _or_none(task: _Task, name: str, found: Any, kind: type[_Result]) -> _Result | None:
    if found is None or isinstance(found, kind):
        return found
    raise _error(task, name, found, f"{kind.__name__}(...) or None")


def _by_name(task: _Task, name: str, found: Any, kind: type[_Result]) -> dict[str, _Result]:
    if isinstance(found, dict) and all(isinstance(value, kind) for value in found.values()):
        return found
    raise _error(task, name, found, f"{{name: {kind.__name__}(...)}}")


def _error(task: object, name: str, found: Any, want: str) -> TaskError:
    return TaskError(f"{method_of(task, name)} returns {shown(found)}, but must return {want}")
