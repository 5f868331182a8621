"""Batches by step: purity, coverage of epochs, filling up; HeldOut; texts in memory; skips."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tekso.framework.input.errors import InputError
from tekso.framework.input.held_out import HeldOut
from tekso.framework.input.input import Batch, ExampleInput
from tekso.framework.input.skips import Origin, Skips
from tekso.framework.input.sources import InMemory
from tekso.framework.params import Params, param


class Numbers(ExampleInput):
    """Example i is the number i, of dev 1000 more."""

    class Params(ExampleInput.Params):
        count: int = param("How many.", default=7)

    @property
    def num_examples(self) -> int:
        count: int = self.params.count
        return count

    def examples(self, index: npt.NDArray[np.int64], epoch: npt.NDArray[np.int64]) -> Batch:
        first = 1000 if self.params.split == "dev" else 0
        return {"x": index + first, "weights": np.ones(len(index), np.float32)}


def taken(one: Any, steps: int) -> list[int]:
    return [int(x) for step in range(steps) for x in one.batch(step)["x"]]


@given(st.integers(1, 9), st.integers(1, 30), st.integers(0, 2**64 - 1))
def test_every_epoch_has_every_example_once(batch_size: int, count: int, seed: int) -> None:
    one = Numbers.Params(batch_size=batch_size, count=count).instantiate(seed=seed)
    numbers = taken(one, -(-3 * count // batch_size))
    for epoch in range(3):
        of_epoch = numbers[epoch * count : (epoch + 1) * count]
        assert sorted(of_epoch) == list(range(count))


def test_an_input_of_a_user_is_described_by_its_class_split_and_size() -> None:
    assert Numbers.Params(batch_size=2).instantiate().describe() == "Numbers, train: 7 examples"


def test_epochs_and_seeds_differ() -> None:
    params = Numbers.Params(batch_size=20, count=20)
    one, other = params.instantiate(seed=1), params.instantiate(seed=2)
    assert taken(one, 1) != one.batch(1)["x"].tolist()
    assert taken(one, 1) != taken(other, 1)


@given(st.lists(st.integers(0, 2**40), max_size=8))
def test_a_batch_depends_on_data_seed_and_step_alone(steps: list[int]) -> None:
    params = Numbers.Params(batch_size=3, count=11)
    used, fresh = params.instantiate(seed=5), params.instantiate(seed=5)
    first = [used.batch(step)["x"].tolist() for step in steps]
    assert [fresh.batch(step)["x"].tolist() for step in reversed(steps)] == first[::-1]


class Ended(Numbers):
    """Numbers of an evaluation of a user: two batches in any order."""

    @property
    def num_batches(self) -> int:
        return 2


def test_data_is_recognised_by_its_ends_but_a_part_of_it_by_its_batches() -> None:
    for batch_size, order in ((2, "shuffled"), (3, "once")):
        whole = Numbers.Params(batch_size=batch_size, order=order).instantiate().excerpt()
        assert [whole[0]["num_examples"], *whole[1]["x"]] == [7, 0, 6]
    part = Ended.Params(batch_size=3).instantiate(seed=1)
    count, first, last = part.excerpt()
    assert (count, [*first["x"], *last["x"]]) == ({"num_batches": 2}, taken(part, 2))


def test_the_same_examples_come_whatever_the_batch_size() -> None:
    small = Numbers.Params(batch_size=2, count=11).instantiate(seed=5)
    large = Numbers.Params(batch_size=10, count=11).instantiate(seed=5)
    assert taken(small, 10) == taken(large, 2)


def test_sequential_goes_round_in_the_order_of_the_data() -> None:
    one = Numbers.Params(batch_size=3, count=5, order="sequential").instantiate()
    assert taken(one, 4) == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    assert one.num_batches is None


def test_one_pass_is_filled_up_with_weight_0() -> None:
    one = Numbers.Params(batch_size=3, count=5, order="once").instantiate()
    assert one.num_batches == 2
    last = one.batch(1)
    assert last["x"].shape == (3,)
    assert last["weights"].tolist() == [1, 1, 0]
    with pytest.raises(IndexError, match="one pass has 2 batches"):
        one.batch(2)


def test_a_negative_step_and_an_empty_batch_are_refused() -> None:
    with pytest.raises(IndexError, match="step -1"):
        Numbers.Params(batch_size=3).instantiate().batch(-1)
    with pytest.raises(ValueError, match="batch_size is 0"):
        Numbers.Params(batch_size=0).instantiate()


def held_out(**kwargs: Any) -> Any:
    train = Numbers.Params(batch_size=3, count=10)
    return HeldOut.Params(**kwargs).instantiate(seed=1, train=train)


def test_held_out_takes_the_settings_of_training_and_another_split() -> None:
    one = held_out()
    assert one.num_batches == 4
    assert taken(one, 3) == list(range(1000, 1009))
    assert one.batch(3)["weights"].tolist() == [1, 0, 0]


def test_held_out_settings_of_its_own_come_first() -> None:
    one = held_out(batch_size=5, changes={"count": 12})
    assert one.num_batches == 3
    assert taken(one, 1) == list(range(1000, 1005))


def test_max_batches_are_spread_evenly() -> None:
    one = held_out(batch_size=1, max_batches=4)
    assert taken(one, 4) == [1000, 1002, 1005, 1007]
    with pytest.raises(IndexError, match="4 batches"):
        one.batch(4)
    assert held_out(max_batches=100).num_batches == 4


def test_held_out_says_what_it_lacks() -> None:
    with pytest.raises(ValueError, match="pass its Params"):
        HeldOut.Params().instantiate()
    with pytest.raises(ValueError, match="max_batches is 0"):
        held_out(max_batches=0)


def test_texts_in_memory_have_splits() -> None:
    params = InMemory.Params(train=["a", "b"], dev=["c"])
    assert [params.instantiate()[i] for i in range(2)] == ["a", "b"]
    assert params.instantiate(split="dev")[0] == "c"
    with pytest.raises(InputError, match="the split test has no texts"):
        params.instantiate(split="test")


class Ids(InMemory):
    """Arrays of ids, as many as `size`, without a split test."""

    class Params(InMemory.Params):
        """Params of Ids."""

        size: int = param("Number of arrays.", default=2)

    def load(self, split: str) -> list[np.ndarray]:
        """Returns arrays with one id each."""
        return [] if split == "test" else [np.array([number]) for number in range(self.params.size)]


def test_texts_in_memory_can_come_from_a_method() -> None:
    one = Params.from_text(Ids.Params().to_text()).instantiate()
    assert len(one) == 2 and one[1].tolist() == [1]
    assert one.fingerprint() != Ids.Params(size=3).instantiate().fingerprint()
    with pytest.raises(InputError, match="the split test has no texts"):
        one.params.instantiate(split="test")


def test_a_text_of_params_from_when_load_was_a_field_is_read() -> None:
    params = InMemory.Params(train=["a"])
    assert Params.from_text(params.to_text() + "load : None\n") == params
    with pytest.raises(AttributeError, match=r"override the method load\(\) in a subclass"):
        params.set({"load": None})


def test_skips_are_counted_once_and_listed_up_to_a_number() -> None:
    skips = Skips(20, what="texts")
    for number in [*range(7), *range(7)]:
        skips.add(Origin("a.txt", number), "broken")
    assert skips.report.count == 7
    text = str(skips.report)
    assert text.startswith("7 skipped\n  a.txt, byte 0: broken\n") and text.endswith("and 2 more")


def test_one_more_than_the_limit_is_an_error() -> None:
    skips = Skips(1, what="texts")
    skips.add(Origin("a.txt"), "broken")
    with pytest.raises(InputError, match=r"max_skipped=1 (?s:.)*b\.txt, byte 3: torn"):
        skips.add(Origin("b.txt", 3), "torn")


class Changing(Numbers):
    """Its examples may be different ones in the next process."""

    class Params(Numbers.Params):
        """Params of Changing."""

    added, is_random = np.zeros(7), False

    def examples(self, index: npt.NDArray[np.int64], epoch: npt.NDArray[np.int64]) -> Batch:
        """See Numbers."""
        batch = super().examples(index, epoch)
        batch["x"] = batch["x"] + self.added[index % 7]
        if self.is_random:
            batch["x"] = batch["x"] + np.random.default_rng().normal(size=len(index))
        return batch


def check(folder: Path, seed: int = 0, **params: Any) -> None:
    given = {"seed": seed, "assets_dir": str(folder)}
    Changing.Params(**{"batch_size": 2, **params}).instantiate(**given).check_unchanged()


@pytest.mark.parametrize("changed", [0, 2, 6])
def test_a_resumed_run_refuses_other_examples(
    changed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(tmp_path)
    for same in ({}, {"batch_size": 5}):
        check(tmp_path, **same)
    for other in ({"seed": 1}, {"split": "dev"}, {"count": 8}, {"order": "once"}):
        check(tmp_path, **other)  # other Params, other data
    assert len(list(tmp_path.iterdir())) == 5
    monkeypatch.setattr(Changing, "added", np.arange(7) == changed)
    said = (
        r"^Changing\.examples \(.*input_test\.py:\d+\) returns different examples than before in "
        r"this logdir: Changing, train: 7 examples, with different values .* use a new --logdir"
    )
    with pytest.raises(InputError, match=said) as error:
        check(tmp_path)
    path = str(error.value).partition("Removing ")[2].partition(" accepts the new examples")[0]
    Path(path).unlink()
    check(tmp_path)


def test_a_resumed_run_refuses_another_number_of_examples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(tmp_path)
    monkeypatch.setattr(Changing, "num_examples", 9)
    with pytest.raises(InputError, match=r"then Changing, train: 7 .*; now Changing, train: 9 ex"):
        check(tmp_path)


def test_examples_that_are_random_in_each_call_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Changing, "is_random", True)
    said = r"Changing\.examples \(.*\) returns different arrays in each call .*\[self\.seed, epoch,"
    with pytest.raises(InputError, match=said):
        check(tmp_path)
    Changing.Params(batch_size=2).instantiate().check_unchanged()  # outside of a run


def test_held_out_examples_are_checked_and_own_batches_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check_held_out() -> None:
        train = Changing.Params(batch_size=2)
        HeldOut.Params().instantiate(train=train, assets_dir=str(tmp_path)).check_unchanged()

    check_held_out()
    monkeypatch.setattr(Changing, "added", np.ones(7))
    with pytest.raises(InputError, match="different examples than before"):
        check_held_out()
    monkeypatch.setattr(Changing, "batch", lambda self, step: {})
    check_held_out()


class Folder(ExampleInput):
    """Examples of a folder that cannot be built in some ways."""

    class Params(ExampleInput.Params):
        folder: str = param("Where.", default="pictures")
        count: int = param("How many.", default=6)
        wrong: str = param("What is wrong with example 3.", default="")

    @property
    def num_examples(self) -> int:
        count: int = self.params.count
        return count

    def examples(self, index: npt.NDArray[np.int64], epoch: npt.NDArray[np.int64]) -> Batch:
        wrong, images = self.params.wrong, []
        for i in index:
            if wrong == "file" and i == 3:
                raise OSError("truncated")
            images.append(np.ones([4 if wrong == "shape" and i == 3 else 5, 2]))
        if wrong == "together" and len(images) > 1:
            raise KeyError("both")
        return {"x": np.stack(images), "weights": np.ones(len(index), np.float32)}


@pytest.mark.parametrize("order", ["shuffled", "sequential", "once"])
def test_an_input_without_examples_is_an_error_that_names_its_settings(order: Any) -> None:
    one = Folder.Params(batch_size=2, count=0, order=order, split="dev").instantiate()
    with pytest.raises(InputError) as error:
        one.batch(0)
    assert str(error.value) == (
        "an input (Folder) has no examples of the split 'dev': its num_examples is 0. Is this "
        "right, relative to the working directory: folder = 'pictures'?"
    )


@pytest.mark.parametrize("order", ["sequential", "once"])
@pytest.mark.parametrize(
    ("wrong", "note"),
    [
        ("file", "index 3 of the data, by Folder.examples"),
        (
            "shape",
            "a batch by Folder.examples: index 3 of the data has x [4, 2], weights [], and others "
            "have x [5, 2], weights []",
        ),
        ("together", "the indices 0, 1, 2, 3, 4 of the data, by Folder.examples"),
    ],
)
def test_an_error_of_examples_has_the_index_of_the_example(
    wrong: str, note: str, order: Any
) -> None:
    one = Folder.Params(batch_size=5, wrong=wrong, order=order).instantiate()
    with pytest.raises(Exception) as error:
        one.batch(0)
    assert error.value.__notes__ == [f"while building {note}"]
