"""The step context of one of several data-parallel devices, which can sum over all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.draws import HasStream


def _sum_over_replicas(ctx: StepContext, x: tf.Tensor, layer: HasStream) -> tf.Tensor:
    own = cast(ReplicaContext, ctx)
    own.summed.add(layer.path)
    return own.all_reduce(x)


_FORMS = {"sum_over_replicas": _sum_over_replicas}


class ReplicaContext(StepContext):
    """The step context of a part of the batch on one of several devices."""

    forms = _FORMS

    def __init__(self, *, all_reduce: Callable[[Any], Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.all_reduce = all_reduce
        self.summed: set[str] = set()  # paths of the layers that summed, also with copies of this


def summed(nest: Any) -> Any:
    """Returns a nest of tensors, summed over the replicas; to be called in a replica.

    Each dtype has an all-reduce of its own: tf.distribute concatenates the tensors of a call.
    """
    context, flat = tf.distribute.get_replica_context(), tf.nest.flatten(nest)
    if len({x.device for x in flat}) > 1:  # a constant or the value of a variable, for example
        flat = [tf.identity(x) for x in flat]  # which are on the device of the replica
    for dtype in dict.fromkeys(x.dtype for x in flat):
        own = [i for i, x in enumerate(flat) if x.dtype == dtype]
        sums = context.all_reduce(tf.distribute.ReduceOp.SUM, [flat[i] for i in own])
        for i, x in zip(own, sums, strict=True):
            flat[i] = x
    return tf.nest.pack_sequence_as(nest, flat)


def replica_number() -> int:
    """Returns the index of the replica being traced; 0 if one trace serves all replicas (TPU)."""
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    return int(tf.get_static_value(replica) or 0)
