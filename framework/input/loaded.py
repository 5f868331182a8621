"""Checks of the data that `Arrays.load` returns, and its conversion to arrays of numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tekso.framework.input.errors import InputError

WANT = (
    'return a dict of arrays with one row per example, for example {"x": x, "labels": labels}, or '
    "an iterator (tf.data.Dataset, generator, list) of such dicts for single examples"
)
_NUMBER_TEXTS = "number them, for example with np.unique(…, return_inverse=True)[1]"
_MISSING = {"NoneType", "NAType", "NaTType"}  # the latter of pandas


def as_numbers(what: str, name: Any, value: Any) -> np.ndarray:
    """Returns a value as an array of numbers; float64 is converted to float32.

    Args:
      what: method and source line that returned the value, for messages.
      name: name of the array.
      value: anything that NumPy can convert to an array.

    Raises:
      InputError: the values are not numbers, masked, or too large for float32.
    """
    if not isinstance(name, str):
        raise InputError(f"{what}: the name {name!r} is not a str; {WANT}")
    if isinstance(value, np.ma.MaskedArray) and (masked := np.count_nonzero(value.mask)):
        raise InputError(
            f"{what}: {name!r} is a masked array, and {masked:,} of its values are masked: "
            "fill them in (np.ma.filled), or remove these examples"
        )
    try:
        array = np.asarray(value)
    except ValueError:
        raise InputError(f"{what}: {name!r} {RAGGED}") from None
    if array.dtype == object:
        raise InputError(f"{what}: {name!r} {about_objects(value, array)}")
    if array.dtype.kind in "SUT":
        raise InputError(f"{what}: {name!r} contains texts: {_NUMBER_TEXTS}")
    if array.dtype in (np.float64, np.longdouble):
        return _as_float32(what, name, array)
    if array.dtype.kind not in "buif" and array.dtype.name != "bfloat16":
        raise InputError(
            f"{what}: {name!r} has the dtype {array.dtype}, but must be bool, int or float"
        )
    return array


def check_examples(what: str, found: Any) -> None:
    """Checks that a value that is not a dict can be a finite iterable of examples.

    Raises:
      InputError: it is not iterable, is known to have no end, or cannot contain examples.
    """
    kind = f"a {type(found).__name__}"
    if found is None:
        raise InputError(f"{what} returns None; {WANT}")
    if hasattr(found, "columns") and hasattr(found, "to_numpy"):
        raise InputError(
            f"{what} returns {kind}: return its columns as arrays, for example "
            '{"x": frame[features].to_numpy(), "labels": frame[label].to_numpy()}'
        )
    if isinstance(found, tuple) and found and not isinstance(found[0], Mapping):
        kinds = ", ".join(type(item).__name__ for item in found)
        raise InputError(f"{what} returns a tuple ({kinds}): name the arrays; {WANT}")
    is_array = hasattr(found, "__array__") or hasattr(found, "toarray")
    if is_array or not isinstance(found, Iterable) or isinstance(found, (str, bytes)):
        raise InputError(f"{what} returns {kind}; {WANT}")
    cardinality = getattr(found, "cardinality", None)
    if callable(cardinality) and int(cardinality()) == -1:  # tf.data.INFINITE_CARDINALITY
        raise InputError(
            f"{what} returns a dataset without an end: remove repeat(). Training repeats the "
            "examples itself"
        )


RAGGED = "has rows of different lengths: pad them to one length"
"""End of the message about an array whose rows need padding."""


def is_ragged(values: object) -> bool:
    """Returns whether NumPy makes no array of nested lists, because their lengths differ."""
    try:
        np.asarray(values)
    except ValueError:
        return True
    return False


def _as_float32(what: str, name: str, array: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        narrow = array.astype(np.float32)
    lost = np.isinf(narrow)
    lost &= np.isfinite(array)
    if lost.any():
        raise InputError(
            f"{what}: {name!r} has {int(lost.sum()):,} values too large for float32 (maximum "
            f"{np.finfo(np.float32).max:.1e}), for example {array[lost][0]:g}: scale them, or "
            "remove these examples"
        )
    return narrow


def about_objects(value: Any, array: np.ndarray) -> str:
    """Returns what is wrong with a value that NumPy converts to an array of Python objects.

    Args:
      value: the value.
      array: the array.
    """
    if not array.ndim:
        cure = "use value.toarray()" if hasattr(value, "toarray") else "convert it to one"
        return f"is a {type(value).__name__}, which is not an array: {cure}"
    if hasattr(value, "columns") and hasattr(value, "dtypes"):
        names = [str(name) for name in value.columns if np.asarray(value[name]).dtype == object]
        return (
            f"is a {type(value).__name__} with columns that are not numbers "
            f"({', '.join(map(repr, names))}): {_NUMBER_TEXTS}; or remove these columns"
        )
    dicts = [item for item in array.flat if isinstance(item, Mapping)]
    if dicts:
        return _about_dicts(dicts)
    kinds = {type(item) for item in array.flat}
    names = sorted(kind.__name__ for kind in kinds)
    if any(issubclass(kind, (str, bytes)) for kind in kinds):
        others = [name for name in names if name not in ("str", "bytes", "str_", "bytes_")]
        missing = f" and other values ({', '.join(others)})" if others else ""
        return f"contains texts{missing}: {_NUMBER_TEXTS}"
    if _MISSING & set(names):
        return (
            f"has missing values ({', '.join(sorted(_MISSING & set(names)))}): fill them in, or "
            "remove these examples"
        )
    if any(hasattr(kind, "__len__") for kind in kinds):
        return RAGGED
    return (
        f"contains Python objects ({', '.join(names)}): convert them to numbers, for example with "
        "np.asarray(…, 'float32')"
    )


def _about_dicts(dicts: Sequence[Mapping[Any, Any]]) -> str:
    """Returns what is wrong with an array of dicts."""
    keys = list(dict.fromkeys(key for one in dicts for key in one))
    cure = "make an array of each key"
    lacking = next((one for one in dicts if len(one) < len(keys)), None)
    if lacking is not None:
        missing = next(key for key in keys if key not in lacking)
        cure += f", with a value for every example: {lacking!r:.60} has no {missing!r}"
    return f"contains dicts with the keys {', '.join(map(repr, keys[:10]))}: {cure}"
