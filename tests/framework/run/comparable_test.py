"""Which evaluations can be compared: digests of data, and the step that later checkpoints know."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tekso.framework.input.arrays import Arrays
from tekso.framework.input.characters import Characters
from tekso.framework.input.held_out import HeldOut
from tekso.framework.input.input import Input
from tekso.framework.input.sources import InMemory
from tekso.framework.params import param
from tekso.framework.run import comparable
from tekso.tasks.lm.bucketed_text import BucketedText


class Batches(Input):
    class Params(Input.Params):
        pass

    batches: tuple[Any, ...] = ()

    @property
    def num_batches(self) -> int:
        return len(self.batches)

    def batch(self, step: int) -> Any:
        return {"x": self.batches[step]}


class Squares(Arrays):
    class Params(Arrays.Params):
        count: int = param("Number of examples.", default=11)
        last: float = param("Value of the last example.", default=0.0)

    def load(self, split: Any) -> Any:
        x = np.arange(self.params.count, dtype=np.float32) ** 2 + (split == "dev")
        x[-1] = self.params.last
        return {"x": x}


def digest_of(input: Any) -> str:
    return str(comparable.described({"dev": input})["eval_data"]["dev"])


def digest(*batches: Any) -> str:
    input = Batches.Params().instantiate()
    input.batches = batches
    return digest_of(input)


def held_out(train: Any, **fields: Any) -> str:
    return digest_of(HeldOut.Params(**fields).instantiate(train=train))


def test_digests_differ_if_values_shapes_types_or_the_number_of_batches_do() -> None:
    one, two = np.arange(6, dtype=np.float32), np.arange(2, dtype=np.float32)
    given = [
        (one, two), (one,), (two, one), (one + 1, two), (one, two + 1), (one.reshape(2, 3), two),
        (one.view(np.int32), two), (one, one, two), (np.array(["a", "b"], object),),
        (np.array(["a", "c"], object),), (),
    ]  # fmt: skip
    found = [digest(*batches) for batches in given]
    assert len(set(found)) == len(found)
    assert found == [digest(*batches) for batches in given]


def test_a_digest_does_not_depend_on_the_batch_size() -> None:
    train = Squares.Params(batch_size=4)
    assert held_out(train) == held_out(train, batch_size=3) == held_out(train, max_batches=3)
    assert held_out(train) == held_out(Squares.Params(batch_size=7))
    others = [train.copy().set(last=1.0), train.copy().set(count=12)]
    parts = [held_out(train, max_batches=2), held_out(train, batch_size=3, max_batches=2)]
    found = [held_out(train), *map(held_out, others), *parts, held_out(train, split="test")]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("fill", ["examples", "tokens"])
def test_a_digest_of_buckets_does_not_depend_on_the_batch_size(fill: str) -> None:
    texts = ["a", "bb", "ccccc", "dddd", "eeeeeeeeeee", "fff"]

    def bucketed(texts: list[str], batch_size: int) -> str:
        fields = {"batch_size": batch_size, "length": 16, "fill": fill, "order": "once"}
        params = BucketedText.Params(corpus=InMemory.Params(train=texts), **fields)
        return digest_of(params.set(tokenizer=Characters.Params()).instantiate())

    assert bucketed(texts, 2) == bucketed(texts, 3)
    assert bucketed(texts, 2) != bucketed([*texts, "g"], 2)
    assert bucketed(texts, 2) != bucketed([*texts[:-1], "ffx"], 2)


def test_a_later_checkpoint_knows_the_step_after_which_figures_are_comparable() -> None:
    a, b = ({"seed": 1, "eval_data": {"dev": data}} for data in "ab")
    assert comparable.resumed(a, a, 5) == a and comparable.comparable_since(a) == -1
    changed = comparable.resumed(a, b, 5)
    assert changed == {**b, "comparable_since": 5} and comparable.comparable_since(changed) == 5
    assert comparable.resumed(changed, b, 9) == changed
    assert comparable.resumed(changed, a, 9) == {**a, "comparable_since": 9}
    assert comparable.resumed({"seed": 1}, b, 9) == b  # of an earlier version


def test_a_new_or_removed_evaluation_changes_no_other() -> None:
    one, two = {"eval_data": {"dev": "a"}}, {"eval_data": {"test": "b", "dev": "a"}}
    assert comparable.changed(one, two) == comparable.changed(two, one) == []


@pytest.mark.parametrize("wrong", [{"comparable_since": "5"}, {"eval_data": ["a"]}])
def test_a_damaged_description_is_an_error(wrong: Any) -> None:
    with pytest.raises(ValueError, match="input: "):
        comparable.check(wrong)
