"""Sums over the processes of a run, by the collective operations of TensorFlow's runtime.

Each process contributes one device. Tensors of a nest are packed, so that a step sends a few large
messages instead of one per weight. All processes get the same sums, to the last bit.

TensorFlow identifies the participants of a collective operation by a group key, and the operation
by an instance key. So all processes must trace the same sums in the same order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tekso.framework.primitives.custom_gradient import custom_gradient

_STEP_GROUP, _HOST_GROUP = 1, 2
_PACK_BYTES = 64 * 1024**2
"""Maximum size of packed tensors: packing takes memory, and saves little for large tensors."""


class ProcessSums:
    """Sums over processes; with one process, every sum is the value itself.

    Args:
      process: index of this process.
      size: number of processes.
    """

    def __init__(self, process: int = 0, size: int = 1) -> None:
        self.process, self.size = process, size
        self._instances = itertools.count(1)
        self._on_host = tf.function(self._host_sum, autograph=False)

    def of_nest(self, nest: Any) -> Any:
        """Returns a nest of tensors, summed over the processes; call it when a step is traced.

        It is differentiable: the gradient of a sum is the sum of the gradients of all processes.
        """
        if self.size == 1:
            return nest
        tensors = [tf.convert_to_tensor(x) for x in tf.nest.flatten(nest)]
        sums: list[tf.Tensor] = [None] * len(tensors)
        for pack in _packs(tensors):
            parts = [tensors[i] for i in pack]
            packed = self._sum(tf.concat([tf.reshape(x, [-1]) for x in parts], 0))
            sizes = [x.shape.num_elements() for x in parts]
            for i, x, total in zip(pack, parts, tf.split(packed, sizes), strict=True):
                sums[i] = tf.reshape(total, x.shape)
        return tf.nest.pack_sequence_as(nest, sums)

    def of_numbers(self, numbers: Sequence[float]) -> list[float]:
        """Returns numbers of the host, summed over the processes in float64."""
        if self.size == 1:
            return list(numbers)
        found: list[float] = self._on_host(tf.constant(numbers, tf.float64)).numpy().tolist()
        return found

    def _sum(self, x: tf.Tensor) -> tf.Tensor:
        @custom_gradient
        def summed(x: tf.Tensor) -> Any:
            instance = next(self._instances)
            return self._reduced(x, _STEP_GROUP, instance), self._sum

        return summed(x)

    def _host_sum(self, numbers: tf.Tensor) -> tf.Tensor:
        # One instance per shape: processes may call this with other shapes in between.
        return self._reduced(numbers, _HOST_GROUP, 1 + numbers.shape[0])

    def _reduced(self, x: tf.Tensor, group: int, instance: int) -> tf.Tensor:
        return tf.raw_ops.CollectiveReduceV2(
            input=x,
            group_size=self.size,
            group_key=group,
            instance_key=instance,
            ordering_token=[],
            merge_op="Add",
            final_op="Id",
        )


def _packs(tensors: Sequence[tf.Tensor]) -> list[list[int]]:
    """Returns the indices of tensors that are packed together: of one dtype, up to a size."""
    packs: list[list[int]] = []
    open_packs: dict[Any, int] = {}  # by dtype: bytes in the last pack of this dtype
    last: dict[Any, list[int]] = {}
    for i, x in enumerate(tensors):
        size_bytes = x.shape.num_elements() * x.dtype.size
        if x.dtype not in last or open_packs[x.dtype] + size_bytes > _PACK_BYTES:
            last[x.dtype], open_packs[x.dtype] = [], 0
            packs.append(last[x.dtype])
        last[x.dtype].append(i)
        open_packs[x.dtype] += size_bytes
    return packs
