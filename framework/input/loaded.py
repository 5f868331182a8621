"""What the method `load` of `Arrays` returned, made arrays of numbers, or told what is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from tekso.framework.input.skips import InputError

WANT = (
    'return a dict of arrays with one row per example, as {"x": x, "labels": labels}, or an '
    "iterator (tf.data.Dataset, generator, list) of examples that are such dicts without that dim"
)
_NUMBER_TEXTS = "number them, for instance by np.unique(…, return_inverse=True)[1]"
_MISSING = {"NoneType", "NAType", "NaTType"}  # the latter of pandas


def as_numbers(what: str, name: Any, value: Any) -> np.ndarray:
    """Returns the values of a name as an array of numbers, at most float32.

    Args:
      what: method and line that returned them, for messages.
      name: of the array.
      value: anything that NumPy makes an array of.

    Raises:
      InputError: they are no numbers, some are masked, or too large for float32.
    """
    if not isinstance(name, str):
        raise InputError(f"{what}: the name {name!r} is no str; {WANT}")
    if isinstance(value, np.ma.MaskedArray) and (masked := np.count_nonzero(value.mask)):
        raise InputError(
            f"{what}: {name!r} is a masked array, and {masked:,} of its values are masked: "
            "fill them in (np.ma.filled), or leave these examples out"
        )
    try:
        array = np.asarray(value)
    except ValueError:
        raise InputError(f"{what}: {name!r} {_RAGGED}") from None
    if array.dtype == object:
        raise InputError(f"{what}: {name!r} {_about_objects(value, array)}")
    if array.dtype.kind in "SUT":
        raise InputError(f"{what}: {name!r} holds texts: {_NUMBER_TEXTS}")
    if array.dtype in (np.float64, np.longdouble):
        return _as_float32(what, name, array)
    if array.dtype.kind not in "buif" and array.dtype.name != "bfloat16":
        raise InputError(
            f"{what}: {name!r} is of type {array.dtype}, and has to be bool, int or float"
        )
    return array


def check_examples(what: str, found: Any) -> None:
    """Checks that what is no dict may be an iterable of examples that ends.

    Raises:
      InputError: it is none, or a dataset known to have no end.
    """
    kind = f"a {type(found).__name__}"
    if found is None:
        raise InputError(f"{what} returns None; {WANT}")
    if hasattr(found, "columns") and hasattr(found, "to_numpy"):
        raise InputError(
            f"{what} returns {kind}: return its columns as arrays, as "
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
            f"{what} returns a dataset without an end: leave out repeat(). Training goes over the "
            "examples again and again by itself"
        )


_RAGGED = "has rows of different lengths: pad them to one length"


def _as_float32(what: str, name: str, array: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        narrow = array.astype(np.float32)
    lost = np.isinf(narrow)
    lost &= np.isfinite(array)
    if lost.any():
        raise InputError(
            f"{what}: {name!r} has {int(lost.sum()):,} values too large for float32, whose largest "
            f"is {np.finfo(np.float32).max:.1e}, as {array[lost][0]:g}: scale them, or leave these "
            "examples out"
        )
    return narrow


def _about_objects(value: Any, array: np.ndarray) -> str:
    """Returns what is wrong with a value of which NumPy makes an array of Python objects."""
    if not array.ndim:
        cure = "value.toarray() makes one" if hasattr(value, "toarray") else "convert it to one"
        return f"is a {type(value).__name__}, which is no array: {cure}"
    if hasattr(value, "columns") and hasattr(value, "dtypes"):
        names = [str(name) for name in value.columns if np.asarray(value[name]).dtype == object]
        return (
            f"is a {type(value).__name__} with columns that are no numbers "
            f"({', '.join(map(repr, names))}): {_NUMBER_TEXTS}; or leave these columns out"
        )
    kinds = {type(item) for item in array.flat}
    names = sorted(kind.__name__ for kind in kinds)
    if any(issubclass(kind, (str, bytes)) for kind in kinds):
        others = [name for name in names if name not in ("str", "bytes", "str_", "bytes_")]
        missing = f" and values that are none ({', '.join(others)})" if others else ""
        return f"holds texts{missing}: {_NUMBER_TEXTS}"
    if _MISSING & set(names):
        return (
            f"has missing values ({', '.join(sorted(_MISSING & set(names)))}): fill them in, or "
            "leave these examples out"
        )
    if any(hasattr(kind, "__len__") for kind in kinds):
        return _RAGGED
    return (
        f"holds Python objects ({', '.join(names)}): convert them to numbers, for instance by "
        "np.asarray(…, 'float32')"
    )
