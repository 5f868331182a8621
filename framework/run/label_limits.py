"""Finds the arrays of a batch that a loss reads as classes, and how many classes there are.

TensorFlow does not refuse a label that is too large: its `tf.one_hot` is all zeros, and a compiled
softmax cross-entropy is NaN. Which arrays are labels is known when the ops of a loss run one by
one, as they do for a few examples before the first step. `Task.check_batch` uses the result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from tensorflow.python.framework import op_callbacks

_SAME_VALUES = frozenset({"Cast", "ExpandDims", "Identity", "Reshape", "Squeeze", "Transpose"})
"""Ops whose output has all values of their first input, and no others."""


class LabelLimits:
    """Watches ops that run one by one.

    Attributes:
      found: {name of an array: number of classes}, the smallest if there are several.
    """

    def __init__(self) -> None:
        self.found: dict[str, int] = {}
        self._arrays: dict[int, tuple[str, Any]] = {}  # {id of a tensor: (name, the tensor)}

    @contextlib.contextmanager
    def watching(self, batch: Mapping[str, Any]) -> Iterator[None]:
        """Watches the ops of a block; ops inside of compiled functions are not seen.

        Args:
          batch: the tensors whose way is followed.
        """
        self._arrays = {id(x): (name, x) for name, x in batch.items() if x.dtype.is_integer}
        op_callbacks.add_op_callback(self._observe)
        try:
            yield
        finally:
            op_callbacks.remove_op_callback(self._observe)
            self._arrays = {}

    def _observe(
        self,
        kind: str | bytes,
        inputs: Any,
        attrs: Any,
        outputs: Any,
        op_name: Any = None,
        graph: Any = None,
    ) -> None:
        del attrs, op_name
        if graph is not None or not inputs:
            return
        if isinstance(kind, bytes):  # of ops that TensorFlow runs in another way, such as Reshape
            kind = kind.decode()
        is_sparse = kind == "SparseSoftmaxCrossEntropyWithLogits"
        known = self._arrays.get(id(inputs[1 if is_sparse else 0]))
        if known is None:
            return
        if is_sparse:
            self._limit(known[0], int(inputs[0].shape[1]))
        elif kind == "OneHot":
            self._limit(known[0], int(inputs[1]))
        elif kind in _SAME_VALUES and outputs[0].dtype.is_integer:
            self._arrays[id(outputs[0])] = known[0], outputs[0]

    def _limit(self, name: str, classes: int) -> None:
        self.found[name] = min(classes, self.found.get(name, classes))
