"""Advice about errors that Python and TensorFlow raise in the code of users."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from tekso.framework.params.origins import hide_from_origins

Method = TypeVar("Method", bound=Callable[..., Any])

hide_from_origins(__file__)  # `advised` only passes on the arguments

_NARROW = re.compile(r"\b(bfloat16|float16|half)\b")
_WIDE = re.compile(r"\b(float32|float)\b")
_NO_PARAMS = re.compile(r"(\w+)\.__init__\(\) missing 1 required positional argument: 'params'")
_NO_CTX = re.compile(r"\.fprop\(\) missing 1 required positional argument: 'ctx'")
_NONE = re.compile(r"^None values not supported|Attempt to convert a value \(None\)")
_FUNCTION = re.compile(r"\{\{function_node [^}]*\}\}\s*")
_OP = re.compile(r"\s*\[Op:\w+\]( name:.*)?\s*$")
_NO_ROW = re.compile(r"indices\S* = (-?\d+) is not in \[0, (\d+)\)")
_SIDE = re.compile(r"fprop\(\) got an unexpected keyword argument '(mask|positions)'")
_BRANCH = re.compile(
    r"(Using a symbolic .* as a Python .bool.|Iterating over a symbolic \S+) is not allowed"
)
_ATTEMPT = re.compile(r"\. You can attempt the following resolutions .*", re.DOTALL)  # unsuitable
_VALUE = re.compile(
    r"'SymbolicTensor' object has no attribute '(numpy|item)'|not '?SymbolicTensor'?$"
    r"|'SymbolicTensor' object cannot be|Cannot convert a symbolic \S+ \(.*\) to a numpy array"
)
_TYPES_DIFFER = re.compile(r"has type (\w+) that does not match type (\w+)")
_NOT_A_WHOLE_NUMBER = re.compile(r"Expected u?int\d+, but got \S+ of type 'float'")
_NODE = re.compile(r"'\{\{node [^}]*\}\} = (\w+)\[[^]]*\]\([^)]*\)'")


def text_of(error: BaseException) -> str:
    """Returns the message of an error in the code of users, in words, with advice if there is any.

    Without the names that TensorFlow gives to ops.
    """
    text = _ATTEMPT.sub("", _OP.sub("", _NODE.sub(r"\1", _FUNCTION.sub("", str(error)))))
    hint = advice(error)
    return f"{text.rstrip('.')}; {hint}" if hint else text


def advice_for_ids(text: str) -> str:
    """Returns what to do if the text of an error is that of a lookup of an id without a row."""
    if (found := _NO_ROW.search(text)) is None:
        return ""
    given, rows = found.groups()
    return (
        f"the data has the id {given}, but the table, such as that of an Embedding, has the rows 0 "
        f"to {int(rows) - 1:,}: set its size (vocab_size) to the largest id of all splits + 1, or "
        "replace unknown ids in the input"
    )


def advice(error: BaseException) -> str:
    """Returns what to write instead, for common errors of Python and TensorFlow, else ""."""
    text = str(error)
    if _NARROW.search(text) and _WIDE.search(text):
        return (
            "with run.activation_dtype=bfloat16 or float16, the outputs of layers have that type: "
            "compute the loss in float32, logits = tf.cast(logits, tf.float32). Arrays of the "
            "batch stay float32: the layer that reads them casts them, x = tf.cast(x, "
            "theta.w.dtype)"
        )
    if _SIDE.search(text):
        return (
            "a stack passes mask and positions to each layer: def fprop(self, theta, x, ctx, *, "
            "mask=None, positions=None)"
        )
    if found := _NO_PARAMS.search(text):
        name = found[1]
        return (
            f"{name} is built from its Params: write {name}.Params() for a field or a child, and "
            f"{name}.Params().instantiate() for the object itself"
        )
    if _NO_CTX.search(text):
        return "theta, the weights of the layer, comes first: self.child.fprop(theta.child, x, ctx)"
    if _NONE.search(text):
        return "is a return missing in the fprop of a layer, or in a function?"
    if _BRANCH.search(text):
        return (
            "the code runs once, before any tensor has a value: write tf.where(condition, a, b) "
            "instead of if, tf.maximum instead of max, and loop over a Python range"
        )
    if _VALUE.search(text):
        return (
            "the code runs once, before any tensor has a value: compute with ops of TensorFlow, "
            "such as tf.exp and tf.reduce_mean, not with NumPy, float() or .numpy()"
        )
    if found := _TYPES_DIFFER.search(text):
        return (
            f"cast one of them, as in tf.cast(y, tf.{found[2]}). The arrays of a batch have the "
            "types that load returned, except for float64, which becomes float32"
        )
    if _NOT_A_WHOLE_NUMBER.search(text):
        return "the tensor has whole numbers, as a step does: tf.cast(step, tf.float32)"
    if hint := advice_for_ids(text):
        return hint
    if isinstance(error, KeyError) and (names := _names_in_batch(error)):
        return f"the batch has {', '.join(map(repr, names))}"
    return ""


def advised(method: Method) -> Method:
    """Wraps a method: an error of the user's code gets the advice as a note."""

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            note = advice(error)
            if note and note not in getattr(error, "__notes__", ()):
                error.add_note(note)
            raise

    return cast(Method, run)


def _names_in_batch(error: KeyError) -> list[Any]:
    """Returns the names in the local variable `batch` of the function that raised, or []."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    batch = place.tb_frame.f_locals.get("batch") if place is not None else None
    names = list(batch) if isinstance(batch, Mapping) else []
    return names if error.args and error.args[0] not in names else []
