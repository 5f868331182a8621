"""Examples in memory: NumPy arrays by name, or an iterator of examples."""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tekso.framework import files
from tekso.framework.input.input import Batch, ExampleInput, Signature, form_of
from tekso.framework.input.loaded import WANT, as_numbers, check_examples
from tekso.framework.input.skips import InputError
from tekso.framework.input.sources import digest
from tekso.framework.input.splits import Split
from tekso.framework.params import param
from tekso.framework.source_lines import place_of

WEIGHTS = "weights"
_OVERHEAD_BYTES = 250  # of a value that is an object of its own, besides its numbers


class Arrays(ExampleInput):
    """Examples that a method returns, kept in memory.

        class DigitPictures(Arrays):
            def load(self, split):
                x, labels = load_digits(return_X_y=True)
                rows = slice(1347) if split == "train" else slice(1347, None)
                return {"x": x[rows], "labels": labels[rows]}

        DigitPictures.Params(batch_size=64)

    `load(split)` is called at least once for each split that is used ("train", "dev", "test"). It
    returns either {name: array [examples, ...]}, or an iterable of examples {name: value}, such as
    a `tf.data.Dataset` or a generator. An iterable is read once, to its end, and stacked.

    `load` must return the same examples in every call: a batch is a function of the examples, the
    seed and the step, so that a run can be resumed. The run keeps a digest of the examples in its
    logdir and refuses other ones later.

    Batches hold the arrays by name, and "weights" [batch] float32: 1 for an example, 0 for padding.
    If `load` returns "weights", they are used in place of the ones. float64 becomes float32; other
    types stay.

    Attributes:
      arrays: the examples of the split, {name: array [examples, ...]}, without added weights.
    Raises:
      InputError: there are no examples, or all have the weight 0; arrays of different lengths;
        values that are no numbers, masked, not finite or too large for float32; examples of
        different shapes; an iterator of more than `max_gigabytes`; other examples than when the run
        began.
    """

    class Params(ExampleInput.Params):
        """Params of Arrays."""

        max_gigabytes: float = param(
            "Size of the examples of an iterator in memory, beyond which reading it ends with an "
            "error.",
            default=4.0,
        )

    arrays: dict[str, np.ndarray]

    def __init__(self, params: Any, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)
        split = self.params.split
        self._what = f"{type(self).__name__}.load({split!r}){place_of(type(self).load)}"
        found = self.load(split)
        if isinstance(found, Mapping):
            self.arrays = {
                name: as_numbers(self._what, name, value) for name, value in found.items()
            }
        else:
            self.arrays = self._read(found)
        self._check()

    def load(self, split: Split) -> Any:
        """Returns the examples of a split; see the class.

        Shapes:
          returns: {name: array [examples, ...]}, or an iterable of {name: value [...]}
        """
        raise NotImplementedError(f"{type(self).__name__} has no load(split)")

    @property
    def num_examples(self) -> int:
        """Examples of the split."""
        return len(next(iter(self.arrays.values())))

    def examples(self, index: npt.NDArray[np.int64], epoch: npt.NDArray[np.int64]) -> Batch:
        """See `ExampleInput`."""
        del epoch
        batch = {name: array[index] for name, array in self.arrays.items()}
        batch.setdefault(WEIGHTS, np.ones(len(index), np.float32))
        return batch

    def form(self) -> Signature:
        """Returns shape and dtype of every array that `examples` returns, of one example."""
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
          InputError: there is another one.
        """
        if self.assets_dir is None:
            return
        of_data = self.params.copy().set(batch_size=1, order="once", max_gigabytes=1.0)
        crc = zlib.crc32(of_data.to_text().encode())  # of the class, the split and its own Params
        path = files.join(self.assets_dir, f"arrays_{self.params.split}_{crc:08x}.json")
        about = {"data": self.describe(), "digest": self.fingerprint()}
        if not files.exists(path):
            files.write_atomically(path, json.dumps(about, indent=1, ensure_ascii=False) + "\n")
            return
        try:
            kept = json.loads(files.read(path))
            digest_then, data_then = kept["digest"], kept["data"]
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path} is damaged ({error}): remove it") from error
        if digest_then == about["digest"]:
            return
        difference = f"then {data_then}; now {about['data']}"
        if data_then == about["data"]:
            difference = f"{data_then}, with other values or in another order"
        raise InputError(
            f"{self._what} returns other examples than before in this logdir: {difference}. It has "
            "to return the same ones in every call: give a split or order that is drawn with a "
            "fixed seed. If the data has changed, use a new --logdir; there, --checkpoint=PATH "
            "evaluates checkpoints of this one"
        )

    def describe(self) -> str:
        """Returns the data in a line."""
        shapes = ", ".join(
            f"{name} {list(array.shape[1:])} {array.dtype}" for name, array in self.arrays.items()
        )
        name, count = type(self).__name__, f"{self.num_examples:,} examples"
        return f"{name}, {self.params.split}: {count} of {shapes}"

    def _read(self, found: Any) -> dict[str, np.ndarray]:
        """Returns the examples of an iterable, stacked.

        Raises:
          InputError: it is none, does not end, or its examples are not alike.
        """
        check_examples(self._what, found)
        rows: dict[str, list[np.ndarray]] = {}
        size_bytes, most_bytes = 0, self.params.max_gigabytes * 1e9
        for number, example in enumerate(found):
            if not isinstance(example, Mapping):
                cure = ""
                if isinstance(example, tuple):
                    cure = 'dataset.map(lambda x, y: {"x": x, "labels": y}) names its parts; '
                raise InputError(
                    f"{self._what} gives a {type(example).__name__} as example {number}; "
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
                    "iterator has to end (a tf.data.Dataset without repeat()), and its examples "
                    "have to fit in memory; if they do, set a higher limit"
                )
        return {name: np.stack(arrays) for name, arrays in rows.items()}

    def _check_alike(
        self, number: int, one: Mapping[str, np.ndarray], rows: Mapping[str, list[np.ndarray]]
    ) -> None:
        """Raises an InputError for an example of other names, shapes or types than the first."""
        if set(one) != set(rows):
            raise InputError(
                f"{self._what}: example {number} has {_listed(one)}, and the first example has "
                f"{_listed(rows)}"
            )
        for name, array in one.items():
            first = rows[name][0] if rows[name] else array
            if (array.shape, array.dtype) != (first.shape, first.dtype):
                raise InputError(
                    f"{self._what}: {name!r} of example {number} is {_form(array)}, and of the "
                    f"first example {_form(first)}: pad examples to one shape, and leave a "
                    "tf.data.Dataset unbatched"
                )

    def _check(self) -> None:
        """Checks that there are examples, and as many in every array.

        Raises:
          InputError: it is not so.
        """
        scalars = [name for name, array in self.arrays.items() if not array.ndim]
        if scalars:
            raise InputError(f"{self._what}: {_listed(scalars)} has no dim of examples; {WANT}")
        sizes = {name: len(array) for name, array in self.arrays.items()}
        if len(set(sizes.values())) > 1:
            raise InputError(
                f"{self._what}: arrays have different numbers of examples: "
                + ", ".join(f"{name!r} {size:,}" for name, size in sizes.items())
            )
        if not sizes or not any(sizes.values()):
            raise InputError(
                f"{self._what} has no examples. An iterator can be read once: if it is made "
                f"outside of load(), make it inside; otherwise {WANT}"
            )
        for name, array in self.arrays.items():
            self._check_finite(name, array)
        if WEIGHTS in self.arrays:
            weights = self.arrays[WEIGHTS].astype(np.float32)
            if (weights < 0).any():
                raise InputError(f"{self._what}: {WEIGHTS!r} has values below 0")
            if not weights.any():
                raise InputError(
                    f"{self._what}: {WEIGHTS!r} is 0 for every example, so none would count. Give "
                    "the examples that count a weight above 0"
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
                f"({which}): leave these out, or replace them (np.nan_to_num)"
            )


def _listed(names: Iterable[str]) -> str:
    shown = [repr(name) for name in itertools.islice(names, 10)]
    return ", ".join(shown) or "no names"


def _form(array: np.ndarray) -> str:
    return f"{list(array.shape)} {array.dtype}"
