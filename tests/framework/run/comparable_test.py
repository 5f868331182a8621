"""Which evaluations can be compared: digests of data, and the step that later checkpoints know."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tekso.framework.run import comparable


class Batches:
    def __init__(self, *batches: Any) -> None:
        self._batches, self.num_batches = batches, len(batches)

    def batch(self, step: int) -> Any:
        return {"x": self._batches[step]}


def digest(*batches: Any) -> str:
    found = comparable.described({"dev": Batches(*batches)})  # type: ignore[dict-item]
    return str(found["eval_data"]["dev"])


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
