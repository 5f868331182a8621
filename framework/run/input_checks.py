"""What has to hold between inputs and the task, checked before the first step.

An evaluation is one pass in which every example counts once: it has an end, and what only fills
its last batch up has the weight 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework.input.input import ExampleInput, Input
from tekso.framework.input.skips import InputError
from tekso.framework.task import Task


def check_ends(eval_inputs: Mapping[str, Input]) -> None:
    """Checks that every evaluation input has an end: an evaluation is one pass.

    Raises:
      InputError: one has none; says what to set.
    """
    for name, input in eval_inputs.items():
        if input.num_batches is not None:
            continue
        path, params = f"eval_inputs.{name}", input.params
        if "order" in params:
            raise InputError(
                f"{path}.order is {params.order!r}, an input without an end, and an evaluation is "
                f"one pass: set {path}.order='once'"
            )
        raise InputError(
            f"{path} ({type(input).__name__}) has no end, and an evaluation is one pass: its "
            "num_batches has to be the number of batches, and not None"
        )


def repeats(input: Input) -> str | None:
    """Returns a warning if every batch of the training input has an example more than once."""
    params = input.params
    if not isinstance(input, ExampleInput) or type(input).batch is not ExampleInput.batch:
        return None
    if params.order == "once" or params.batch_size <= input.num_examples:
        return None
    return (
        f"{params.path_of('batch_size')} is {params.batch_size}, and there are "
        f"{input.num_examples} examples: every batch has some of them more than once"
    )


def check_weights(inputs: Mapping[str, Input], task: Task) -> None:
    """Checks that `loss_weight` counts nothing that only fills a batch up.

    Args:
      inputs: {path in the tree: input}.
      task: the task.

    Raises:
      InputError: it does, or no array of the batch marks it.
    """
    for path, input in inputs.items():
        if not input.num_batches:
            continue
        last = input.num_batches - 1
        filling = input.filling(last)
        if filling is None or not filling.any():
            continue
        copies = {name: array[filling] for name, array in input.batch(last).items()}
        found = _weight(task, copies)
        if found:
            raise InputError(not_marked(path, task, "loss_weight", filling, found))


def not_marked(path: str, task: Task, what: str, filling: np.ndarray, found: float) -> str:
    """Returns the message about a sum of a task that counts padding examples."""
    return (
        f"{path}: {int(filling.sum())} of the {len(filling)} examples of the last batch are "
        f"padding, copies that fill it up, and {type(task).__name__}.{what} counts them: of these "
        f"alone it is {found:g} instead of 0. Multiply by the array of the batch that is 0 for "
        f'them ("weights") in loss_weight, loss and metrics; or set {path}.batch_size to a divisor '
        "of the number of examples"
    )


def _weight(task: Task, batch: Mapping[str, Any]) -> float:
    tensors = {name: tf.convert_to_tensor(array) for name, array in batch.items()}
    return float(task.loss_weight(tensors))
