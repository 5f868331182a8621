"""Sizes that children take over."""

from __future__ import annotations

import pytest

from tekso.framework.params import REQUIRED
from tekso.models.layers.feed_forward import FeedForward
from tekso.models.layers.linear import Linear
from tekso.models.layers.rematerialize import Rematerialize
from tekso.models.layers.sizes import with_sizes
from tekso.models.layers.stack import Stack


def test_open_sizes_are_filled_in_a_copy() -> None:
    params = Linear.Params(output_dim=3)

    filled = with_sizes(params, input_dim=2, output_dim=3)

    assert (filled.input_dim, filled.output_dim) == (2, 3)
    assert params.input_dim is REQUIRED


def test_wrappers_hand_sizes_on() -> None:
    layer = FeedForward.Params(hidden_dim=3)
    stack = Stack.Params(num_layers=2, layers=[Rematerialize.Params(layer=layer), layer])

    filled = with_sizes(stack, input_dim=5)

    assert filled.layers[0].layer.input_dim == filled.layers[1].input_dim == 5
    assert with_sizes(Stack.Params(num_layers=1), input_dim=5).num_layers == 1


def test_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Linear.Params.input_dim is 4, .* it has 5; leave"):
        with_sizes(Linear.Params(input_dim=4), input_dim=5)
