"""Errors about the examples of an input: there are none, or some cannot be built."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tekso.framework.input.errors import InputError
from tekso.framework.params import Params

Ints = npt.NDArray[np.int64]

WHILE_BUILDING = "while building "
"""Beginning of a note of an error about the examples that were being built."""
_MOST = 8  # indices in a note
_MOST_SECONDS = 10.0  # for examples that are built alone


def too_long(sizes: npt.NDArray[Any], last: int) -> str:
    """Returns the message about examples that are longer than the last bucket.

    Shapes:
      sizes: [n]
    """
    longer = np.flatnonzero(sizes > last)
    return (
        f"{len(longer):,} of the {len(sizes):,} examples are longer than the last bucket, {last}; "
        f"the first is example {longer[0]}, of length {sizes[longer[0]]}. Set the last bound to "
        f"the longest, {sizes.max()}, or leave out or shorten these examples before assign"
    )


def empty(params: Params, kind: str, base: type[Params]) -> InputError:
    """Returns the error that an input has no examples.

    Args:
      params: Params of the input.
      kind: its class.
      base: Params whose fields say nothing about the data, except the split.
    """
    name = params.path_of("").rstrip(".")
    common = base().fields()
    texts = [
        f"{params.path_of(field)} = {value!r}"
        for field in params.fields()
        if field not in common
        if isinstance(value := params.get(field), str | list) and value
    ]
    look = (
        f" Is this right, relative to the working directory: {', '.join(texts)}?" if texts else ""
    )
    return InputError(
        f"{name or 'an input'} ({kind}) has no examples of the split {params.get('split')!r}: its "
        f"num_examples is 0.{look}"
    )


def built(method: str, build: Callable[..., Any], *of_examples: Ints) -> Any:
    """Returns `build(*of_examples)`, the arrays of some examples.

    An error gets a note with the examples, and with the one that causes it, if that can be found.

    Args:
      method: name of the method of the input that builds them.
      build: calls it.
      of_examples: arrays with an element for each example: its index in the data, and others.
    """
    try:
        return build(*of_examples)
    except Exception as error:

        def alone(position: int) -> Any:
            return build(*(array[position : position + 1] for array in of_examples))

        _add_note(error, method, of_examples[0].tolist(), alone)
        raise


def _add_note(
    error: Exception, method: str, index: Sequence[int], build: Callable[[int], Any]
) -> None:
    """Adds to an error which examples were being built; `build` builds the one at a position."""
    notes = getattr(error, "__notes__", ())
    if isinstance(error, (MemoryError, NotImplementedError)) or not index:
        return
    if any(note.startswith(WHILE_BUILDING) for note in notes):
        return
    wrong, shapes = _built_alone(index, build)
    usual = Counter(shapes.values()).most_common(1)[0][0] if shapes else ""
    others = [number for number, found in shapes.items() if found != usual]
    if wrong and shapes:  # if all fail, it is no matter of an example
        text = f"index {wrong[0]} of the data, by {method}"
    elif others and not wrong:
        text = (
            f"a batch by {method}: index {others[0]} of the data has {shapes[others[0]]}, and "
            f"others have {usual}"
        )
    else:
        shown = ", ".join(map(str, index[:_MOST])) + (", …" if len(index) > _MOST else "")
        text = f"the {'indices' if index[1:] else 'index'} {shown} of the data, by {method}"
    error.add_note(f"{WHILE_BUILDING}{text}")


def _built_alone(
    index: Sequence[int], build: Callable[[int], Any]
) -> tuple[list[int], dict[int, str]]:
    """Returns the indices of examples that fail alone, and {index: shapes} of the others.

    After some seconds, the examples that are left are not tried.
    """
    wrong: list[int] = []
    shapes: dict[int, str] = {}
    end = time.monotonic() + _MOST_SECONDS
    for position, number in enumerate(index):
        try:
            shapes[number] = _shapes(build(position))
        except Exception:
            wrong.append(number)
        if time.monotonic() > end:
            break
    return wrong, shapes


def _shapes(example: Any) -> str:
    """Returns the shapes of the arrays of one example as text; "": it has no arrays."""
    if not isinstance(example, Mapping):
        return ""
    return ", ".join(f"{name} {list(np.shape(array)[1:])}" for name, array in example.items())
