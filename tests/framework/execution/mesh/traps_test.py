"""What a mesh cannot compute in a layer's code is refused with its line, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from tekso.framework.execution import ExecutionError
from tekso.framework.execution.mesh.traps import refuse_traps


def ops(function: Callable[[tf.Tensor], Any]) -> list[tf.Operation]:
    traced = tf.function(function, autograph=False)
    spec = tf.TensorSpec([3, 4], tf.float32)
    return list(traced.get_concrete_function(spec).graph.get_operations())


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x[:, None] * 2.0, "write tf.expand_dims"),
        (lambda x: x[:, ::-1], "write tf.gather"),
        (lambda x: x + tf.random.normal([3, 4]), r"RandomStandardNormal .* by ctx\.uniform"),
        (lambda x: x + tf.random.stateless_uniform([3, 4], [1, 2]), "StatelessRandom"),
    ],
)
def test_traps_are_refused_with_their_line(function: Any, reason: str) -> None:
    pattern = rf"traps_test\.py:\d+: \(lambda.*on a mesh, .*{reason}"
    with pytest.raises(ExecutionError, match=pattern):
        refuse_traps(ops(function))


def test_other_slices_are_not() -> None:
    def harmless(x: tf.Tensor) -> tf.Tensor:
        places = tf.range(4)[tf.newaxis]  # a constant
        turned = tf.gather(x, [3, 2, 1, 0], axis=1)
        return turned[:, 1:] + x[:, ::2][:, :1] + tf.cast(places[:, :1], tf.float32)

    refuse_traps(ops(harmless))
