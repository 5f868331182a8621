"""Names the example of an input with a wrong id or label, which a computation op by op has read."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

from tekso.framework import error_advice, graph_errors
from tekso.framework.error_advice import IdError, LabelError
from tekso.framework.label_advice import OF_DATA


class DataIdError(IdError):
    """An example of an input has an id for which a table has no row."""


@contextlib.contextmanager
def naming(batch: Mapping[str, Any], of: str) -> Iterator[None]:
    """Raises an error for an id without a row, or a label that is no class, in the block.

    An id that is in no array of the batch was computed: its error stays as it is.

    Args:
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
        known = (error, error.__cause__, error.__context__)  # an IdError hides TensorFlow's
        cause = next((e for e in known if e and graph_errors.NO_ROW.search(str(e))), None)
        if cause is None:
            raise
        found = graph_errors.NO_ROW.search(str(cause))
        names = error_advice.arrays_with(int(found[1]), batch, of) if found is not None else []
        if not names:
            raise
        says = f"{' and '.join(names)} {'have' if names[1:] else 'has'} the"
        if isinstance(error, IdError):  # it names the layer
            raise DataIdError(str(error).replace(OF_DATA, says)) from error
        stack = traceback.walk_tb(error.__traceback__)
        frames = [(f.f_code.co_filename, line, f.f_code.co_name) for f, line in stack]
        text = error_advice.advice_for_ids(str(cause), says) + graph_errors.place_in(frames)
        raise DataIdError(text) from error
