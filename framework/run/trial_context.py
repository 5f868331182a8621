"""The contexts of a trial of a task: they note what it reads, and count the ops of loops."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any, cast

import tensorflow as tf
from tensorflow.python.framework import op_callbacks

from tekso.framework import loops
from tekso.framework.context import StepContext

NUM_EXAMPLES = "num_examples"


class OpCount:
    """Counts ops that run one by one.

    Attributes:
      run: number of ops.
      kinds: types of the ops.
    """

    def __init__(self) -> None:
        self.run, self._repeated = 0, 0.0
        self.kinds = set[str]()

    @property
    def traced(self) -> float:
        """Number of ops that a trace would have: those of loops count once."""
        return self.run - self._repeated

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Counts the ops of a block."""
        op_callbacks.add_op_callback(self._observe)
        try:
            yield
        finally:
            op_callbacks.remove_op_callback(self._observe)

    @contextlib.contextmanager
    def loop(self, iterations: int) -> Iterator[None]:
        """Counts the ops of a block that is a loop, which may have other loops inside."""
        run, repeated = self.run, self._repeated
        yield
        inside = self._repeated - repeated
        more = (self.run - run) * (1 - 1 / iterations)
        self._repeated = repeated + more + inside / iterations

    def _observe(self, kind: str | bytes, *args: Any, graph: Any = None, **rest: Any) -> None:
        self.run += graph is None
        self.kinds.add(kind.decode() if isinstance(kind, bytes) else kind)


class TrialContext(StepContext):
    """A context that notes whether a task or a layer reads `num_examples`.

    Attributes:
      read: takes the names of the attributes that were read.
    """

    def __init__(self, *, read: set[str], **kwargs: Any) -> None:
        self.read = read  # also of copies of this
        super().__init__(**kwargs)

    @property
    def num_examples(self) -> int | None:
        """Number of examples of the global batch."""
        self.read.add(NUM_EXAMPLES)
        return self._num_examples

    @num_examples.setter
    def num_examples(self, value: int | None) -> None:
        self._num_examples = value

    def collect_loss(self, name: str, value: tf.Tensor) -> None:
        """Adds an auxiliary loss; that this divides it by `num_examples` is not noted."""
        before = set(self.read)
        super().collect_loss(name, value)
        self.read &= before


def _counted_scan(
    ctx: StepContext, body: Any, theta: Any, state: Any, xs: Any, **options: Any
) -> Any:
    with cast(OpByOp, ctx).count.loop(loops.iterations_of(xs)):
        return loops.scan(ctx, body, theta, state, xs, **options)


class OpByOp(TrialContext):
    """A context for computing op by op, which counts the ops of loops."""

    forms = MappingProxyType({"scan": _counted_scan})

    def __init__(self, *, count: OpCount, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.count = count  # also of copies of this
