"""The classes of texts, for programs that answer line by line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tekso.framework.task import Program
from tekso.tasks.classification.labelled_texts import checked_length, class_name, encoded

_MOST_SHOWN = 5  # classes of a text
_BATCH_SIZE = 64


def classified(
    task: Any, program: Program, input: Any, texts: Sequence[str]
) -> list[list[dict[str, Any]]]:
    """Returns the likeliest classes of every text, best first: class, number and probability.

    Args:
      task: a `Classification`.
      program: calls functions with the weights of the task.
      input: `LabelledTexts`, or what is known of them.
      texts: the texts; longer ones than in training are cut.
    """
    found = []
    for begin in range(0, len(texts), _BATCH_SIZE):
        own = [*texts[begin : begin + _BATCH_SIZE]]
        padded = own + [""] * (_BATCH_SIZE - len(own))  # one shape, so one trace
        x = encoded(padded, checked_length(input.params))
        arrays = program.call(task.class_probabilities, x)
        rows = np.asarray(arrays["probabilities"])[: len(own)]
        found += [_named(row, input.class_names) for row in rows]
    return found


def _named(probabilities: np.ndarray, names: Sequence[str]) -> list[dict[str, Any]]:
    order = np.argsort(-probabilities, kind="stable")[:_MOST_SHOWN].tolist()
    return [
        {
            "class": class_name(names, number),
            "number": number,
            "probability": float(probabilities[number]),
        }
        for number in order
    ]
