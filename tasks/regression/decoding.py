"""Decodes a regression: targets and predictions of some held-out examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from tekso.framework.input.input import Input
from tekso.framework.input.shown_examples import shown_rows
from tekso.framework.task import Decoded, Program
from tekso.tasks.regression.arrays import X, Y

_MOST = 10  # examples shown
_MOST_NAMED = 5  # targets shown in a line


def decoded_examples(
    run: Callable[..., Mapping[str, tf.Tensor]],
    names: Sequence[str],
    program: Program,
    input: Input,
) -> Decoded:
    """Returns targets and predictions for some held-out examples, spread evenly over all.

    Args:
      run: called with (theta, x, ctx); returns "y".
      names: names of the targets.
      program: calls functions with the weights of the task.
      input: the training input; its examples are used if no held-out ones can be loaded, and the
        text says why.
    """
    shown = shown_rows(input, most=_MOST)
    batch, examples = shown.batch, shown.examples
    predicted = np.asarray(program.call(run, batch[X])[Y], np.float64)
    y = np.asarray(batch[Y], np.float64).reshape(predicted.shape)
    records = [
        {
            "kind": "numbers",
            "split": examples.split,
            "y": dict(zip(names, y[row].tolist(), strict=True)),
            "predicted": dict(zip(names, predicted[row].tolist(), strict=True)),
        }
        for row in shown.rows
    ]
    lines = (_line(names, y[row], predicted[row]) for row in shown.rows)
    return Decoded(examples.titled("\n".join(lines), "examples"), records)


def _line(names: Sequence[str], y: np.ndarray, predicted: np.ndarray) -> str:
    """Returns a line such as "price 310  predicted 287.3"."""
    parts = [
        f"{name} {one:.6g}  predicted {other:.6g}"
        for name, one, other in zip(names, y, predicted, strict=True)
    ]
    more = "  …" if len(parts) > _MOST_NAMED else ""
    return "  ".join(parts[:_MOST_NAMED]) + more
