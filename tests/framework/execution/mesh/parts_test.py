"""Where each part of an accumulated batch lies: the arguments of its gradients, without a mesh."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework.execution.mesh.layouts import MeshLayout, MeshShape, Rules
from tekso.framework.execution.mesh.program import MeshProgram


class Program(MeshProgram):
    """Tells of every part what its gradients would be computed from."""

    def __init__(self) -> None:
        self._step: Any = SimpleNamespace(loss_weight=lambda x: tf.reduce_sum(x["weights"]))
        self._layout = MeshLayout(MeshShape.parse("data:1"), Rules.parse(""))
        self._placement: Any = SimpleNamespace(
            batch=lambda x: x, taken=lambda x, index, axes: tf.gather(x, index)
        )

    def _gradients(self, batch: Any, offset: Any, *rest: Any) -> Any:
        step, total_weight, whole = rest
        return batch["weights"].numpy().tolist(), *map(int, (offset, step, total_weight, whole))


def test_each_part_of_a_batch_begins_where_the_one_before_ends() -> None:
    batch = {"weights": tf.constant(np.arange(6).reshape(3, 2), tf.float32)}
    step = tf.constant([7, 7], tf.int64)
    found = [Program()._part_graph(batch, step, tf.constant([i, i]))[0] for i in range(3)]
    # examples, offset of the first, step, loss weight and size of the whole batch
    assert found == [([0, 1], 0, 7, 15, 6), ([2, 3], 2, 7, 15, 6), ([4, 5], 4, 7, 15, 6)]
