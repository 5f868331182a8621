"""The index in the data of an example of a batch, in errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tekso.framework.input.arrays import Arrays
from tekso.framework.input.bucketing import BucketedInput
from tekso.framework.input.held_out import HeldOut
from tekso.framework.input.input import Input
from tekso.framework.run.example_index import index_of, naming_indices


class Numbers(Arrays):
    """Every example is its index."""

    def load(self, split: str) -> dict[str, Any]:
        return {"x": np.arange(11)}


class Rows(BucketedInput):
    """Every row begins with its index."""

    def __init__(self, params: Any, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)
        self.assign([1, 4, 2, 5, 1, 3, 2], [2, 5], [3, 2])

    def bucket_rows(self, examples: Any, bound: int) -> dict[str, Any]:
        weights = np.ones(len(examples), np.float32)
        return {"x": np.stack([examples] * bound, 1), "weights": weights}


class Other(Numbers):
    """Has batches of its own."""

    def batch(self, step: int) -> dict[str, Any]:
        return {"x": np.arange(3)}


@pytest.mark.parametrize("order", ["shuffled", "sequential", "once"])
@pytest.mark.parametrize("kind", [Numbers, Rows])
def test_the_index_of_an_example_is_that_of_its_batch(kind: Any, order: str) -> None:
    input = kind.Params(batch_size=4, order=order).instantiate(seed=3)
    for step in range(3 if order == "once" else 7):
        x = input.batch(step)["x"].reshape(input.num_rows(step), -1)[:, 0]
        assert [index_of(input, step, i) for i in range(len(x))] == x.tolist()


def test_an_error_names_the_index_of_its_example_if_the_input_knows_it() -> None:
    train = Numbers.Params(batch_size=4)
    dev = HeldOut.Params(batch_size=3).instantiate(train=train)
    other = Other.Params(batch_size=3).instantiate()
    inputs: dict[str, Input] = {"input": other, "eval_inputs.dev": dev}
    text = "'x' (example {} of {}.batch({}){}) has the id 9"
    for example, path, step, named in [
        (1, "eval_inputs.dev", 2, ", index 7 of the data"),
        (1, "input", 2, ""),
        (1, "eval_inputs.test", 2, ""),
    ]:
        with pytest.raises(ValueError) as error, naming_indices(inputs):
            raise ValueError(text.format(example, path, step, ""))
        assert str(error.value) == text.format(example, path, step, named)
    with pytest.raises(ValueError), naming_indices(inputs):
        raise ValueError
