"""Advice about errors that Python and TensorFlow raise in the code of users."""

from __future__ import annotations

import contextlib
import functools
import math
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar, cast

import numpy as np

from tekso.framework import foreign_methods, graph_errors
from tekso.framework.batch_part import BatchPart, example_of
from tekso.framework.error_answers import ANSWERS, TYPES_OF_ARRAYS
from tekso.framework.label_advice import COMPUTED, OF_DATA, label_advice
from tekso.framework.params.origins import hide_from_origins

Method = TypeVar("Method", bound=Callable[..., Any])

hide_from_origins(__file__)  # `advised` only passes on the arguments

_NAMES_OF_TENSORFLOW = (
    (re.compile(r"\{\{function_node [^}]*\}\}\s*"), ""),
    (re.compile(r"'\{\{node [^}]*\}\} = (\w+)\[[^]]*\]\([^)]*\)'"), r"\1"),
    (re.compile(r"\s*\[Op:\w+\]( name:.*)?\s*$"), ""),
    (graph_errors.LABEL_VALUES, ""),
    (re.compile(r"\.\s+If you are looking for numpy-related methods.*", re.DOTALL), ""),  # not used
    (re.compile(r"\. You can attempt the following resolutions .*", re.DOTALL), ""),  # unsuitable
)
"""[(pattern, replacement)] of parts of a message that help no reader."""

_NARROW = re.compile(r"\b(bfloat16|float16|half)\b")
_WIDE = re.compile(r"\b(float32|float)\b")
_MIXED_TYPES = (
    "with run.activation_dtype=bfloat16 or float16, the outputs of layers have that type: compute "
    f"the loss in float32, logits = tf.cast(logits, tf.float32). {TYPES_OF_ARRAYS}: the layer "
    "that reads them casts them, x = tf.cast(x, theta.w.dtype)"
)
_MISSING_PARAMS = re.compile(
    r"(\w+)\.__init__\(\) missing 1 required positional argument: 'params'"
)
_TWO_TYPES = re.compile(r"(?:has type |have types \[)(\w+)(?: that does not match type |, )(\w+)")
_NO_METHOD = re.compile(r"Tensor'? object has no attribute '(\w+)'")


class IdError(ValueError):
    """A batch has an id for which a table has no row, or a label that is no class."""


class LabelError(IdError):
    """A sparse softmax cross-entropy that runs alone was given a label that is no class.

    Attributes:
      arrays: names of the arrays that have it.
    """

    def __init__(self, text: str, arrays: Iterable[str]) -> None:
        super().__init__(text)
        self.arrays = tuple(arrays)


class MissingArrayError(KeyError):
    """A method of a task reads an array that the batch does not have.

    Attributes:
      args: the name of the array, as of any KeyError.
      text: the message.
    """

    def __init__(self, name: str, text: str) -> None:
        super().__init__(name)
        self.text = text

    def __str__(self) -> str:
        """Returns the message."""
        return self.text


def naming_missing_arrays(method: Method) -> Method:
    """Wraps a method with an argument `batch`: a missing array is a MissingArrayError."""

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except KeyError as error:
            if isinstance(error, MissingArrayError) or (names := _names_in_batch(error)) is None:
                raise
            name, given = error.args[0], ", ".join(map(repr, names)) or "none"
            text = f"{method.__qualname__} reads the array {name!r}, which is not given; "
            raise MissingArrayError(name, f"{text}given: {given}") from error

    return cast(Method, run)


def text_of(error: BaseException) -> str:
    """Returns the message of an error in the code of users, with advice if there is any.

    The names that TensorFlow gives to ops and functions are left out.
    """
    text = str(error)
    for pattern, replacement in _NAMES_OF_TENSORFLOW:
        text = pattern.sub(replacement, text)
    hint = advice(error)
    return f"{text.rstrip('.')}; {hint}" if hint and hint not in text else text


def advice_for_ids(text: str, of: str = OF_DATA) -> str:
    """Returns advice if an error is a lookup of an id for which a table has no row, else "".

    The same for a label of a sparse softmax cross-entropy that is no class.

    Args:
      text: message of the error.
      of: what has the id or the label: "'x' has the", or `COMPUTED`.
    """
    if (found := graph_errors.NO_CLASS.search(text)) is not None:
        return label_advice(int(found[1]), int(found[2]), of)
    if (found := graph_errors.NO_ROW.search(text)) is None:
        return ""
    given, rows = found.groups()
    own = ", which no array of whole numbers in the batch has" if of == COMPUTED else ""
    cure = (
        "correct the computation, or give the table more rows"
        if of == COMPUTED
        else "set its size (vocab_size) to the largest id of all splits + 1, or replace unknown "
        "ids in the input"
    )
    return (
        f"{of} id {given}{own}, but the table, such as that of an Embedding, has the rows 0 to "
        f"{int(rows) - 1:,}: {cure}"
    )


def id_error(error: BaseException, batches: Mapping[str, Mapping[str, Any]]) -> IdError | None:
    """Returns an error to raise for an id without a row, or a label that is no class.

    It names the line of a traced function that reads it, and the arrays of the batch that have it.
    None: `error` is something else, or was raised by the line itself.

    Args:
      error: the error, of one device, a mesh or a pipeline.
      batches: {name: batch} of the batches that the function was called with. "" is no name.
    """
    text, place = graph_errors.parts(error)
    if not text and error.__cause__ is not None:  # a stage of a pipeline: its ops have no stacks
        where, failed, text = str(error).partition(" failed: ")
        place = graph_errors.parts(error.__cause__)[1] or (failed and f"\n  ({where})")
    found = graph_errors.NO_CLASS.search(text) or graph_errors.NO_ROW.search(text)
    if found is None:
        return None
    for of_batch, batch in batches.items():
        if names := arrays_with(int(found[1]), batch, of_batch, _label_values(error)):
            of = f"{' and '.join(names)} {'have' if names[1:] else 'has'} the"
            return IdError(advice_for_ids(text, of) + place)
    is_row = graph_errors.NO_CLASS.search(text) is None
    whole = any(batches) and not any(isinstance(one, BatchPart) for one in batches.values())
    return IdError(advice_for_ids(text, COMPUTED if is_row and whole else OF_DATA) + place)


def _label_values(error: BaseException) -> np.ndarray | None:
    """Returns the labels that a sparse softmax cross-entropy was given; None: it is not known."""
    found = graph_errors.LABEL_VALUES.search(str(error))
    return None if found is None else np.array(found[1].split(), np.int64)


def arrays_with(
    number: int, batch: Mapping[str, Any], of: str, values: np.ndarray | None = None
) -> list[str]:
    """Returns the names of the arrays of whole numbers that have a number, with the first place.

    Args:
      number: the number.
      batch: the arrays.
      of: name of the batch.
      values: numbers of some examples in a row: if arrays have them, only these are returned.
    """
    arrays = {name: np.asarray(value) for name, value in batch.items()}
    wrong = {name: a == number for name, a in arrays.items() if a.ndim and a.dtype.kind in "iu"}
    if values is not None:
        having = {name: one for name, one in wrong.items() if _has_rows(arrays[name], values)}
        wrong = having or wrong
    return [
        f"{name!r} (example {example_of(batch, np.argwhere(is_wrong)[0][0])}{of and f' of {of}'})"
        for name, is_wrong in wrong.items()
        if is_wrong.any()
    ]


def _has_rows(array: np.ndarray, values: np.ndarray) -> bool:
    """Returns whether some examples of an array in a row have these numbers."""
    size, flat = math.prod(array.shape[1:]), array.ravel()
    firsts = range(0, flat.size - values.size + 1, max(1, size))
    return any(np.array_equal(flat[i : i + values.size], values) for i in firsts)


@contextlib.contextmanager
def naming_ids(batches: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Raises an IdError for an id without a row, or a label that is no class, in the block.

    Args:
      batches: as of `id_error`.
    """
    try:
        yield
    except Exception as error:
        if (of_ids := id_error(error, batches)) is not None:
            raise of_ids from error
        raise


@contextlib.contextmanager
def naming_labels(batch: Mapping[str, Any], of: str = "") -> Iterator[None]:
    """Raises a LabelError for a label in the block that is no class; it names the user's line.

    Args:
      batch: the arrays that the block reads some examples of.
      of: name of the batch.
    """
    try:
        yield
    except Exception as error:
        known = error.arrays if isinstance(error, LabelError) else None
        cause = error if known is None else error.__cause__ or error
        found = graph_errors.NO_CLASS.search(str(cause))
        if found is None:
            raise
        own = {n: a for n, a in batch.items() if known is None or n in known}
        names = arrays_with(int(found[1]), own, of, _label_values(cause) if known is None else None)
        says = f"{' and '.join(names)} {'have' if names[1:] else 'has'} the" if names else COMPUTED
        stack = traceback.walk_tb(cause.__traceback__)
        frames = [(f.f_code.co_filename, line, f.f_code.co_name) for f, line in stack]
        text = advice_for_ids(str(cause), says)
        arrays = [name for name in own if any(one.startswith(repr(name)) for one in names)]
        raise LabelError(text + graph_errors.place_in(frames), arrays) from cause


def advice(error: BaseException) -> str:
    """Returns what to write instead, for common errors of Python and TensorFlow, else ""."""
    text = str(error)
    if _NARROW.search(text) and _WIDE.search(text):
        return _MIXED_TYPES
    if found := _TWO_TYPES.search(text):
        return _advice_for_types(*found.groups())
    if found := _MISSING_PARAMS.search(text):
        return _advice_for_params(found[1], _line_of(error))
    for pattern, answer in ANSWERS:
        if found := pattern.search(text):
            return found.expand(answer)
    if (found := _NO_METHOD.search(text)) and (hint := foreign_methods.tensor_hint(found[1])):
        return hint
    of_fprop = foreign_methods.fprop_hint(error) or foreign_methods.theta_hint(error)
    if hint := of_fprop or advice_for_ids(text):
        return hint
    if isinstance(error, MissingArrayError):
        return ""
    if isinstance(error, KeyError) and (names := _names_in_batch(error)):
        return f"the batch has {', '.join(map(repr, names))}"
    return ""


def _advice_for_types(of_input: str, of_others: str) -> str:
    """Returns advice about two tensors of different types: to keep the float, if one is a float."""
    wanted = of_input if "float" in of_input or of_others == "bool" else of_others
    wanted = "float32" if wanted == "float64" else wanted
    return f"cast one of them, as in tf.cast(y, tf.{wanted}). {TYPES_OF_ARRAYS}"


def _advice_for_params(name: str, line: str) -> str:
    """Returns advice about an object of a class, or of a subclass, that a line builds."""
    if "super().__init__()" in line:
        return "an __init__ begins with super().__init__(params)"
    found = re.search(r"(?<![.\w])([A-Z]\w*)\(\)", line)
    name = found[1] if found else name
    return (
        f"{name} is built from its Params: write {name}.Params() for a field or a child, and "
        f"{name}.Params().instantiate() for the object itself"
    )


def _line_of(error: BaseException) -> str:
    """Returns the line of source that raised an error, or "" if it is not known."""
    frames = traceback.extract_tb(error.__traceback__)
    return (frames[-1].line or "") if frames else ""


def advised(method: Method) -> Method:
    """Wraps a method so that an error gets its advice as a note, which a traceback ends with.

    An id without a row, or a label that is no class, raises an IdError instead.
    """

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            batch = next((each for each in args if isinstance(each, Mapping)), None)
            if (of_ids := id_error(error, {} if batch is None else {"": batch})) is not None:
                raise of_ids from None  # the stack of TensorFlow has no line of the user
            note = advice(error)
            if note and note not in getattr(error, "__notes__", ()):
                error.add_note(note)
            raise

    return cast(Method, run)


def _names_in_batch(error: KeyError) -> list[Any] | None:
    """Returns the names in the variable `batch` of the function that raised.

    None: it has no such dict, or the dict has the key.
    """
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    batch = place.tb_frame.f_locals.get("batch") if place is not None else None
    if not isinstance(batch, Mapping) or not error.args or error.args[0] in batch:
        return None
    return list(batch)
