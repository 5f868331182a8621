"""An experiment with it: one of Tekso's, with another layer."""

from __future__ import annotations

from my_research.layers import BlendedFeedForward
from tekso.framework.params import Params
from tekso.framework.registry import register
from tekso.params.lm.python_source import Tiny


@register
class Blended(Tiny):
    """`lm.python_source.Tiny` with units that learn how they are activated."""

    def task(self) -> Params:
        """Only the feed-forward layer is another."""
        feed_forward = BlendedFeedForward.Params(hidden_dim=512)
        return super().task().set({"model.stack.layer.feed_forward": feed_forward})
