"""Bucketing: every example once an epoch, in the right bucket, in any order of calls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tekso.framework.execution import base
from tekso.framework.experiment import Experiment
from tekso.framework.input import packing, shuffle
from tekso.framework.input.bucketing import BucketedInput, Buckets
from tekso.framework.input.errors import InputError
from tekso.framework.params import Params
from tekso.framework.run import inspection
from tekso.tasks.classification.task import Classification

KEY = shuffle.key_of(0, "buckets")
BOUNDS = [2, 5, 9]
BATCH_SIZES = [4, 3, 2]


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    """Lets the few examples of these tests be several blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "BLOCK", 7)
        yield


@given(st.lists(st.integers(1, 9), min_size=1, max_size=60), st.booleans())
def test_an_epoch_has_every_example_once_in_the_bucket_of_its_length(
    lengths: list[int], shuffled: bool
) -> None:
    buckets = Buckets(lengths, BOUNDS, BATCH_SIZES)
    seen: list[int] = []
    for number in range(buckets.num_batches):
        chosen = buckets.batch(number, key=KEY if shuffled else None)
        assert len(chosen.examples) == len(chosen.real) == BATCH_SIZES[chosen.bucket]
        shortest = BOUNDS[chosen.bucket - 1] if chosen.bucket else 0
        for example in chosen.examples.tolist():
            assert shortest < lengths[example] <= BOUNDS[chosen.bucket]
        seen += chosen.examples[chosen.real].tolist()
    assert sorted(seen) == list(range(len(lengths)))


def test_epochs_differ_and_each_is_the_same_again() -> None:
    buckets = Buckets(np.arange(60) % 9 + 1, BOUNDS, BATCH_SIZES)

    def epoch(number: int) -> list[list[int]]:
        key = shuffle.fold(KEY, number)
        return [buckets.batch(i, key=key).examples.tolist() for i in range(buckets.num_batches)]

    assert epoch(0) == epoch(0) != epoch(1)


class Rows(BucketedInput):
    """An input of a user: rows of 1 to 9 numbers, which are equal to their length."""

    lengths: tuple[int, ...] = (1, 5, 2, 9, 2)
    names: tuple[str, ...] = ("x", "weights")

    def __init__(self, params: Any, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)
        self.assign(self.lengths, BOUNDS, BATCH_SIZES)

    def bucket_rows(self, examples: Any, bound: int) -> Any:
        lengths = np.array(self.lengths)[examples]
        x = np.where(np.arange(bound) < lengths[:, None], lengths[:, None], 0)
        arrays = {"x": x, "weights": np.ones(len(examples), np.float32)}
        return {name: arrays[name] for name in self.names}


class EndedRows(Rows):
    """Rows of an evaluation of a user: two batches in any order."""

    @property
    def num_batches(self) -> int:
        return 2


def test_data_is_recognised_by_the_ends_of_its_buckets_but_a_part_by_its_batches() -> None:
    whole = Rows.Params(batch_size=1).instantiate().excerpt()
    assert [int(one["num_examples"]) for one in whole[::2]] == [3, 1, 1]
    part = EndedRows.Params(batch_size=1).instantiate()
    count, first, last = part.excerpt()
    assert count == {"num_batches": 2}
    for step, batch in enumerate((first, last)):
        assert np.array_equal(batch["x"], part.batch(step)["x"])


def test_an_own_input_is_padded_to_its_bucket_and_copies_have_weight_0() -> None:
    rows = Rows.Params(batch_size=1, order="once").instantiate()
    found = [rows.batch(step) for step in range(rows.num_batches)]
    assert [batch["x"].shape for batch in found] == [(4, 2), (3, 5), (2, 9)]
    assert [batch["weights"].sum() for batch in found] == [3, 1, 1]
    assert found[0]["x"].tolist() == [[1, 0], [2, 2], [2, 2], [2, 2]]
    assert rows.describe() == "Rows, train: 5 examples in buckets up to 2, 5, 9"


def test_the_largest_batch_is_of_the_bucket_with_most_elements_that_has_examples() -> None:
    class Short(Rows):
        lengths = (1, 2, 2)

    found = [kind.Params(batch_size=1).instantiate().largest_batch() for kind in (Rows, Short)]
    assert [batch["x"].shape for batch in found] == [(2, 9), (4, 2)]
    assert found[1]["x"].tolist() == [[1, 0], [2, 2], [2, 2], [1, 0]]

    class OfRows(Experiment):
        def task(self) -> Params:
            return Classification.Params(num_classes=2)

        def input(self) -> Params:
            return Rows.Params(batch_size=1)

    assert inspection.batch_of(OfRows().tree())["x"][0] == (2, 9)


def test_the_buckets_have_the_shares_of_an_epoch() -> None:
    rows = Rows.Params(batch_size=1).instantiate()
    found = [(share, arrays["x"][0]) for share, arrays in rows.bucket_signatures()]
    assert found == [(1 / 3, (4, 2)), (1 / 3, (3, 5)), (1 / 3, (2, 9))]
    rows.assign([1] * 9 + [7], BOUNDS, BATCH_SIZES)  # three batches of 4, and one of 2
    rows.lengths = (1,) * 9 + (7,)
    found = [(share, arrays["x"][0]) for share, arrays in rows.bucket_signatures()]
    assert found == [(0.75, (4, 2)), (0.25, (2, 9))]


def test_a_row_of_each_bucket_is_built_for_its_signature() -> None:
    built: list[int] = []

    class Counted(Rows):
        lengths = (1, 9, 2, 9)

        def bucket_rows(self, examples: Any, bound: int) -> Any:
            built.extend(examples.tolist())
            return super().bucket_rows(examples, bound)

    rows = Counted.Params(batch_size=1).instantiate()
    found = rows.bucket_signatures()
    assert built == [0, 1]
    largest = base.signature_of(rows.largest_batch())
    assert found[1] == (0.5, largest) and largest["weights"] == ((2,), np.float32)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("order", ["shuffled", "once"])
def test_the_batch_by_which_a_loss_is_checked_has_short_rows(order: str, seed: int) -> None:
    rows = Rows.Params(batch_size=1, order=order).instantiate(seed=seed)

    def shape(bounds: list[int], *lengths: int) -> tuple[int, ...]:
        rows.lengths = lengths
        rows.assign(lengths, bounds, BATCH_SIZES)
        (step,) = rows.steps_of_each_kind()
        found: tuple[int, ...] = rows.batch(step)["x"].shape
        return found

    assert shape([8, 9, 11], 1, 5, 2, 9, 2, 10) == (4, 8)
    assert shape([2, 8, 11], 1, 5, 2, 9, 2) == (3, 8)
    assert shape([2, 5, 7], 1, 5, 2, 7, 2) == (2, 7)


def test_an_input_with_batches_of_its_own_has_no_buckets() -> None:
    class Own(Rows):
        def batch(self, step: int) -> Any:
            return super().batch(0)

    rows = Own.Params(batch_size=1).instantiate()
    assert rows.bucket_signatures() == [] and rows.steps_of_each_kind() == [0]


def test_an_own_input_whose_copies_would_count_is_refused() -> None:
    class Unmarked(Rows):
        names = ("x",)

    class Full(Unmarked):
        lengths = (1, 1, 2, 2)

    with pytest.raises(InputError, match=r"Unmarked fills .* Add 'weights' .* bucket_rows\(\), as"):
        Unmarked.Params(batch_size=1).instantiate().batch(0)
    assert set(Full.Params(batch_size=1).instantiate().batch(0)) == {"x"}


def test_an_own_input_without_buckets_or_examples_is_named() -> None:
    class Unassigned(Rows):
        def __init__(self, params: Any, **kwargs: Any) -> None:
            BucketedInput.__init__(self, params, **kwargs)

    class Empty(Rows):
        lengths = ()

    with pytest.raises(InputError, match=r"Unassigned has no buckets: .* self.assign\(lengths, b"):
        Unassigned.Params(batch_size=1).instantiate().batch(0)
    with pytest.raises(InputError, match="Empty, train: there are no examples"):
        Empty.Params(batch_size=1).instantiate().batch(0)


def test_an_example_without_elements_is_not_left_out() -> None:
    with pytest.raises(ValueError, match=r"2 examples .* length below 1, the first is example 1"):
        Buckets([3, 0, 2, 0], [5], [1])


@pytest.mark.parametrize(
    ("bounds", "sizes", "text"),
    [
        ([5, 2], [1, 1], "ascend"),
        ([], [], "ascend"),
        ([2, 9], [1], "2 batch sizes"),
        ([2, 9], [1, 0], "2 batch sizes"),
        (
            [2, 5],
            [1, 1],
            r"^2 of the 3 examples are longer than the last bucket, 5; the first is example 1, of "
            r"length 7\. Set the last bound to the longest, 8, or leave out",
        ),
    ],
)
def test_buckets_that_make_no_sense_are_refused(
    bounds: list[int], sizes: list[int], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        Buckets([1, 7, 8], bounds, sizes)


def test_a_resumed_run_refuses_other_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> None:
        Rows.Params(batch_size=2).instantiate(assets_dir=str(tmp_path)).check_unchanged()

    check()
    check()
    rows = Rows.bucket_rows

    def changed(self: Any, examples: Any, bound: int) -> Any:
        batch = rows(self, examples, bound)
        return {**batch, "x": batch["x"] + (bound == 9)}

    monkeypatch.setattr(Rows, "bucket_rows", changed)
    with pytest.raises(InputError, match=r"^Rows\.bucket_rows \(.*\) returns different examples"):
        check()


class RandomRows(Rows):
    """Adds other random numbers in each call."""

    def bucket_rows(self, examples: Any, bound: int) -> Any:
        batch = super().bucket_rows(examples, bound)
        return {**batch, "x": batch["x"] + np.random.default_rng().normal(size=batch["x"].shape)}


def test_the_advice_for_random_rows_has_no_epoch(tmp_path: Path) -> None:
    rows = RandomRows.Params(batch_size=2).instantiate(assets_dir=str(tmp_path))
    with pytest.raises(InputError, match=r"default_rng\(\[self\.seed, index\]\).*ctx\.uniform$"):
        rows.check_unchanged()


class Unpadded(Rows):
    """Returns the rows as they are."""

    def bucket_rows(self, examples: Any, bound: int) -> Any:
        rows = [[1] * self.lengths[example] for example in examples]
        return {**super().bucket_rows(examples, bound), "x": rows}


def test_rows_that_are_not_padded_are_named_with_the_array_and_the_method(tmp_path: Path) -> None:
    rows = Unpadded.Params(batch_size=2).instantiate(assets_dir=str(tmp_path))
    said = (
        r"^Unpadded.bucket_rows \(.*_test.py:\d+\): 'x' has rows of different lengths: pad them to "
    )
    with pytest.raises(InputError, match=said + "one length, the argument bound$"):
        rows.check_unchanged()


def test_an_error_of_bucket_rows_has_the_index_of_the_example() -> None:
    class Broken(BucketedInput):
        """Example 2 cannot be built."""

        def __init__(self, params: Any, **kwargs: Any) -> None:
            super().__init__(params, **kwargs)
            self.assign([3, 3, 3], [4], [3])

        def bucket_rows(self, examples: Any, bound: int) -> dict[str, Any]:
            if 2 in examples:
                raise OSError("truncated")
            return {"x": np.zeros([len(examples), bound])}

    with pytest.raises(OSError, match="truncated") as error:
        Broken.Params(batch_size=3, order="sequential").instantiate().batch(0)
    assert error.value.__notes__ == ["while building index 2 of the data, by Broken.bucket_rows"]
