"""Observes the ops that run one by one in a block, such as those of a trial of a loss."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from tensorflow.python.framework import op_callbacks


class RanOp(NamedTuple):
    """An op that ran.

    Attributes:
      kind: its type.
      inputs: its tensors.
      attributes: names and values, in turn.
      outputs: its tensors; they have values.
    """

    kind: str
    inputs: Sequence[Any]
    attributes: Any
    outputs: Sequence[Any]


@contextlib.contextmanager
def observing(observe: Callable[[RanOp], None]) -> Iterator[None]:
    """Calls a function for each op that runs in the block; ops of traced functions have no values.

    Args:
      observe: called after the op.
    """

    def callback(
        kind: str | bytes,
        inputs: Any,
        attrs: Any,
        outputs: Any,
        op_name: Any = None,
        graph: Any = None,
    ) -> None:
        del op_name
        if graph is None:
            # Of ops that TensorFlow runs in another way, such as Reshape, it is bytes.
            name = kind.decode() if isinstance(kind, bytes) else kind
            observe(RanOp(name, tuple(inputs or ()), attrs, tuple(outputs or ())))

    op_callbacks.add_op_callback(callback)
    try:
        yield
    finally:
        op_callbacks.remove_op_callback(callback)
