"""Routers of a mixture of experts: assign elements to slots of experts.

    elements of an example   t0 t1 t2 t3 t4 t5      chosen experts: 1 0 1 1 2 0
    slots of expert 0        t1 t5                  (capacity 2)
    slots of expert 1        t0 t2                  t3 exceeds the capacity and is dropped
    slots of expert 2        t4 ──                  an empty slot does not affect the output

Every example is a separate group: slots and load-balancing losses do not depend on the other
examples of the batch, and therefore not on how the batch is divided. Slots are assigned in the
order of the elements, all first choices before all second choices.

Legend: B batch, T length, D model dim, E experts, C slots of an expert in an example (capacity).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import tensorflow as tf

from tekso.framework import ops
from tekso.framework.context import StepContext
from tekso.framework.initializers import GlorotUniform, Initializer
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.primitives.precision import widen
from tekso.framework.theta import Theta


@dataclasses.dataclass(frozen=True)
class Routing:
    """Assignment of the elements of a batch to slots.

    Attributes:
      dispatch: [B, T, E, C], 1 where an element has a slot, else 0; constant (no gradient).
      weights: [E, B, C], weight of a slot's output in the output of its element; float32.
    """

    dispatch: tf.Tensor
    weights: tf.Tensor


@dataclasses.dataclass(frozen=True)
class ExpertChoice:
    """One choice (first, second, …) of an expert for every element.

    Attributes:
      mask: [B, T, E], 1 for the expert, else 0; all 0 for an element without an expert.
      weight: [B, T], weight of the expert's output.
    """

    mask: tf.Tensor
    weight: tf.Tensor


class Router(Layer):
    """Base of the routers: softmax(x @ w) over the experts, in float32.

    Shapes:
      x: [B, T, D]
      is_token: bool [B, T]; False for padding, which is routed to no expert
      returns: Routing, with dispatch [B, T, E, C] and weights [E, B, C]
    Weights:
      w: [input_dim, num_experts] float32, dims ("embed", None)
    Collects:
      losses (in training) "experts/balance": num_experts * sum_e f_e P_e, with f_e the share of an
        example's elements whose first choice is e, P_e the mean probability of e; 1 if the load is
        even. "experts/z": mean of logsumexp(logits)**2
      metrics "experts/dropped": share of the choices without a slot
        "experts/imbalance": choices of the busiest expert, divided by the mean over experts
    Source:
      Fedus et al. 2021, eqs. 4 to 6 (balance); Zoph et al. 2022, eq. 5 (z).
    """

    class Params(Layer.Params):
        """Params of a router."""

        input_dim: int = param("Size of the last dim of the input.", default=REQUIRED)
        num_experts: int = param("Number of experts.", default=REQUIRED)
        capacity_factor: float = param(
            "Slots of an expert in training, as a multiple of an even share of the choices.",
            default=1.25,
        )
        eval_capacity_factor: float | None = param(
            "The same outside training; None: enough slots to drop nothing.", default=2.0
        )
        balance_weight: float = param("Factor on the load-balancing loss.", default=0.01)
        z_weight: float = param("Factor on the z-loss.", default=0.0)
        jitter: float = param(
            "In training, inputs are multiplied by random numbers in 1 - jitter … 1 + jitter.",
            default=0.0,
        )
        init: Initializer.Params = param("Initializer of w.", default=GlorotUniform.Params())

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        self._require("capacity_factor", p.capacity_factor > 0, "greater than 0")
        factor = p.eval_capacity_factor
        self._require("eval_capacity_factor", factor is None or factor > 0, "None, or more than 0")
        self._require("balance_weight", p.balance_weight >= 0, "0 or more")
        self._require("z_weight", p.z_weight >= 0, "0 or more")
        self._require("jitter", 0 <= p.jitter < 1, "in [0, 1)")
        self.weight(
            "w", [p.input_dim, p.num_experts], dims=("embed", None), init=p.init, dtype="float32"
        )

    def _require(self, field: str, holds: bool, allowed: str) -> None:
        if not holds:
            given = getattr(self.params, field)
            raise ValueError(f"{type(self).__name__}: {field} is {given!r}, must be {allowed}")

    @property
    def num_choices(self) -> int:
        """Number of experts per element."""
        raise NotImplementedError(f"{type(self).__name__} has no num_choices")

    def choose(self, probs: tf.Tensor, ctx: StepContext) -> list[ExpertChoice]:
        """Returns the choices of every element: the first, the second, ….

        Shapes:
          probs: [B, T, E] float32
        """
        raise NotImplementedError(f"{type(self).__name__} has no choose()")

    def capacity(self, length: int, *, training: bool) -> int:
        """Returns the slots of an expert in an example: at least 1, at most one per element."""
        p = self.params
        factor = p.capacity_factor if training else p.eval_capacity_factor
        if factor is None:
            return length
        share = factor * self.num_choices * length / p.num_experts
        found: int = min(length, max(1, math.ceil(share - 1e-6)))
        return found

    def fprop(
        self, theta: Theta, x: tf.Tensor, ctx: StepContext, *, is_token: tf.Tensor | None = None
    ) -> Routing:
        """See the class."""
        p = self.params
        logits = ops.project(ctx, self._jittered(widen(x), ctx), widen(theta.w))
        # Slots are counted along the length, so the length must not be sharded.
        logits = ctx.constrain(logits, ("batch", None, None))
        probs = tf.nn.softmax(logits)
        there = 1.0 if is_token is None else tf.expand_dims(tf.cast(is_token, probs.dtype), -1)
        choices = [
            ExpertChoice(ctx.constrain(there * choice.mask, ("batch", None, None)), choice.weight)
            for choice in self.choose(probs, ctx)
        ]
        if ctx.is_training:
            self._collect_losses(logits, probs, choices[0].mask, ctx)
        routing = _slots(choices, self.capacity(x.shape[1], training=ctx.is_training), ctx)
        if ctx.mode != "decode":
            _collect_metrics(choices, routing.dispatch, p.num_experts, ctx)
        return routing

    def _jittered(self, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        size = self.params.jitter
        if not ctx.is_training or size == 0.0:
            return x
        uniform = ctx.uniform(self, x.shape.as_list(), "jitter")
        return x * (1.0 - size + 2.0 * size * tf.cast(uniform, x.dtype))

    def _collect_losses(
        self, logits: tf.Tensor, probs: tf.Tensor, first: tf.Tensor, ctx: StepContext
    ) -> None:
        p = self.params
        there_BT = tf.reduce_sum(first, -1)  # every token has a first choice, padding has none
        count_B = _at_least_one(tf.reduce_sum(there_BT, -1))
        if p.balance_weight:
            share_BE = tf.reduce_sum(first, 1)
            mean_BE = tf.reduce_sum(probs * tf.expand_dims(there_BT, -1), 1)
            loss_B = p.num_experts * tf.reduce_sum(share_BE * mean_BE, -1) / tf.square(count_B)
            ctx.collect_loss("experts/balance", p.balance_weight * tf.reduce_sum(loss_B))
        if p.z_weight:
            squares_BT = tf.square(tf.reduce_logsumexp(logits, -1))
            loss_B = tf.reduce_sum(squares_BT * there_BT, -1) / count_B
            ctx.collect_loss("experts/z", p.z_weight * tf.reduce_sum(loss_B))


class SwitchRouter(Router):
    """Routes every element to its most probable expert, weighted by the probability.

    Elements do not depend on later elements of a text, not even through the capacity.

    Shapes:
      x: [B, T, D], is_token: bool [B, T]
      returns: Routing, as in Router: dispatch [B, T, E, C], weights [E, B, C]
    Source: Fedus et al. 2021, "Switch Transformers", eqs. 1 and 2.
    """

    class Params(Router.Params):
        """Params of SwitchRouter."""

    @property
    def num_choices(self) -> int:
        """See `Router`."""
        return 1

    def choose(self, probs: tf.Tensor, ctx: StepContext) -> list[ExpertChoice]:
        """See `Router`."""
        mask = _most_probable(probs)
        return [ExpertChoice(mask, tf.reduce_sum(probs * mask, -1))]


class TopKRouter(Router):
    """Routes every element to its most probable experts, weighted by renormalised probabilities.

    An element's second choice gets a slot only if the first choices of the whole example, including
    later elements, leave one. If no element may depend on later ones even in this way, set
    capacity_factor to num_experts / num_choices, or use SwitchRouter.

    Shapes:
      x: [B, T, D], is_token: bool [B, T]
      returns: Routing, as in Router: dispatch [B, T, E, C], weights [E, B, C]
    Source: Lepikhin et al. 2020, "GShard", section 2.2 and algorithm 1.
    """

    class Params(Router.Params):
        """Params of TopKRouter."""

        num_choices: int = param("Number of experts per element.", default=2)
        later_choices: Literal["all", "random"] = param(
            "In training, whether an element uses all its choices, or the second, third, … only "
            "with probability num_choices times its weight.",
            default="all",
        )

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        allowed = f"in 1 … {p.num_experts}, the number of experts"
        self._require("num_choices", 1 <= p.num_choices <= p.num_experts, allowed)

    @property
    def num_choices(self) -> int:
        """See `Router`."""
        return int(self.params.num_choices)

    def choose(self, probs: tf.Tensor, ctx: StepContext) -> list[ExpertChoice]:
        """See `Router`."""
        p = self.params
        masks, left = [], probs
        for _ in range(p.num_choices):
            masks.append(_most_probable(left))
            left = tf.where(masks[-1] > 0, -tf.ones_like(left), left)
        chosen = [tf.reduce_sum(probs * mask, -1) for mask in masks]
        total = tf.add_n(chosen)
        weights = [weight / total for weight in chosen]
        if p.later_choices == "random" and ctx.is_training:
            shape = probs.shape.as_list()[:2]
            for i in range(1, p.num_choices):
                uniform = tf.cast(ctx.uniform(self, shape, f"choice_{i}"), probs.dtype)
                taken = tf.cast(uniform < p.num_choices * weights[i], probs.dtype)
                masks[i] *= tf.expand_dims(taken, -1)
        return [ExpertChoice(mask, weight) for mask, weight in zip(masks, weights, strict=True)]


def _most_probable(probs: tf.Tensor) -> tf.Tensor:
    """Returns the one-hot argmax over the last dim, the first of equal values; no gradient."""
    return tf.one_hot(tf.argmax(probs, -1), probs.shape[-1], dtype=probs.dtype)


def _slots(choices: list[ExpertChoice], capacity: int, ctx: StepContext) -> Routing:
    """Assigns slots in the order of elements, all first choices before all second choices."""
    taken_B1E: Any = 0.0
    parts, weights = [], []
    for choice in choices:
        mask = tf.stop_gradient(choice.mask)
        position_BTE = tf.cumsum(mask, 1, exclusive=True) + taken_B1E
        position_BT = tf.cast(tf.reduce_sum(position_BTE * mask, -1), tf.int32)
        slot_BTC = tf.one_hot(position_BT, capacity, dtype=mask.dtype)  # 0 from `capacity` on
        parts.append(tf.expand_dims(mask, -1) * tf.expand_dims(slot_BTC, 2))
        weights.append(mask * tf.expand_dims(choice.weight, -1))
        taken_B1E += tf.reduce_sum(mask, 1, keepdims=True)
    dispatch = ctx.constrain(tf.add_n(parts), ("batch", "length", "token_experts", None))
    weights_EBC = tf.einsum("btec,bte->ebc", dispatch, tf.add_n(weights))
    return Routing(dispatch, ctx.constrain(weights_EBC, ("token_experts", "batch", None)))


def _collect_metrics(
    choices: list[ExpertChoice], dispatch: tf.Tensor, num_experts: int, ctx: StepContext
) -> None:
    load_BE = tf.reduce_sum(tf.add_n([choice.mask for choice in choices]), 1)
    total_B = tf.reduce_sum(load_BE, -1)
    total = tf.reduce_sum(total_B)
    ctx.collect_metric("experts/dropped", total - tf.reduce_sum(dispatch), total)
    busiest_B = num_experts * tf.reduce_max(load_BE, -1) / _at_least_one(total_B)
    not_empty = tf.reduce_sum(tf.cast(total_B > 0, total_B.dtype))
    ctx.collect_metric("experts/imbalance", tf.reduce_sum(busiest_B), not_empty)


def _at_least_one(count: tf.Tensor) -> tf.Tensor:
    return tf.maximum(count, tf.ones_like(count))
