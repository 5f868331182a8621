"""Errors in the `fprop` of a layer name the layer, wherever it is called, such as in a notebook."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

IN_LAYER = "in the layer "
"""Beginning of a note of an error: the path and the class of the innermost computed layer."""


def name_in_errors(cls: Any) -> None:
    """Wraps the `fprop` that a class of layers defines: its errors get a note about the layer."""
    if "fprop" not in vars(cls):
        return
    fprop = vars(cls)["fprop"]
    if not inspect.isfunction(fprop):
        if hasattr(fprop, "__get__"):
            cls.fprop = _Bound(fprop)
        return

    @functools.wraps(fprop)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _noted(self, fprop, self, *args, **kwargs)

    cls.fprop = run


class _Bound:
    """A static method, a `functools.partialmethod` or the like whose errors name the layer."""

    def __init__(self, fprop: Any) -> None:
        self._fprop = fprop

    def __get__(self, instance: Any, cls: Any = None) -> Callable[..., Any]:
        bound: Callable[..., Any] = self._fprop.__get__(instance, cls)
        if instance is None:
            return bound

        @functools.wraps(bound)
        def run(*args: Any, **kwargs: Any) -> Any:
            return _noted(instance, bound, *args, **kwargs)

        return run


def _noted(instance: Any, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Returns the result of a call, whose error gets a note about a layer if it has none yet."""
    try:
        return call(*args, **kwargs)
    except Exception as error:
        if not any(note.startswith(IN_LAYER) for note in getattr(error, "__notes__", ())):
            kind = type(instance).__name__
            error.add_note(f"{IN_LAYER}{f'{instance.path} ({kind})' if instance.path else kind}")
        raise
