"""Arrays: batches of what `load` returns, padding, and a message for everything that is wrong."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.input.arrays import Arrays
from tekso.framework.input.errors import InputError, NoSplitError
from tekso.framework.input.held_out import HeldOut
from tekso.framework.input.mixtures import Mixture
from tekso.framework.params import Params, param


class Given(Arrays):
    """Returns what the test says."""

    class Params(Arrays.Params):
        """Params of Given."""

        size: int = param("A setting of its own.", default=3)

    made: Callable[[str], Any]

    def load(self, split: str) -> Any:
        """Returns it."""
        return type(self).made(split)


def given(value: Any, **kwargs: Any) -> Any:
    """An input whose `load` returns a value, or what a function makes of the split."""
    Given.made = staticmethod(value if callable(value) else lambda split: value)  # type: ignore
    assets_dir = kwargs.pop("assets_dir", None)
    params = Given.Params(**{"batch_size": 2, "order": "sequential", **kwargs})
    return params.instantiate(seed=3, assets_dir=assets_dir)


def x_of(count: int) -> np.ndarray:
    return np.arange(count * 2, dtype=np.float32).reshape(count, 2)


@pytest.mark.parametrize("way", ["random order", "in place"])
def test_arrays_that_differ_in_each_call_are_refused(way: str) -> None:
    rng, data = np.random.default_rng(), x_of(40)

    def load(split: str) -> dict[str, np.ndarray]:
        if way == "random order":
            return {"x": rng.permutation(data)}
        np.divide(data, 10, out=data)
        return {"x": data}

    with pytest.raises(InputError, match=r"^Given.load\('train'\) \(.*\) returns different arrays"):
        given(load)


def test_a_pass_has_every_example_once_and_the_padding_has_weight_0() -> None:
    one = given({"x": x_of(300), "labels": np.arange(300)}, batch_size=32, order="once")
    batches = [one.batch(step) for step in range(one.num_batches)]
    assert len(batches) == 10
    assert {name: (a.shape, a.dtype) for name, a in batches[-1].items()} == {
        "x": ((32, 2), np.float32),
        "labels": ((32,), np.int64),
        "weights": ((32,), np.float32),
    }
    weights = np.concatenate([batch["weights"] for batch in batches])
    np.testing.assert_array_equal(weights, np.arange(320) < 300)
    labels = np.concatenate([batch["labels"] for batch in batches])
    np.testing.assert_array_equal(labels[weights > 0], np.arange(300))
    assert one.is_padding(9).sum() == 20


def test_weights_of_the_data_are_kept_and_cleared_in_padding_alone() -> None:
    weights = np.array([1, 2, 3])
    one = given({"x": x_of(3), "weights": weights}, order="once")
    assert one.batch(1)["weights"].tolist() == [3.0, 0.0]
    assert one.batch(1)["weights"].dtype == np.float32
    assert one.arrays["weights"].tolist() == weights.tolist() == [1, 2, 3]


def generator(split: str) -> Iterator[dict[str, Any]]:
    return ({"x": row, "labels": i} for i, row in enumerate(x_of(5)))


def dataset(split: str) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices({"x": x_of(5), "labels": np.arange(5)})


def listed(split: str) -> list[dict[str, Any]]:
    return list(generator(split))


@pytest.mark.parametrize("form", [generator, dataset, listed])
def test_examples_one_by_one_are_the_same_as_arrays(form: Any) -> None:
    arrays = given({"x": x_of(5), "labels": np.arange(5)})
    one = given(form)
    assert one.fingerprint() == arrays.fingerprint()
    for step in (0, 4, 2, 0):
        found, expected = one.batch(step), arrays.batch(step)
        assert found.keys() == expected.keys()
        for name in found:
            np.testing.assert_array_equal(found[name], expected[name])


def test_types_that_stay_and_float64() -> None:
    kinds = (np.bool_, np.uint8, np.int64, np.float16, np.float32, np.float64)
    one = given({kind.__name__: np.ones(2, kind) for kind in kinds})
    found = [str(array.dtype) for array in one.arrays.values()]
    assert found == ["bool", "uint8", "int64", "float16", "float32", "float32"]
    assert given({"x": [[1, 2], [3, 4]], "y": tf.ones([2])}).num_examples == 2


def by_split(split: str) -> Any:
    return {"train": {"x": x_of(3)}, "valid": {"x": x_of(2)}}[split]


def rows_by_split(split: str) -> Any:
    yield from ({"x": row} for row in by_split(split)["x"])


@pytest.mark.parametrize("load", [by_split, rows_by_split])
def test_a_split_that_load_looks_up_in_vain_is_named_with_the_names_that_it_gets(load: Any) -> None:
    train = given(load)
    with pytest.raises(NoSplitError) as error:
        HeldOut.Params().instantiate(train=train.params)
    text = str(error.value)
    assert text.startswith("Given.load('dev') (") and "arrays_test.py" in text
    assert ") raises KeyError: 'dev', so the data has no such split." in text
    assert "load is called with 'train', 'dev' or 'test': return its examples, or" in text
    assert text.endswith("or evaluate another split, as in HeldOut.Params(split='test')")


def test_other_keys_that_load_looks_up_are_its_own_errors() -> None:
    with pytest.raises(KeyError, match="'labels'"):
        given(lambda split: {"x": {"train": x_of(3)}["labels"]})


def test_held_out_asks_for_the_other_split_and_its_batch_may_be_larger_than_the_data() -> None:
    asked = []

    def load(split: str) -> Any:
        asked.append(split)
        return {"x": x_of(3 if split == "dev" else 7)}

    train = given(load)
    dev = HeldOut.Params(batch_size=8).instantiate(train=train.params)
    assert list(dict.fromkeys(asked)) == ["train", "dev"]
    assert dev.num_batches == 1
    assert dev.batch(0)["weights"].tolist() == [1, 1, 1, 0, 0, 0, 0, 0]


def test_params_are_text_and_say_nothing_of_the_arrays() -> None:
    text = given({"x": x_of(3)}).params.to_text()
    assert len(text) < 1000
    assert Params.from_text(text).owner is Given


class Frame:
    """What tells a DataFrame, which need not be installed: a column of numbers, one of texts."""

    columns = ("a", "b")
    dtypes = to_numpy = None

    def __getitem__(self, name: str) -> np.ndarray:
        return np.array([1.0, 2.0]) if name == "a" else np.array(["c", "d"], object)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.array([[1.0, "c"], [2.0, "d"]], object)

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)


class Sparse:
    """What tells a sparse matrix of SciPy."""

    def toarray(self) -> np.ndarray:
        return np.eye(2)


RAGGED = [[1.0], [1.0, 2.0]]
NAN = np.array([[0.0, 1.0], [np.nan, 0.0], [np.inf, 0.0]])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"x": x_of(3), "labels": np.arange(4)}, "numbers of examples: 'x' 3, 'labels' 4"),
        ({}, "has no examples"),
        ({"x": x_of(0)}, r"has no examples: its arrays have no rows \('x' \[0, \d+\]\)"),
        (lambda split: iter([]), "An iterator can be read only once"),
        ({"x": np.array([1, None, 2])}, r"'x' has missing values \(NoneType\): fill them in"),
        (
            {"x": np.array([Fraction(1), 2])},
            r"'x' contains Python objects \(Fraction, int\): convert",
        ),
        (
            {"x": [{"a": 1}, {"a": 1, "b": 2}]},
            r"'x' contains dicts with the keys 'a', 'b': make an array of each key, with a value "
            r"for every example: \{'a': 1\} has no 'b'$",
        ),
        (
            {"x": [{"a": 1, "b": [2]}] * 2},
            r"'x' contains dicts with the keys 'a', 'b': make an array of each key$",
        ),
        ({"x": RAGGED}, "'x' has rows of different lengths: pad"),
        ({"x": np.array([[1], [1, 2]], object)}, "'x' has rows of different lengths: pad"),
        (
            {"x": np.array(["a", "b"])},
            r"'x' contains texts: .* np.unique\(…, return_inverse=True\)",
        ),
        ({"x": np.array(["a", "b"], object)}, r"'x' contains texts: number them, .* np.unique"),
        ({"x": np.array(["a", None])}, r"'x' contains texts and other values \(NoneType\)"),
        ({"x": Frame()}, r"'x' is a Frame with columns that are not numbers \('b'\): number"),
        ({"x": Sparse()}, r"'x' is a Sparse, which is not an array: use value.toarray\(\)"),
        ({"x": {"a": 1}}, "'x' is a dict, which is not an array"),
        (
            {"x": np.ma.masked_equal([[1, 2], [3, 3]], 3)},
            r"masked array, and 2 of .*\(np.ma.filled\)",
        ),
        (
            {"x": np.array([1, 1e300, -1e39])},
            "'x' has 2 values too large for float32.* example 1e.300",
        ),
        ({"x": np.array([1 + 2j])}, "has the dtype complex64|has the dtype complex128"),
        ({"x": NAN}, r"'x' has NaN or infinite values in 2 examples \(1, 2\)"),
        ({"labels": np.array([0.0, np.nan])}, r"'labels' has NaN .* in 1 examples \(1\)"),
        ({"x": np.float32(3)}, "'x' has no example dim"),
        ({3: x_of(2)}, "the name 3 is not a str"),
        ({"x": x_of(2), "weights": np.array([1, -1])}, "'weights' has values below 0"),
        ({"x": x_of(2), "weights": np.zeros(2)}, "'weights' is 0 for every example"),
        (None, "returns None; return a dict of arrays"),
        (3, "returns a int; return a dict"),
        (x_of(3), "returns a ndarray; return a dict"),
        (Sparse(), "returns a Sparse; return a dict"),
        (Frame(), r"returns a Frame: return its columns as arrays, for example \{\"x\": frame"),
        (
            (x_of(3), [1, 2, 3]),
            r"returns a tuple \(ndarray, list\): name the arrays; return a dict",
        ),
        (
            [(1.0, 2)],
            "yields a tuple as example 0; dataset.map.* names its elements; return a dict",
        ),
        ([{"x": RAGGED[0]}, {"x": RAGGED[1]}], r"'x' is \[2\] float32 in example 1, but \[1\]"),
        ([{"x": 1.0}, {"x": 1.0, "y": 2}], "example 1 has 'x', 'y', but the first example has 'x'"),
        (lambda split: dataset(split).repeat(), "a dataset without an end: remove repeat"),
        (lambda split: dataset(split).batch(2), "do not batch a tf.data.Dataset"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(value: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        given(value)
    assert "Given.load('train')" in str(error.value) and "arrays_test.py" in str(error.value)


def test_an_endless_iterator_ends_in_an_error() -> None:
    endless = ({"x": 1.0} for _ in itertools.count())
    with pytest.raises(InputError, match=r"max_gigabytes=1e-05 GB: an iterator must end"):
        given(endless, max_gigabytes=1e-5)


def test_an_iterator_that_is_made_once_is_empty_at_its_second_reading() -> None:
    once = generator("train")
    train = given(lambda split: once)
    with pytest.raises(InputError, match="created outside of load"):
        HeldOut.Params().instantiate(train=train.params)


def test_load_has_to_be_there() -> None:
    with pytest.raises(NotImplementedError, match=r"Arrays has no load\(split\)"):
        Arrays.Params(batch_size=2).instantiate()


def unchanged(value: Any, folder: Path, **kwargs: Any) -> None:
    given(value, assets_dir=str(folder), **kwargs).check_unchanged()


def test_a_resumed_run_refuses_other_examples(tmp_path: Path) -> None:
    unchanged({"x": x_of(3)}, tmp_path)
    unchanged({"x": x_of(3)}, tmp_path, batch_size=3, order="once")
    unchanged({"x": x_of(4)}, tmp_path, split="dev")
    unchanged({"x": x_of(4)}, tmp_path, size=4)  # other Params, other data
    assert len(list(tmp_path.iterdir())) == 3
    message = (
        r"different examples than before in this logdir: Given, train: 3 .*, with different values"
    )
    with pytest.raises(InputError, match=message):
        unchanged({"x": x_of(3)[::-1]}, tmp_path)
    with pytest.raises(InputError, match=r"logdir: then Given, train: 3 .*; now Given, train: 4"):
        unchanged({"x": x_of(4)}, tmp_path)
    for path in tmp_path.iterdir():
        path.write_text("{")
    with pytest.raises(InputError, match=r"arrays_train_.*json is damaged .* remove it"):
        unchanged({"x": x_of(3)}, tmp_path)


def test_held_out_data_and_parts_of_mixtures_are_checked_too(tmp_path: Path) -> None:
    train = given({"x": x_of(3)}, assets_dir=str(tmp_path))
    opened = {"train": train.params, "assets_dir": str(tmp_path)}
    HeldOut.Params().instantiate(**opened).check_unchanged()
    parts = Mixture.Params(batch_size=2, inputs=[train.params])
    parts.instantiate(assets_dir=str(tmp_path)).check_unchanged()
    Given.made = staticmethod(lambda split: {"x": x_of(4)})  # type: ignore[assignment]
    for params in (HeldOut.Params(), parts):
        with pytest.raises(InputError, match="different examples than before"):
            params.instantiate(**opened).check_unchanged()


def test_masked_arrays_that_hide_nothing_are_data() -> None:
    assert given({"x": np.ma.masked_equal([1, 2], 3)}).arrays["x"].tolist() == [1, 2]


@pytest.mark.filterwarnings("error")
def test_float64_beyond_float32_is_refused_without_a_warning_of_numpy() -> None:
    with pytest.raises(InputError, match=r"too large for float32 \(maximum"):
        given({"x": np.array([1e39, np.nan])})
    with pytest.raises(InputError, match="'x' has NaN or infinite values"):
        given({"x": np.array([np.inf, 1.0])})


def test_weights_are_0_in_some_batches_but_not_in_all() -> None:
    one = given({"x": x_of(4), "weights": np.array([0, 0, 0, 1])})
    assert one.batch(0)["weights"].tolist() == [0, 0]


def test_a_load_that_does_not_take_the_split_is_an_error_that_says_what_to_write() -> None:
    class NoSplit(Arrays):
        def load(self) -> Any:  # type: ignore[override]
            return {"x": np.ones([4, 2])}

    what = r"NoSplit\.load\('train'\) \(.*:\d+\): .*: write def load\(self, split\)$"
    with pytest.raises(InputError, match=what):
        NoSplit.Params(batch_size=2).instantiate()
