"""Compiles a step again if DTensor gave its loops names that are in use."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.experimental import dtensor
from tensorflow.python.eager import context

from tekso.framework.execution.workarounds.call_counts import counted_alone

DUPLICATE_NAME = "Cannot add function"
"""Part of the error of TensorFlow when two functions have the same name."""

LOOP_PARTS = ("_cond", "_body")
"""Ends of the names of the functions that DTensor makes from a loop."""

_TRIALS = 5
_NAME = re.compile(r"Cannot add function '(.*)(?:_cond|_body)'")


def retraced(step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a step as tf.functions, one per shape of its arguments, traced again where needed.

    Defects: DTensor adds the functions of every loop to the function library of the process, under
    the name of the loop's op and a number. It remembers this name by the address of the op in
    memory, also after the op is deleted. If a new loop has the address of an old one, it gets the
    name of the old one, and adding its functions is an error, at random. A failed compilation also
    leaves functions in the library, which would make the next trial fail. Therefore both are
    removed from the library; a program that has run does not need them there. In the third trace
    of one tf.function, DTensor would use the loops of the first.

    Args:
      step: a function of nests of tensors and None.
    """
    functions: dict[Any, Callable[..., Any]] = {}

    @functools.wraps(step)
    def run(*args: Any) -> Any:
        key = tuple((tuple(x.shape), x.dtype) for x in tf.nest.flatten(args) if x is not None)

        def call() -> Any:
            if key not in functions:
                functions.setdefault(key, counted_alone(tf.function(step, autograph=False)))
            return functions[key](*args)

        return _until_compiled(
            call, is_new=lambda: key not in functions, forget=lambda: functions.pop(key, None)
        )

    return run


def recompiled(function: Callable[..., Any], trace_again: Callable[[], None]) -> Callable[..., Any]:
    """Returns a function of one trace, traced again where needed, for the defects of `retraced`.

    DTensor compiles such a function once for all layouts of its arguments, so at any call.

    Args:
      function: calls a concrete function.
      trace_again: makes `function` call a new concrete function. The old one cannot be compiled
        again: its loops would be those that the failed compilation made.
    """

    def run(*args: Any) -> Any:
        return _until_compiled(lambda: function(*args), is_new=lambda: True, forget=trace_again)

    return run


def _until_compiled(
    call: Callable[[], Any], *, is_new: Callable[[], bool], forget: Callable[[], Any]
) -> Any:
    """Returns the result of a call, tried again while the names of its loops are in use.

    Args:
      call: calls a function, which DTensor may have to compile.
      is_new: whether it is probable that it has to be compiled now.
      forget: prepares the next trial.
    """
    # DTensor numbers collectives as it compiles, so all processes must compile equally often.
    trials = _TRIALS if dtensor.num_clients() == 1 else 1
    for trials_left in reversed(range(trials)):
        watches = is_new()
        before = _loop_functions() if watches else set()
        try:
            made = call()
        except tf.errors.OpError as error:  # during compilation, before it runs
            if not trials_left or DUPLICATE_NAME not in error.message:
                raise
            found = _NAME.search(error.message)
            in_use = {found.group(1) + part for part in LOOP_PARTS} if found else set()
        else:
            if watches and _loop_functions() != before:
                _wait(made)
            return made
        forget()
        _remove((_loop_functions() - before) | in_use)
    raise AssertionError("the last trial returns or raises")


def _wait(made: Any) -> None:
    """Waits until a program has run: from then on it does not need the library.

    On a mesh without a device in this process, nothing runs.
    """
    for x in tf.nest.flatten(made):
        if tf.is_tensor(x):
            if dtensor.fetch_layout(x).mesh.is_remote():
                return
            for part in dtensor.unpack(x):
                tf.identity(part)
            return


def _loop_functions() -> set[str]:
    """Returns the names of functions of loops that DTensor added; others end with a number."""
    return {name for name in context.context().list_function_names() if name.endswith(LOOP_PARTS)}


def _remove(names: set[str]) -> None:
    """Removes functions from the function library of the process."""
    library = context.context()
    for name in names & _loop_functions():
        # Only functions that were added from Python can be removed: add it again first. That is
        # an error if DTensor added the function in another form; it can be removed nevertheless.
        with contextlib.suppress(tf.errors.InvalidArgumentError):
            library.add_function_def(library.get_function_def(name))
        library.remove_function(name)
