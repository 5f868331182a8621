"""The step context of one of several data-parallel devices, which can sum over all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import tensorflow as tf

from tekso.framework.context import StepContext


def _sum_over_replicas(ctx: StepContext, x: tf.Tensor) -> tf.Tensor:
    return cast(ReplicaContext, ctx).all_reduce(x)


_FORMS = {"sum_over_replicas": _sum_over_replicas}


class ReplicaContext(StepContext):
    """The step context of a part of the batch on one of several devices."""

    forms = _FORMS

    def __init__(self, *, all_reduce: Callable[[Any], Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.all_reduce = all_reduce
