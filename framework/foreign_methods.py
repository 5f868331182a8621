"""Methods of other frameworks in layers, for error messages that name the method to write."""

from __future__ import annotations

_FOREIGN = {"forward": "PyTorch", "call": "Keras", "__call__": "Flax and Haiku"}
"""{name of a method: frameworks in which it computes the output of a layer}."""

_DECLARE = "self.weight(name, shape, dims=…, init=…) in __init__, and theta.name in fprop"
_FIXED = "self.weight(name, shape, dims=…, init=…, trainable=False)"
_INSTEAD = {
    "add_weight": _DECLARE,
    "add_variable": _DECLARE,
    "register_parameter": _DECLARE,
    "register_buffer": _FIXED,
    "add_module": "self.child(name, Linear.Params(…))",
    "add_loss": "ctx.collect_loss(name, value) in fprop; the value is a sum over examples",
    "add_metric": "ctx.collect_metric(name, sum, weight) in fprop",
}
"""{method of a layer of Keras or PyTorch: what to write instead}."""

_FREEZING = ("trainable", "requires_grad", "requires_grad_")


def instead_of(name: str) -> str:
    """Returns what to write instead of an attribute of layers of Keras and PyTorch, or ""."""
    if name in _FREEZING:
        return (
            "to train some weights only, set learner.frozen, patterns of the paths of the others; "
            f"a weight that is never trained is {_FIXED}"
        )
    return f"write {_INSTEAD[name]}" if name in _INSTEAD else ""


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
