"""The part of a batch that one accumulation step computes."""

from __future__ import annotations

from tekso.framework.counting import multiples_near
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.signature import Signature, num_examples


def part_of(batch: Signature, parts: int) -> Signature:
    """Returns the signature of one of several equal parts of a batch.

    Raises:
      ExecutionError: the batch does not divide into equal parts.
    """
    size = num_examples(batch)
    if size % parts:
        raise ExecutionError(
            f"input.batch_size {size} does not divide evenly over {parts} accumulation steps "
            "(learner.accumulation_steps); the nearest that do: "
            f"{', '.join(map(str, multiples_near(size, parts)))}"
        )
    return {name: ((size // parts, *shape[1:]), dtype) for name, (shape, dtype) in batch.items()}
