"""Checks inputs, and inputs against the task, before the first step.

An evaluation is one pass in which every example counts once. An evaluation input must therefore be
finite, and padding examples must have the weight 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tekso.framework import task_results
from tekso.framework.input.bucketing import BucketedInput
from tekso.framework.input.errors import InputError
from tekso.framework.input.forms import form_text
from tekso.framework.input.input import ExampleInput, Input
from tekso.framework.input.loaded import RAGGED, about_objects, is_ragged
from tekso.framework.task import Task

MOST_BATCHES = 1000
"""Number of batches at the end of a pass that are searched for padding."""


def check_ends(eval_inputs: Mapping[str, Input]) -> None:
    """Checks that every evaluation input is finite.

    Raises:
      InputError: an input is infinite; the text says what to set.
    """
    for name, input in eval_inputs.items():
        if input.num_batches is not None:
            continue
        path, params = f"eval_inputs.{name}", input.params
        if "order" in params:
            raise InputError(
                f"{path}.order is {params.order!r}, which makes the input infinite, but an "
                f"evaluation is one pass: set {path}.order='once'"
            )
        raise InputError(
            f"{path} ({type(input).__name__}) is infinite, but an evaluation is one pass: its "
            "num_batches must be the number of batches, not None"
        )


def check_lasts(input: Input, steps: int) -> None:
    """Checks that a training input has a batch for every step.

    Raises:
      InputError: it has fewer batches; the text says what to set.
    """
    if input.num_batches is None or input.num_batches >= steps:
        return
    cure = "set input.order='shuffled', which is infinite, or a smaller run.steps"
    if "order" not in input.params:
        cure = "its num_batches must be None (infinite), or run.steps must be smaller"
    raise InputError(
        f"the training input has {input.num_batches} batches, but run.steps is {steps}: {cure}"
    )


def check_batch(path: str, input: Input, batch: object) -> None:
    """Checks that a batch maps names to arrays with the same number of examples.

    Args:
      path: path of the input in the tree.
      input: the input.
      batch: the result of its `batch(step)`.

    Raises:
      InputError: it does not.
    """
    name = type(input).__name__
    what = f"{name}.examples()" if isinstance(input, ExampleInput) else f"{name}.batch()"
    if isinstance(input, BucketedInput):
        what = f"{name}.bucket_rows()"
    expected = "{name: NumPy array [examples, ...]}, all with the same number of examples"
    if not isinstance(batch, Mapping) or not batch:
        raise InputError(f"{path}: {what} returns a {type(batch).__name__}, expected {expected}")
    for key, array in batch.items():
        problem = ""
        if not isinstance(key, str):
            problem = "a name must be a str"
        elif is_ragged(array):
            problem = f"it {RAGGED}"
        elif not isinstance(array, np.ndarray):
            problem = f"it is a {type(array).__name__}; np.asarray() makes an array"
        elif array.dtype == object:
            problem = f"it {about_objects(array, array)}"
        elif not array.ndim:
            problem = "it has no dim of examples"
        if problem:
            raise InputError(f"{path}: {key!r} of {what}: {problem}. Expected {expected}")
    sizes = {key: len(array) for key, array in batch.items()}
    if len(set(sizes.values())) > 1 or not next(iter(sizes.values())):
        raise InputError(f"{path}: {what} has arrays of {sizes} examples. Expected {expected}")


def check_alike(inputs: Mapping[str, Input]) -> None:
    """Checks that all inputs that declare their form have the same names, shapes and dtypes.

    Args:
      inputs: {path in the tree: input}; the training input is "input".

    Raises:
      InputError: an input differs from the training input.
    """
    wanted = inputs["input"].form()
    for path, input in inputs.items():
        form = input.form()
        if wanted is None or form is None or form == wanted:
            continue
        raise InputError(
            f"the arrays of {path} differ from those of the training input: {form_text(form)}; in "
            f"training {form_text(wanted)}. Names, shapes and dtypes of an example must be the same"
        )


def warnings(inputs: Mapping[str, Input]) -> list[str]:
    """Returns possible problems with the inputs of a run, one line each.

    Args:
      inputs: {path in the tree: input}; the training input is "input".
    """
    train = inputs["input"]
    repeated = repeats(train)
    wasted = train.wasted() if isinstance(train, BucketedInput) else None
    return [
        *([repeated] if repeated is not None else []),
        *([f"input: {wasted}. Set a smaller batch size"] if wasted is not None else []),
        *(
            f"{path}: {shared:,} of {_num_examples(input):,} examples are training examples too, "
            f"although its split is {input.params.split!r}. load(split) must return different "
            "examples for each split"
            for path, input in inputs.items()
            if input is not train and (shared := _num_shared(input, train))
        ),
    ]


_LEAST_SHARED = 0.1  # of the held-out examples: fewer may be equal by chance
_MOST_COMPARED = 256 * 1024**2  # bytes of training arrays


def _num_shared(input: Input, train: Input) -> int:
    """Returns how many examples of an input of another split are training examples.

    0 if they are few, if it is intended, or if the arrays are not in memory or are large.
    """
    if input.arrays is None or train.arrays is None or input.arrays.keys() != train.arrays.keys():
        return 0
    if "split" not in input.params or input.params.split == train.params.split:
        return 0  # intended
    if sum(array.nbytes for array in train.arrays.values()) > _MOST_COMPARED:
        return 0
    known = set(_examples_as_bytes(train.arrays))
    shared = sum(example in known for example in _examples_as_bytes(input.arrays))
    return shared if shared >= _LEAST_SHARED * _num_examples(input) else 0


def _num_examples(input: Input) -> int:
    return len(next(iter((input.arrays or {}).values()), ()))


def _examples_as_bytes(arrays: Mapping[str, np.ndarray]) -> Iterator[bytes]:
    """Yields a digest of each example."""
    for rows in zip(*(arrays[name] for name in sorted(arrays)), strict=True):
        example = b"".join(np.ascontiguousarray(row).tobytes() for row in rows)
        yield hashlib.blake2b(example, digest_size=16).digest()


def repeats(input: Input) -> str | None:
    """Returns a warning if every batch of the training input contains an example twice."""
    params = input.params
    if not isinstance(input, ExampleInput) or type(input).batch is not ExampleInput.batch:
        return None
    if params.order == "once" or params.batch_size <= input.num_examples:
        return None
    return (
        f"{params.path_of('batch_size')} is {params.batch_size}, but there are only "
        f"{input.num_examples} examples: every batch contains some of them more than once"
    )


def check_weights(inputs: Mapping[str, Input], task: Task) -> None:
    """Checks that `loss_weight` does not count padding examples.

    Args:
      inputs: {path in the tree: input}.
      task: the task.

    Raises:
      InputError: it counts them, or no array of the batch marks them.
    """
    for path, input in inputs.items():
        found = padding(input)
        if found is None:
            continue
        step, is_padding = found
        copies = {name: array[is_padding] for name, array in input.batch(step).items()}
        weight = _weight(task, copies)
        if weight:
            how = f"for these examples alone it is {weight:g} instead of 0"
            what = task_results.method_of(task, "loss_weight")
            raise InputError(counted(path, what, is_padding, how))


def padding(input: Input) -> tuple[int, npt.NDArray[np.bool_]] | None:
    """Returns the step of the last batch with padding examples, and a mask of these examples.

    Only the last `MOST_BATCHES` batches are searched. Returns None if they have no padding, if the
    input is infinite, or if it does not know which examples are padding.
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
      path: path of the input in the tree.
      what: name of the sum.
      is_padding: mask of the padding examples of a batch.
      how: the figures that show it.
    """
    return (
        f"{path}: {int(is_padding.sum())} of the {len(is_padding)} examples of a batch are "
        f"padding (copies that fill it up), and {what} counts them: {how}. In loss_weight, loss "
        'and metrics, multiply by the array of the batch that is 0 for padding ("weights"); batch '
        "statistics exclude padding by a mask, as in the layer BatchNorm; or "
        f"set {path}.batch_size to a divisor of the number of examples"
    )


def _weight(task: Task, batch: Mapping[str, Any]) -> float:
    tensors = {name: tf.convert_to_tensor(array) for name, array in batch.items()}
    return float(tf.reduce_sum(task_results.loss_weight(task, tensors)))
