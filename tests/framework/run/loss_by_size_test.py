"""Before the first step: losses that depend on the number of examples of the global batch."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
from wrong_losses import Squares, check

from tekso.framework.context import StepContext
from tekso.framework.run.loss_causes import LossError
from tekso.framework.run.loss_trial import Trial, TrialSums
from tekso.framework.task import LossSums

_MEAN = "It is a mean. Return the sum, without dividing it by the number of examples: "
_NUMBER = "It contains a number that does not depend on the examples"
_OTHER = "Return the sum of what each example adds, whatever the size"
WAYS = {  # {way: (cause, or "" for a sum; function of losses, weight, n and N)}
    "sum": ("", lambda x, w, n, N: tf.reduce_sum(x) * (1.0 if N else 0.0)),
    "sum of products with noise of the batch": ("", lambda x, w, n, N: tf.reduce_sum(x)),
    "sum / N": (_MEAN, lambda x, w, n, N: tf.reduce_sum(x) / N),
    "small sum / N": (_MEAN, lambda x, w, n, N: 1e-9 * tf.reduce_sum(x) / N),
    "mean * N": ("It is a mean. Return the sum ", lambda x, w, n, N: tf.reduce_mean(x) * N),
    "penalty * n / N": (_NUMBER, lambda x, w, n, N: tf.reduce_sum(x) + 0.1 * tf.norm(w) * n / N),
    "sum / root of N": (_OTHER, lambda x, w, n, N: tf.reduce_sum(x) / N**0.5),
}


class BySize(Squares):
    """Reads the number of examples of the global batch, in training or for an auxiliary loss."""

    is_auxiliary = False

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> LossSums:
        sums, way = super().loss(theta, batch, ctx), self.params.way
        if not ctx.is_training:
            return sums
        x = batch["weights"] * tf.square(tf.linalg.matvec(batch["x"], theta.w))
        n, size = float(x.shape[0]), ctx.num_examples
        if way.endswith("noise of the batch"):
            noise = ctx.uniform(self, [size], shared=True)
            x *= noise[ctx.example_offset : ctx.example_offset + x.shape[0]]
        value = WAYS[way][1](x, theta.w, n, float(size))
        if not self.is_auxiliary:
            return LossSums(value)
        ctx.collect_loss("extra", value)
        return sums


class AuxiliaryBySize(BySize):
    """Collects it as an auxiliary loss."""

    is_auxiliary = True


@pytest.mark.parametrize("way", WAYS)
def test_a_loss_may_not_depend_on_the_size_of_the_global_batch(way: str) -> None:
    if not (cause := WAYS[way][0]):
        assert len(check(way, BySize)) == len(check(way, AuxiliaryBySize)) == 1  # not used
        return
    with pytest.raises(LossError, match=rf"^BySize.loss \(.* in training\b.*: for 3 .*\. {cause}"):
        check(way, BySize)
    with pytest.raises(LossError, match=r"^the auxiliary loss 'extra' of .* is not a sum"):
        check(way, AuxiliaryBySize)


def test_the_size_of_the_global_batch_costs_only_tasks_that_read_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int | None] = []
    sums = Trial.sums

    def noted(trial: Trial, batch: Any, **settings: Any) -> TrialSums:
        sizes.append(settings.get("whole"))
        return sums(trial, batch, **settings)

    monkeypatch.setattr(Trial, "sums", noted)
    check("penalty times examples")
    assert 3 in sizes and 6 not in sizes
    check("sum of products with noise of the batch", BySize)
    assert 6 in sizes
