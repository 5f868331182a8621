"""Adds to errors about an example of a batch its index in the data, where the input knows it.

'x' (example 3 of eval_inputs.dev.batch(4)) has the id 9999, …     becomes
'x' (example 3 of eval_inputs.dev.batch(4), index 131 of the data) has the id 9999, …
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tekso.framework.input import shuffle
from tekso.framework.input.bucketing import BucketedInput
from tekso.framework.input.input import ExampleInput, Input

_EXAMPLE = re.compile(r"\bexample (\d+) of (input|eval_inputs\.[\w-]+)\.batch\((\d+)\)")


@contextlib.contextmanager
def naming_indices(inputs: Mapping[str, Input]) -> Iterator[None]:
    """Adds indices to the message of a ValueError in the block.

    Args:
      inputs: {path in the tree: input}.
    """
    try:
        yield
    except ValueError as error:
        if error.args and isinstance(text := error.args[0], str):
            error.args = (with_indices(text, inputs), *error.args[1:])
        raise


def with_indices(text: str, inputs: Mapping[str, Input]) -> str:
    """Returns a text about examples with their indices.

    Args:
      text: the text.
      inputs: as of `naming_indices`.
    """

    def named(found: re.Match[str]) -> str:
        example, path, step = found.groups()
        input = inputs.get(path)
        index = None if input is None else index_of(input, int(step), int(example))
        return found[0] if index is None else f"{found[0]}, index {index} of the data"

    return _EXAMPLE.sub(named, text)


def index_of(input: Input, step: int, example: int) -> int | None:
    """Returns the index that an input is asked for to build an example; None: unknown.

    It is the argument of `ExampleInput.examples` and `BucketedInput.bucket_rows`.

    Args:
      input: the input.
      step: number of the batch.
      example: position in the batch.
    """
    source, step = input.inner, input.inner_step(step)
    own: Any = type(source)
    if isinstance(source, BucketedInput):
        is_known = own.batch is BucketedInput.batch and own.batch_rows is BucketedInput.batch_rows
        return int(source.bucket_batch(step).examples[example]) if is_known else None
    if not isinstance(source, ExampleInput) or (own.batch, own.batch_rows, own.at) != (
        ExampleInput.batch,
        ExampleInput.batch_rows,
        ExampleInput.at,
    ):
        return None
    count, position = source.num_examples, step * int(source.params.batch_size) + example
    if source.params.order == "once":
        return min(position, count - 1)
    epoch, index = np.divmod(np.array([position], np.int64), count)
    if source.params.order == "shuffled":
        key = shuffle.key_of(source.seed, "order")
        index = shuffle.permute(index, count, shuffle.fold(key, epoch))
    return int(index[0])
