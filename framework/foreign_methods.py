"""Methods of other frameworks in layers, for error messages that name the method to write."""

from __future__ import annotations

_FOREIGN = {"forward": "PyTorch", "call": "Keras", "__call__": "Flax and Haiku"}
"""{name of a method: frameworks in which it computes the output of a layer}."""


def missing_fprop(cls: type) -> str:
    """Returns that a class of a layer has no `fprop`, and what to write instead of its methods."""
    text, found = f"{cls.__name__} has no fprop()", foreign_method(cls)
    if not found:
        return text
    return (
        f"{text}, but {found}(), the method of {_FOREIGN[found]}: define fprop(self, theta, x, ctx)"
        " instead"
    )


def foreign_method(cls: type) -> str:
    """Returns the method by which a layer computes its output in another framework, or ""."""
    own = {name for base in cls.__mro__ for name in vars(base)}
    return next((name for name in _FOREIGN if name in own), "")
