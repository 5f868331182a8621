"""An input for examples in memory: NumPy arrays by name, or an iterator of examples."""

from __future__ import annotations

import inspect
import itertools
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tekso.framework import files
from tekso.framework.input.data_digests import check_digest
from tekso.framework.input.errors import InputError, NoSplitError
from tekso.framework.input.forms import form_of
from tekso.framework.input.input import Batch, ExampleInput, Signature
from tekso.framework.input.loaded import WANT, as_numbers, check_examples
from tekso.framework.input.sources import digest
from tekso.framework.input.splits import Split, load_split, missing_split
from tekso.framework.params import param
from tekso.framework.source_lines import place_of

WEIGHTS = "weights"
_OVERHEAD_BYTES = 250  # memory of a NumPy array object, in addition to its numbers


_MOST_LOADED_TWICE = 64 * 1024**2  # bytes


class Arrays(ExampleInput):
    """Examples in memory, returned by the method `load`.

        class DigitPictures(Arrays):
            def load(self, split):
                x, labels = load_digits(return_X_y=True)
                rows = slice(1347) if split == "train" else slice(1347, None)
                return {"x": x[rows], "labels": labels[rows]}

        DigitPictures.Params(batch_size=64)

    `load(split)` is called at least once for each split that is used ("train", "dev", "test"). It
    returns either {name: array [examples, ...]}, or an iterable of examples {name: value}, such as
    a `tf.data.Dataset` or a generator. An iterable is read once, to its end, and stacked.

    For a split that the data does not have, `load` raises `NoSplitError` (of
    `tekso.framework.input.errors`), or a KeyError with the name of the split.

    `load` must return the same examples in every call, because a batch is a function of the
    examples, the seed and the step, and the run must be resumable. The run stores a digest of the
    examples in its logdir, and later rejects different examples.

    Batches contain the arrays by name, and "weights" [batch] float32: 1 for an example, 0 for
    padding. If `load` returns "weights", they replace the ones. float64 is converted to float32;
    other dtypes are unchanged.

    Attributes:
      arrays: the examples of the split, {name: array [examples, ...]}, without added weights.
      class_names: names of the classes in the order of their numbers, for decoding. Set it in the
        subclass, or as `self.class_names` in `load`. (): the numbers are shown.
    Raises:
      NoSplitError: there are no examples.
      InputError: all examples have the weight 0; arrays have different lengths;
        values are not numbers, masked, not finite or too large for float32; examples have
        different shapes; an iterator has more than `max_gigabytes`; the examples differ from those
        when the run began.
    """

    class Params(ExampleInput.Params):
        """Params of Arrays."""

        max_gigabytes: float = param(
            "Maximum size in memory of the examples of an iterator; more is an error.",
            default=4.0,
        )

    arrays: dict[str, np.ndarray]
    class_names: tuple[str, ...] = ()

    def __init__(self, params: Any, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)
        split = self.params.split
        self._what = f"{type(self).__name__}.load({split!r}){place_of(type(self).load)}"
        self._check_takes_split(split)
        found = load_split(self, split)
        if isinstance(found, Mapping):
            self.arrays = {
                name: as_numbers(self._what, name, value) for name, value in found.items()
            }
        else:
            with missing_split(self, split):  # a generator begins when it is read
                self.arrays = self._read(found)
        if isinstance(found, Mapping):
            self._check_loads_again(split)
        self._check()

    def _check_takes_split(self, split: Split) -> None:
        """Checks that `load` can be called with a split.

        Raises:
          InputError: it cannot.
        """
        try:
            inspect.signature(self.load).bind(split)
        except TypeError:
            raise InputError(
                f"{self._what}: load is called with the name of the split, but cannot be: write "
                "def load(self, split)"
            ) from None

    def _check_loads_again(self, split: Split) -> None:
        """Checks that `load` returns the same arrays in a second call, if they are small.

        Raises:
          InputError: it does not.
        """
        if sum(array.nbytes for array in self.arrays.values()) > _MOST_LOADED_TWICE:
            return
        first, arrays = self.fingerprint(), self.arrays
        found = self.load(split)
        self.arrays = {name: as_numbers(self._what, name, value) for name, value in found.items()}
        if self.fingerprint() != first:
            raise InputError(
                f"{self._what} returns different arrays in each call: use a fixed seed for a "
                "random split, order or augmentation (np.random.default_rng(0)), and do not change "
                "arrays in place. Held-out examples might be training examples otherwise"
            )
        self.arrays = arrays

    def load(self, split: Split) -> Any:
        """Returns the examples of a split; see the class.

        Shapes:
          returns: {name: array [examples, ...]}, or an iterable of {name: value [...]}
        Raises:
          NoSplitError: the data has no such split.
        """
        raise NotImplementedError(f"{type(self).__name__} has no load(split)")

    @property
    def num_examples(self) -> int:
        """Number of examples in the split."""
        return len(next(iter(self.arrays.values())))

    def examples(self, index: npt.NDArray[np.int64], epoch: npt.NDArray[np.int64]) -> Batch:
        """See `ExampleInput`."""
        del epoch
        batch = {name: array[index] for name, array in self.arrays.items()}
        batch.setdefault(WEIGHTS, np.ones(len(index), np.float32))
        return batch

    def form(self) -> Signature:
        """Returns {name: (shape, dtype)} of one example, including weights."""
        first = np.zeros(1, np.int64)
        return form_of(self.examples(first, first))

    def fingerprint(self) -> str:
        """Returns a digest of the examples: names, types, shapes and values."""

        def parts() -> Iterable[bytes]:
            for name, array in sorted(self.arrays.items()):
                yield f"{name} {array.dtype} {array.shape}".encode()
                yield np.ascontiguousarray(array).tobytes()

        return digest(parts())

    def check_unchanged(self) -> None:
        """See `Input`: compares a digest of the examples with the one in `assets_dir`.

        Raises:
          InputError: the digests differ.
        """
        if self.assets_dir is None:
            return
        of_data = self.params.copy().set(batch_size=1, order="once", max_gigabytes=1.0)
        crc = zlib.crc32(of_data.to_text().encode())  # of class, split and Params of the subclass
        path = files.join(self.assets_dir, f"arrays_{self.params.split}_{crc:08x}.json")
        check_digest(
            path,
            self.fingerprint(),
            self.describe(),
            what=f"{self._what} returns different examples than before in this logdir",
            remedy="It must return the same examples in every call: use a fixed seed for a random "
            "split or order. If the data has changed, use a new --logdir; there, "
            "--checkpoint=PATH evaluates checkpoints of this logdir",
        )

    def describe(self) -> str:
        """Returns a one-line description of the data."""
        shapes = ", ".join(
            f"{name} {list(array.shape[1:])} {array.dtype}" for name, array in self.arrays.items()
        )
        name, count = type(self).__name__, f"{self.num_examples:,} examples"
        return f"{name}, {self.params.split}: {count} of {shapes}"

    def _read(self, found: Any) -> dict[str, np.ndarray]:
        """Returns the stacked examples of an iterable.

        Raises:
          InputError: it is not an iterable of examples, is too large, or its examples differ in
            names, shapes or dtypes.
        """
        check_examples(self._what, found)
        rows: dict[str, list[np.ndarray]] = {}
        size_bytes, most_bytes = 0, self.params.max_gigabytes * 1e9
        for number, example in enumerate(found):
            if not isinstance(example, Mapping):
                cure = ""
                if isinstance(example, tuple):
                    cure = 'dataset.map(lambda x, y: {"x": x, "labels": y}) names its elements; '
                raise InputError(
                    f"{self._what} yields a {type(example).__name__} as example {number}; "
                    f"{cure}{WANT}"
                )
            one = {name: as_numbers(self._what, name, value) for name, value in example.items()}
            if not number:
                rows = {name: [] for name in one}
            self._check_alike(number, one, rows)
            for name, array in one.items():
                rows[name].append(array)
                size_bytes += array.nbytes + _OVERHEAD_BYTES
            if size_bytes > most_bytes:
                raise InputError(
                    f"{self._what} has more than {number:,} examples, which take more than "
                    f"{self.params.path_of('max_gigabytes')}={self.params.max_gigabytes:g} GB: an "
                    "iterator must end (a tf.data.Dataset without repeat()), and its examples must "
                    "fit in memory; if they do, set a higher limit"
                )
        return {name: np.stack(arrays) for name, arrays in rows.items()}

    def _check_alike(
        self, number: int, one: Mapping[str, np.ndarray], rows: Mapping[str, list[np.ndarray]]
    ) -> None:
        """Raises an InputError unless names, shapes and dtypes are those of the first example."""
        if set(one) != set(rows):
            raise InputError(
                f"{self._what}: example {number} has {_listed(one)}, but the first example has "
                f"{_listed(rows)}"
            )
        for name, array in one.items():
            first = rows[name][0] if rows[name] else array
            if (array.shape, array.dtype) != (first.shape, first.dtype):
                raise InputError(
                    f"{self._what}: {name!r} is {_form(array)} in example {number}, but "
                    f"{_form(first)} in the first example: pad examples to one shape, and do not "
                    "batch a tf.data.Dataset"
                )

    def _check(self) -> None:
        """Checks that there are examples, the same number in every array, with valid values.

        Raises:
          InputError: there are not.
        """
        scalars = [name for name, array in self.arrays.items() if not array.ndim]
        if scalars:
            raise InputError(f"{self._what}: {_listed(scalars)} has no example dim; {WANT}")
        sizes = {name: len(array) for name, array in self.arrays.items()}
        if len(set(sizes.values())) > 1:
            raise InputError(
                f"{self._what}: arrays have different numbers of examples: "
                + ", ".join(f"{name!r} {size:,}" for name, size in sizes.items())
            )
        if sizes and not any(sizes.values()):
            shapes = ", ".join(f"{name!r} {list(a.shape)}" for name, a in self.arrays.items())
            raise NoSplitError(
                f"{self._what} has no examples: its arrays have no rows ({shapes}). Is the file "
                "empty, or does the split contain nothing?"
            )
        if not sizes:
            raise NoSplitError(
                f"{self._what} has no examples. An iterator can be read only once: if it is "
                f"created outside of load(), create it inside; otherwise {WANT}"
            )
        for name, array in self.arrays.items():
            self._check_finite(name, array)
        if WEIGHTS in self.arrays:
            weights = self.arrays[WEIGHTS].astype(np.float32)
            if (weights < 0).any():
                raise InputError(f"{self._what}: {WEIGHTS!r} has values below 0")
            if not weights.any():
                raise InputError(
                    f"{self._what}: {WEIGHTS!r} is 0 for every example, so none would count. Set "
                    "a weight above 0 for the examples that count"
                )
            self.arrays[WEIGHTS] = weights

    def _check_finite(self, name: str, array: np.ndarray) -> None:
        if array.dtype.kind in "bui":
            return
        finite = np.isfinite(array).reshape(len(array), -1).all(axis=1)
        if not finite.all():
            wrong = np.flatnonzero(~finite)
            which = ", ".join(str(i) for i in wrong[:5]) + (", …" if len(wrong) > 5 else "")
            raise InputError(
                f"{self._what}: {name!r} has NaN or infinite values in {len(wrong):,} examples "
                f"({which}): remove these examples, or replace the values (np.nan_to_num)"
            )


def _listed(names: Iterable[str]) -> str:
    shown = [repr(name) for name in itertools.islice(names, 10)]
    return ", ".join(shown) or "no names"


def _form(array: np.ndarray) -> str:
    return f"{list(array.shape)} {array.dtype}"
