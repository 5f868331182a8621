"""What has to hold between inputs and the task, checked before the first step.

An evaluation is one pass in which every example counts once: it has an end, and padding examples
have the weight 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tekso.framework import task_results
from tekso.framework.input.input import ExampleInput, Input, form_text
from tekso.framework.input.skips import InputError
from tekso.framework.task import Task

MOST_BATCHES = 1000
"""How many batches at the end of a pass are searched for padding."""


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


def check_lasts(input: Input, steps: int) -> None:
    """Checks that a training input has a batch for every step.

    Raises:
      InputError: it ends before; says what to set.
    """
    if input.num_batches is None or input.num_batches >= steps:
        return
    cure = "set input.order='shuffled', which has no end, or run.steps to at most that"
    if "order" not in input.params:
        cure = "its num_batches has to be None (no end), or run.steps at most that"
    raise InputError(
        f"the training input has {input.num_batches} batches, and run.steps is {steps}: {cure}"
    )


def check_batch(path: str, input: Input, batch: Any) -> None:
    """Checks that a batch is arrays of equally many examples, by name.

    Args:
      path: of the input, in the tree.
      input: the input.
      batch: what its `batch(step)` returned.

    Raises:
      InputError: it is not.
    """
    name = type(input).__name__
    what = f"{name}.examples()" if isinstance(input, ExampleInput) else f"{name}.batch()"
    want = "{name: NumPy array [examples, ...]}, all with the same number of examples"
    if not isinstance(batch, Mapping) or not batch:
        raise InputError(
            f"{path}: {what} returns a {type(batch).__name__}, and has to return {want}"
        )
    for key, array in batch.items():
        problem = ""
        if not isinstance(key, str):
            problem = "a name has to be a str"
        elif not isinstance(array, np.ndarray):
            problem = f"it is a {type(array).__name__}; np.asarray() makes an array"
        elif array.dtype == object:
            problem = "it holds Python objects: rows of different lengths need padding"
        elif not array.ndim:
            problem = "it has no dim of examples"
        if problem:
            raise InputError(f"{path}: {key!r} of {what}: {problem}. Want {want}")
    sizes = {key: len(array) for key, array in batch.items()}
    if len(set(sizes.values())) > 1 or not next(iter(sizes.values())):
        raise InputError(f"{path}: {what} has arrays of {sizes} examples. Want {want}")


def check_alike(inputs: Mapping[str, Input]) -> None:
    """Checks that inputs which say their form have the same arrays, of one shape and dtype.

    Args:
      inputs: {path in the tree: input}; the training input is "input".

    Raises:
      InputError: one differs from the training input.
    """
    wanted = inputs["input"].form()
    for path, input in inputs.items():
        form = input.form()
        if wanted is None or form is None or form == wanted:
            continue
        raise InputError(
            f"{path} has other arrays than the training input: {form_text(form)}; in training "
            f"{form_text(wanted)}. Names, shapes and dtypes of an example have to be the same"
        )


def warnings(inputs: Mapping[str, Input]) -> list[str]:
    """Returns what may be wrong with the inputs of a run, a line each.

    Args:
      inputs: {path in the tree: input}; the training input is "input".
    """
    train = inputs["input"]
    repeated = repeats(train)
    return [
        *([repeated] if repeated is not None else []),
        *(
            f"{path} has the same examples as the training input, though its split is "
            f"{input.params.split!r}: what it measures was trained on. load(split) has to return "
            "other examples for each split"
            for path, input in inputs.items()
            if input is not train and _is_copy(input, train)
        ),
    ]


def _is_copy(input: Input, train: Input) -> bool:
    """Whether an input of another split has all examples of the training input, and no others."""
    if input.arrays is None or train.arrays is None or input.arrays.keys() != train.arrays.keys():
        return False
    if "split" not in input.params or input.params.split == train.params.split:
        return False  # it is meant
    return all(np.array_equal(array, train.arrays[name]) for name, array in input.arrays.items())


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
    """Checks that `loss_weight` counts no padding examples.

    Args:
      inputs: {path in the tree: input}.
      task: the task.

    Raises:
      InputError: it does, or no array of the batch marks it.
    """
    for path, input in inputs.items():
        found = padding(input)
        if found is None:
            continue
        step, is_padding = found
        copies = {name: array[is_padding] for name, array in input.batch(step).items()}
        weight = _weight(task, copies)
        if weight:
            how = f"of these alone it is {weight:g} instead of 0"
            what = task_results.method_of(task, "loss_weight")
            raise InputError(counted(path, what, is_padding, how))


def padding(input: Input) -> tuple[int, npt.NDArray[np.bool_]] | None:
    """Returns the last batch of a pass that has padding examples, and which of them are.

    It is looked for among the last `MOST_BATCHES`. None: there is none, no end, or it is not known.
    """
    last = (input.num_batches or 0) - 1
    for step in range(last, max(last - MOST_BATCHES, -1), -1):
        is_padding = input.is_padding(step)
        if is_padding is None:
            return None
        if is_padding.any():
            return step, is_padding
    return None


def counted(path: str, what: str, is_padding: np.ndarray, how: str) -> str:
    """Returns the message about a sum of a task that counts padding examples.

    Args:
      path: of the input, in the tree.
      what: the sum.
      is_padding: which examples of a batch are padding.
      how: the figures that show it.
    """
    return (
        f"{path}: {int(is_padding.sum())} of the {len(is_padding)} examples of a batch are "
        f"padding, copies that fill it up, and {what} counts them: {how}. Multiply by the array of "
        f'the batch that is 0 for them ("weights") in loss_weight, loss and metrics; or set '
        f"{path}.batch_size to a divisor of the number of examples"
    )


def _weight(task: Task, batch: Mapping[str, Any]) -> float:
    tensors = {name: tf.convert_to_tensor(array) for name, array in batch.items()}
    return float(task_results.loss_weight(task, tensors))
