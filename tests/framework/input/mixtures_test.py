"""Mixtures: shares, positions without gaps, purity."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tekso.framework.input.arrays import Arrays
from tekso.framework.input.errors import InputError
from tekso.framework.input.input import Batch, ExampleInput
from tekso.framework.input.mixtures import Interleaving, Mixture, floor_sum
from tekso.framework.params import param

WEIGHTS = st.lists(st.floats(0.01, 10.0), min_size=1, max_size=5)


class Numbers(ExampleInput):
    """Example i is the number first + i."""

    class Params(ExampleInput.Params):
        first: int = param("The first number.", default=0)
        count: int = param("How many.", default=7)
        width: int = param("How often each stands in its example.", default=2)

    @property
    def num_examples(self) -> int:
        count: int = self.params.count
        return count

    def examples(self, index: npt.NDArray[np.int64], epoch: npt.NDArray[np.int64]) -> Batch:
        return {"x": np.repeat((self.params.first + index)[:, None], self.params.width, axis=1)}


def mixture(**kwargs: Any) -> Any:
    parts = [
        Numbers.Params(batch_size=1, first=0, count=7),
        Numbers.Params(batch_size=1, first=100, count=3),
    ]
    return Mixture.Params(batch_size=5, inputs=parts, **kwargs)


@given(st.integers(0, 40), st.integers(1, 30), st.integers(0, 90), st.integers(0, 90))
def test_floor_sum_is_the_sum_of_floors(n: int, m: int, a: int, b: int) -> None:
    assert floor_sum(n, m, a, b) == sum((a * i + b) // m for i in range(n))


@given(WEIGHTS, st.integers(0, 500), st.integers(1, 50), st.integers(0, 2**64 - 1))
def test_positions_of_a_part_count_up_without_gaps_wherever_one_begins(
    weights: list[float], begin: int, size: int, seed: int
) -> None:
    choice = Interleaving(weights, seed=seed)
    part, position = choice.places(0, begin + size)
    for number in range(len(weights)):
        assert position[part == number].tolist() == list(range(int((part == number).sum())))
    later_part, later_position = choice.places(begin, size)
    np.testing.assert_array_equal(later_part, part[begin:])
    np.testing.assert_array_equal(later_position, position[begin:])


@given(WEIGHTS, st.integers(1, 10**12), st.integers(0, 2**64 - 1))
def test_shares_are_exact_up_to_a_few_examples_at_any_length(
    weights: list[float], length: int, seed: int
) -> None:
    counts = Interleaving(weights, seed=seed).counts(length)
    assert sum(counts) == length
    # A rotation by the golden ratio is off by less than 3 + log(length); 2**-32 is the rounding of
    # an end of an interval.
    off = 2 * (3 + np.log(length)) + length * 2.0**-31
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - length * weight / sum(weights)) <= off


def test_a_mixture_takes_each_part_in_its_own_order_once_an_epoch() -> None:
    one = mixture(weights=[7.0, 3.0]).instantiate(seed=3)
    taken = np.concatenate([one.batch(step)["x"][:, 0] for step in range(40)])
    small, large = taken[taken < 100], taken[taken >= 100]
    assert abs(len(small) - 140) <= 4
    for numbers, count in ((small, 7), (large, 3)):
        for begin in range(0, len(numbers) - count, count):
            assert len(set(numbers[begin : begin + count].tolist())) == count


def test_the_batch_of_a_step_is_the_same_in_any_order_of_calls() -> None:
    first = mixture().instantiate(seed=3)
    again = mixture().instantiate(seed=3)
    forward = [first.batch(step)["x"] for step in range(6)]
    backward = [again.batch(step)["x"] for step in reversed(range(6))]
    np.testing.assert_array_equal(forward, backward[::-1])


def test_another_seed_mixes_otherwise() -> None:
    one, two = mixture().instantiate(seed=3), mixture().instantiate(seed=4)
    assert any((one.batch(s)["x"] != two.batch(s)["x"]).any() for s in range(3))


def test_equal_parts_of_a_mixture_have_orders_of_their_own() -> None:
    parts = [Numbers.Params(batch_size=4, count=50) for _ in range(2)]
    one = Mixture.Params(batch_size=4, inputs=parts).instantiate(seed=3)
    first, second = (part.batch(0)["x"].tolist() for part in one._inputs)
    assert first != second


@pytest.mark.parametrize("weights", [[1.0], [1.0, -1.0], [0.0, 1.0], [1.0, float("nan")]])
def test_weights_that_make_no_sense_are_refused(weights: list[float]) -> None:
    with pytest.raises(InputError, match="weights"):
        mixture(weights=weights).instantiate()


def test_a_finite_part_is_refused() -> None:
    parts = [Numbers.Params(batch_size=4, order="once")]
    with pytest.raises(InputError, match=r"inputs\.0.*endless"):
        Mixture.Params(batch_size=4, inputs=parts).instantiate()


class Given(Arrays):
    """Two examples of an array."""

    class Params(Arrays.Params):
        """Params of Given."""

        name: str = param("Name of the array.", default="x")
        dtype: str = param("Of its values.", default="float32")

    def load(self, split: str) -> dict[str, np.ndarray]:
        """Returns it."""
        return {self.params.name: np.array([[0.1], [0.2]], self.params.dtype)}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Numbers.Params(batch_size=4, width=3), r"'x' \[3\] int64; inputs.0 has 'x' \[2\] int64"),
        (
            Given.Params(batch_size=4),
            r"inputs.1 \(Given\) has different arrays than inputs.0 \(Numb",
        ),
    ],
)
def test_parts_of_unequal_examples_are_refused(other: Any, message: str) -> None:
    parts = [Numbers.Params(batch_size=4, width=2), other]
    with pytest.raises(InputError, match=message):
        Mixture.Params(batch_size=4, inputs=parts).instantiate()


@pytest.mark.parametrize("change", [{"name": "y"}, {"dtype": "uint8"}])
def test_arrays_of_other_names_or_dtypes_are_refused_rather_than_cast(change: Any) -> None:
    parts = [Given.Params(batch_size=4, **change), Given.Params(batch_size=4)]
    with pytest.raises(InputError, match=r"must be the same in all inputs of a mixture"):
        Mixture.Params(batch_size=4, inputs=parts).instantiate()
    one = Mixture.Params(batch_size=4, inputs=parts[1:]).instantiate()
    assert one.form() == {"x": ((1,), np.float32), "weights": ((), np.float32)}
