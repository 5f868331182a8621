"""Names the example of an input with a wrong id or label, which a computation op by op has read."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tekso.framework import error_advice, graph_errors
from tekso.framework.context import Mode
from tekso.framework.error_advice import IdError, LabelError
from tekso.framework.label_advice import OF_DATA
from tekso.framework.run.loss_trial import Trial, rows_of

_MODES: tuple[Mode, ...] = ("eval", "train")


class DataIdError(IdError):
    """An example of an input has an id for which a table has no row."""


@contextlib.contextmanager
def naming(trial: Trial, batch: Mapping[str, Any], of: str) -> Iterator[None]:
    """Raises an error for an id without a row, or a label that is no class, in the block.

    An id that is in no array of the batch was computed: its error stays as it is. So does that of a
    table with a row for each example, as of a loss that gathers examples and needs whole batches.

    Args:
      trial: computes the task.
      batch: the arrays that the block reads some examples of.
      of: name of the batch: "eval_inputs.dev.batch(0)".

    Raises:
      DataIdError: an id has no row.
      LabelError: a label is no class.
    """
    try:
        with error_advice.naming_labels(batch, of):
            yield
    except (LabelError, DataIdError):
        raise
    except Exception as error:
        if (cause := _cause(error)) is None:
            raise
        number, size = _id_and_size(cause)
        names = error_advice.arrays_with(number, batch, of)
        if not names or not _is_repeated(trial, batch, number, size):
            raise
        says = f"{' and '.join(names)} {'have' if names[1:] else 'has'} the"
        if isinstance(error, IdError):  # it names the layer
            raise DataIdError(str(error).replace(OF_DATA, says)) from error
        stack = traceback.walk_tb(error.__traceback__)
        frames = [(f.f_code.co_filename, line, f.f_code.co_name) for f, line in stack]
        text = error_advice.advice_for_ids(str(cause), says) + graph_errors.place_in(frames)
        raise DataIdError(text) from error


def _cause(error: Exception) -> BaseException | None:
    """Returns the error of TensorFlow about an id without a row; None: it is another error."""
    known = (error, error.__cause__, error.__context__)  # an IdError hides TensorFlow's
    return next((e for e in known if e and graph_errors.NO_ROW.search(str(e))), None)


def _id_and_size(cause: BaseException) -> tuple[int, int]:
    """Returns the id of an error, and the number of rows of its table."""
    ((number, size),) = graph_errors.NO_ROW.findall(str(cause))[:1]
    return int(number), int(size)


def _is_repeated(trial: Trial, batch: Mapping[str, Any], number: int, size: int) -> bool:
    """Whether the first examples with an id find no row in a table of this size, also twice.

    A table with a row for each example has another size then.

    Args:
      trial: computes the task.
      batch: has the examples.
      number: the id.
      size: number of rows of the table.
    """
    arrays = (np.asarray(array) for array in batch.values())
    places = (np.argwhere(a == number) for a in arrays if a.ndim and a.dtype.kind in "iu")
    rows = sorted({int(place[0][0]) for place in places if len(place)})
    return any(
        _size(trial, rows_of(batch, rows), mode) == size
        and _size(trial, rows_of(batch, rows + rows), mode) == size
        for mode in _MODES
    )


def _size(trial: Trial, examples: Mapping[str, Any], mode: Mode) -> int | None:
    """Returns the size of the table in which examples find no row; None: there is none."""
    try:
        trial.sums(examples, mode=mode)
    except Exception as error:  # also of a loss that needs whole batches
        cause = _cause(error)
        return None if cause is None else _id_and_size(cause)[1]
    return None
