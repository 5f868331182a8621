"""Sums of several tensors in one order, so that runs can be repeated to the last bit.

Defect: TensorFlow's AddN writes its result into the memory of the first input that no other op
needs at that moment, and swaps this input with the first one before it adds. So the order of a sum
of three or more tensors depends on which other ops have already run. The tape of gradients makes
such ops, `tf.add_n` does, and the graph optimizer makes them of chains of additions.

Source: tensorflow/core/kernels/aggregate_ops.cc, AddNOp; AddOpsRewriteStage of
tensorflow/core/grappler/optimizers/arithmetic_optimizer.cc.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import gen_math_ops

_ADD_N = gen_math_ops.add_n
_REWRITES = "arithmetic_optimization"


def set_ordered(wanted: bool) -> None:
    """Makes functions that are traced from now on add from first to last, or as TensorFlow does."""
    gen_math_ops.add_n = _added if wanted else _ADD_N
    tf.config.optimizer.set_experimental_options({_REWRITES: not wanted})


def _added(inputs: Sequence[Any], name: str | None = None) -> Any:
    """Returns the sum by additions of two, whose result does not depend on their order."""
    total, *others = inputs
    if not others:
        return _ADD_N([total], name=name)
    *middle, last = others
    for value in middle:
        total = _ADD_N([total, value])
    return _ADD_N([total, last], name=name)
