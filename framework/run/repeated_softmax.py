"""Finds a loss that applies a softmax to probabilities, to which a softmax was applied already.

Such a loss cannot reach 0, and the model learns little, without an error. Only the values show it
for certain, which are at hand when ops run one by one. Only TensorFlow's ops of a softmax
cross-entropy are known, which Keras calls, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np

from tekso.framework.run.ran_ops import RanOp, observing

_LOSSES = ("SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits")
_TOLERANCE = 2**-8  # of the sum of probabilities: bfloat16 rounds each by up to 2**-8 of it


class RepeatedSoftmax:
    """Watches ops that run one by one.

    Attributes:
      found: whether the scores of a softmax cross-entropy were probabilities.
    """

    def __init__(self) -> None:
        self.found = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watches the ops of a block; ops inside of compiled functions are not seen."""
        with observing(self._observe):
            yield

    def _observe(self, op: RanOp) -> None:
        if op.kind in _LOSSES:
            self.found = self.found or _are_probabilities(np.asarray(op.inputs[0]))


def _are_probabilities(scores: np.ndarray) -> bool:
    """Returns whether all rows are probabilities of several classes."""
    are_shares = scores.size > 0 and scores.shape[1] > 1 and scores.min() >= 0 and scores.max() <= 1
    return bool(are_shares and (np.abs(scores.sum(1, dtype=np.float64) - 1) < _TOLERANCE).all())
