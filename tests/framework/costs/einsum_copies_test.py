"""Tests of the copies of an Einsum: which tensors, and what they cost in time and memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import tensorflow as tf
from priced_graphs import graph

from tekso.framework.costs import graph_memory, graph_time, this_machine
from tekso.framework.costs.einsum_copies import Copy, copies
from tests.framework.costs.graph_time_test import SPEED

_SIZES = {"b": 2, "t": 3, "s": 5, "g": 7, "h": 11, "r": 13, "e": 17, "d": 19}


def _graph(equation: str) -> Any:
    shapes = [[_SIZES[x] for x in term] for term in equation.partition("->")[0].split(",")]
    return graph(lambda *given: tf.raw_ops.Einsum(inputs=given, equation=equation), *shapes)


def _op(equation: str) -> Any:
    (op,) = [op for op in _graph(equation).get_operations() if op.type == "Einsum"]
    return op


def _copy(letters: str, of: int | None, *, turns: bool) -> Copy:
    size = 4.0
    for letter in letters:
        size *= _SIZES[letter]
    return Copy(size, turns, of)


@pytest.mark.parametrize(
    ("equation", "expected"),
    [
        ("btd,de->bte", []),
        ("btd,bte->de", []),  # reads the first one as its transpose
        ("bte,de->btd", []),
        ("ebtd,edh->ebth", []),  # experts
        ("ebtd,ebth->edh", []),
        # Heads move before rows; the last dim stays.
        ("btgh,bsgh->bgts", [_copy("btgh", 0, turns=False), _copy("bsgh", 1, turns=False)]),
        (
            "btgh,bsgh->btgs",
            [
                *(_copy("btgh", 0, turns=False), _copy("bsgh", 1, turns=False)),
                _copy("btgs", None, turns=False),
            ],
        ),
        # The values have the summed dim last.
        ("bgts,bsgh->btgh", [_copy("bsgh", 1, turns=True), _copy("btgh", None, turns=False)]),
        (
            "btgrh,bgrts->bsgh",
            [
                *(_copy("btgrh", 0, turns=True), _copy("bgrts", 1, turns=True)),
                _copy("bsgh", None, turns=True),
            ],
        ),
        ("td,de->et", [_copy("et", None, turns=True)]),
        ("td->dt", [_copy("td", None, turns=True)]),
        ("td->td", []),
    ],
)
def test_an_einsum_copies_what_has_another_order_than_its_product(
    equation: str, expected: list[Copy]
) -> None:
    assert copies(_op(equation)) == expected


def test_copies_take_time_by_whether_another_dim_comes_last() -> None:
    equation = "bgts,bsgh->btgh"
    turned, moved = (_copy(letters, 0, turns=False).bytes for letters in ("bsgh", "btgh"))
    alone = graph_time.seconds(_graph(equation), SPEED)
    slow = dataclasses.replace(SPEED, turned_streams=[(1.0, 10.0)], copy_streams=[(1.0, 100.0)])
    found = graph_time.seconds(_graph(equation), slow)
    assert found - alone == pytest.approx(2 * turned / 10.0 + 2 * moved / 100.0)


def test_a_copy_is_near_and_what_is_copied_as_far_as_its_other_use() -> None:
    op = _op("bgts,bsgh->btgh")
    turned, moved = (_copy(letters, 0, turns=False).bytes for letters in ("bsgh", "btgh"))
    speed = dataclasses.replace(
        SPEED,
        turned_streams=[(2 * turned, 10.0), (2 * turned + 1, 1.0)],
        copy_streams=[(2 * moved, 10.0), (2 * moved + 1, 1.0)],
    )

    far = [(3.0, 7.0), (turned, 9e9), (moved, 8e9)]
    seconds, of_product = graph_time._copying(op, speed, far)
    assert seconds == pytest.approx((turned + moved) * (1 / 10.0 + 1 / 1.0))
    near = [(3.0, 7.0), (turned, 2 * turned), (moved, 2 * moved)]
    assert of_product == near

    seconds, of_product = graph_time._copying(op, speed, near)
    assert seconds == pytest.approx((turned + moved) * 2 / 10.0)
    assert of_product == near


def test_copies_are_held_beside_the_inputs_and_the_output() -> None:
    equation = "btgh,bsgh->btgs"
    copied = [_copy(letters, 0, turns=False).bytes for letters in ("btgh", "bsgh", "btgs")]
    made = copied[-1]
    assert graph_memory.peak_bytes(_graph(equation)) == sum(copied) + made


@pytest.mark.parametrize(
    ("function", "elements", "rate"),
    [
        (lambda x: x[:, :7], 5 * 7, "slice_gradients"),
        (
            lambda x: tf.nn.sparse_softmax_cross_entropy_with_logits([0, 1, 2, 3, 4], x),
            5 * 11,
            "cross_entropies_per_s",
        ),
    ],
)
def test_slow_kernels_have_rates_of_their_own(function: Any, elements: int, rate: str) -> None:
    def gradient(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        return tape.gradient(y, x, y)

    speed: dict[str, Any] = {rate: elements / 8.0}
    if rate in this_machine.POINTS:
        speed = {rate: [(1.0, elements / 8.0)]}
    made = graph(gradient, [5, 11])
    found = graph_time.seconds(made, dataclasses.replace(SPEED, **speed))
    assert found - graph_time.seconds(made, SPEED) == pytest.approx(8.0)
