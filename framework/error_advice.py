"""Advice about errors that Python and TensorFlow raise in the code of users."""

from __future__ import annotations

import re

_NARROW = re.compile(r"\b(bfloat16|float16|half)\b")
_WIDE = re.compile(r"\b(float32|float)\b")
_NO_PARAMS = re.compile(r"(\w+)\.__init__\(\) missing 1 required positional argument: 'params'")
_CALLED = re.compile(r"'(\w+)' object is not callable")


def advice(error: BaseException) -> str:
    """Returns what to write instead, for common errors of Python and TensorFlow, else ""."""
    text = str(error)
    if _NARROW.search(text) and _WIDE.search(text):
        return (
            "with run.activation_dtype=bfloat16 or float16, the outputs of layers have that type: "
            "compute the loss in float32, logits = tf.cast(logits, tf.float32)"
        )
    if found := _NO_PARAMS.search(text):
        name = found[1]
        return (
            f"{name} is built from its Params: write {name}.Params() for a field or a child, and "
            f"{name}.Params().instantiate() for the object itself"
        )
    if (found := _CALLED.search(text)) and found[1] in _names_of_layers():
        return "call the method fprop of the layer: self.child.fprop(theta.child, x, ctx)"
    return ""


def _names_of_layers() -> set[str]:
    from tekso.framework.layer import Layer  # imports TensorFlow, which the commands do later

    names, kinds = set(), [Layer]
    while kinds:
        kind = kinds.pop()
        names.add(kind.__name__)
        kinds += kind.__subclasses__()
    return names
